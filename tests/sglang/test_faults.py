"""Faults that nobody thought of: they too end in a status and a message, and tell nothing."""

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from encoders import EncoderConfig
from encoders.errors import EncoderError, Overloaded, ReplicaLost
from serve_app.endpoints import ApiLimits
from serve_app.ingress import Ingress
from serve_app.service import Embedding, ImageItem, Wanted
from serve_app.sglang.settings import SGLangSettings
from tests.sglang.conftest import listening
from tests.sglang.parts import body, png
from tests.sglang.receiver import Receiver

SECRET = "/opt/secret/weights"


class Broken:
    """A service in which one thing always goes wrong."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.wanted = list[Wanted]()

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted
    ) -> list[Embedding]:
        self.wanted.append(wanted)
        raise self.error


@pytest.fixture
def broken(request: pytest.FixtureRequest) -> Broken:
    return Broken(request.param)


@pytest.fixture
def url(broken: Broken) -> Iterator[str]:
    service: Any = broken
    settings = SGLangSettings(queue_for_s=0.5)
    config = EncoderConfig.load("qwen3-vl-2b")
    ingress = Ingress(lambda: service, config, ApiLimits(), settings)
    with listening(ingress.__serve_build_asgi_app__()) as address:
        yield address


@pytest.mark.parametrize(
    ("broken", "status", "said"),
    [
        (RuntimeError(SECRET), 500, "internal error"),
        (EncoderError(SECRET), 500, "internal error"),
        (ReplicaLost("a replica went away; try again"), 503, "a replica went away"),
        (Overloaded("the queue is full"), 503, "the queue is full"),
    ],
    indirect=["broken"],
    ids=lambda x: type(x).__name__,
)
def test_a_fault_is_a_status_and_a_message_and_tells_nothing_of_itself(
    url: str,
    http: httpx.Client,
    receiver: Receiver,
    broken: Broken,
    status: int,
    said: str,
) -> None:
    reply = http.post(f"{url}/encode", json=body([png(1)], receiver))

    message = receiver.take()
    assert reply.status_code == message.data.error_code == status
    assert said in reply.json()["message"]
    assert message.data.error_msg == reply.json()["message"]
    assert SECRET not in reply.text
    assert list(receiver.rest()) == []
    assert set(broken.wanted) == {Wanted("patch", "bfloat16")}
    assert (len(broken.wanted) > 1) == isinstance(broken.error, Overloaded), (
        "it was not offered again"
    )
