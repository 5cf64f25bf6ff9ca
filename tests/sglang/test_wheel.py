"""The receivers of a real SGLang 0.5.23 against this service; docs/sglang.md has how to install it.

Its configuration, which a whole server would set up, is given to them here; the code that calls us,
listens, unpickles, checks and joins is theirs.
"""

import asyncio
import importlib
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from encoders.encoder import Encoder
from tests.sglang.conftest import Serve, listening, make_ingress
from tests.sglang.parts import data_uri, png, right
from tests.sglang.test_tokenizer import CLOSE, FAILS_WITHIN_S

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore"),  # SGLang's warnings are its business
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]


class Processor:
    """Where the receivers hand over what came."""

    prefer_tokenized_input = False

    def get_validated_mm_data(self, prompt: str, embedding: Any, **meta: Any) -> SimpleNamespace:
        return SimpleNamespace(
            prompt=prompt, embedding=embedding, meta=meta, input_ids=[1], mm_items=[]
        )


@pytest.fixture(scope="module")
def theirs() -> Any:
    """SGLang's module of receivers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("sglang.srt.disaggregation.encoder.receiver")


@pytest.fixture
def configure(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the transfer backend, and puts everything on loopback."""

    def with_backend(backend: str) -> None:
        monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")
        monkeypatch.setenv("SGLANG_ENCODER_RECV_TIMEOUT", "20")
        parts = {
            "get_disagg": {"encoder_transfer_backend": backend, "encoder_urls": []},
            "get_serving": {"host": "127.0.0.1"},
            "get_parallel": {"pp_rank": 0, "tp_rank": 0, "tp_size": 1, "nnodes": 1},
            "get_device": {"gpu_id": 0},
        }
        parts["get_parallel"]["tp_group"] = SimpleNamespace(
            cpu_group=None, all_gather_object=lambda value: [value]
        )
        for name, values in parts.items():
            monkeypatch.setattr(theirs, name, lambda values=values: SimpleNamespace(**values))

    return with_backend


@pytest.fixture
def make(theirs: Any) -> Iterator[Any]:
    """Makes receivers, and closes what they leave open."""
    made = list[Any]()

    def create(urls: list[str], scheduler: Any = None) -> Any:
        made.append(
            theirs.create_mm_receiver(
                None, scheduler=scheduler, encode_urls=urls, transport_mode="http"
            )
        )
        return made[-1]

    yield create
    for receiver in made:
        receiver.context.destroy(0)
        receiver.scheduler_context.destroy(0)


def check(received: Any, theirs: Any, encoder: Encoder, images: list[bytes]) -> None:
    """All rows have come, in order, with the grids that they belong to."""
    rows = received.embedding[theirs.Modality.IMAGE]
    grids = received.meta["img_grid_thw"]
    assert rows.dtype is torch.bfloat16
    assert grids.shape == (len(images), 3)
    counts = (grids.prod(1) // 4).tolist()
    assert sum(counts) == len(rows)
    for found, image in zip(rows.float().split(counts), images, strict=True):
        np.testing.assert_allclose(found.numpy(), right(encoder, image), **CLOSE)


@pytest.mark.parametrize("count", [1, 2, 9])
async def test_the_tokenizers_receiver_takes_what_is_pushed(
    served: str, theirs: Any, make: Any, configure: Any, encoder: Encoder, count: int
) -> None:
    configure("zmq_to_tokenizer")
    receiver = make([served])
    images = [png(seed, (64 + 30 * seed, 90)) for seed in range(count)]
    request = theirs.GenerateReqInput(text="what?", image_data=[data_uri(x) for x in images])

    received = await receiver.recv_mm_data(request, Processor(), "what?")

    check(received, theirs, encoder, images)


async def test_parts_from_two_encoders_are_joined_in_order(
    serve: Serve, theirs: Any, make: Any, configure: Any, encoder: Encoder
) -> None:
    configure("zmq_to_tokenizer")
    urls = [serve(), serve()]
    receiver = make(urls)
    images = [png(seed) for seed in range(5)]
    request = theirs.GenerateReqInput(text="what?", image_data=[data_uri(x) for x in images])

    received = await receiver.recv_mm_data(request, Processor(), "what?")

    check(received, theirs, encoder, images)


async def test_the_tokenizers_receiver_hears_of_a_bad_image_at_once(
    served: str, theirs: Any, make: Any, configure: Any
) -> None:
    configure("zmq_to_tokenizer")
    receiver = make([served])
    request = theirs.GenerateReqInput(text="what?", image_data=["/etc/passwd"])

    async with asyncio.timeout(FAILS_WITHIN_S):
        received = await receiver.recv_mm_data(request, Processor(), "what?")

    assert received is None


@pytest.fixture
def one_rank() -> Iterator[None]:
    """The process group that a scheduler of one rank has."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("registers", ["first", "last"])
async def test_the_schedulers_receiver_registers_and_takes_what_is_pushed(
    served: str,
    theirs: Any,
    make: Any,
    configure: Any,
    one_rank: None,
    encoder: Encoder,
    registers: str,
) -> None:
    configure("zmq_to_scheduler")
    scheduler = SimpleNamespace(model_config=None)
    tokenizer_side, rank = make([served]), make([served], scheduler)
    rank.mm_processor = Processor()
    images = [png(1), png(2, (200, 90))]
    request = theirs.GenerateReqInput(
        text="what?", image_data=[data_uri(x) for x in images], rid=f"rid-{registers}"
    )
    tokenized = theirs.TokenizedGenerateReqInput(
        input_text="what?",
        **dict.fromkeys(("input_ids", "input_embeds", "mm_inputs", "token_type_ids")),
        **dict.fromkeys(("sampling_params", "return_logprob", "logprob_start_len")),
        **dict.fromkeys(("top_logprobs_num", "token_ids_logprob", "stream")),
        rid=request.rid,
        need_wait_for_mm_inputs=True,
        encoder_urls=[served],
        num_items_assigned={theirs.Modality.IMAGE: [2]},
    )

    if registers == "last":
        tokenizer_side.send_encode_request(request)
        async with httpx.AsyncClient() as http:  # it takes longer than what was sent before it
            await http.post(f"{served}/v1/images/embeddings", content=png(3))
    ready, failed = rank.process_waiting_requests([tokenized])
    if registers == "first":
        tokenizer_side.send_encode_request(request)
    async with asyncio.timeout(20):
        while not ready and not failed:
            await asyncio.sleep(0.01)
            ready, failed = rank.process_waiting_requests([])

    assert (ready, failed) == ([tokenized], [])
    check(tokenized.mm_inputs, theirs, encoder, images)


@pytest.fixture
def bootstrap(theirs: Any) -> Iterator[Any]:
    """Starts SGLang's server of encoder addresses, with a list of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = list[Any]()

    def start(urls: list[str]) -> str:
        made.append(theirs.EncoderBootstrapServer("127.0.0.1", port, urls, 0.05))
        return f"http://127.0.0.1:{port}"

    yield start
    for server in made:
        server.close()


def test_their_bootstrap_server_hears_of_the_service_and_finds_it_healthy(
    tiny: Path, bootstrap: Any
) -> None:
    urls = list[str]()
    address = bootstrap(urls)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    public = f"http://127.0.0.1:{port}"
    told = {"public_url": public, "bootstrap_urls": [address], "register_every_s": 0.2}
    app = make_ingress(tiny, sglang=told).__serve_build_asgi_app__()

    with listening(app, port):
        wait_until(lambda: urls == [public])
        time.sleep(1)  # twenty looks at our health: three failures would drop us
        assert urls == [public]

    wait_until(lambda: urls == [])


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
