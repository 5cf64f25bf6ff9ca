"""SGLang servers are told the service's URL, again and again, and at the end no more."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response
from pydantic import ValidationError

from serve_app.sglang.bootstrap import Bootstrap
from serve_app.sglang.settings import SGLangSettings
from tests.conditions import until
from tests.sglang.conftest import listening, make_ingress, running

PUBLIC = "http://encoder.example:8000/images"


class BootstrapServer:
    """Keeps the URLs that it is told, as SGLang's does."""

    def __init__(self) -> None:
        self.calls = list[str]()
        self.urls = set[str]()
        self.changed = threading.Condition()
        self.status = 200
        self.app = FastAPI()
        self.app.post("/register_encoder_url")(self.register)
        self.app.delete("/unregister_encoder_url")(self.unregister)

    def register(self, body: dict[str, str]) -> Response:
        return self._note("register", lambda: self.urls.add(body["url"]))

    def unregister(self, body: dict[str, str]) -> Response:
        return self._note("unregister", lambda: self.urls.discard(body["url"]))

    def _note(self, call: str, change: object) -> Response:
        with self.changed:
            self.calls.append(call)
            if self.status == 200:
                change()  # type: ignore[operator]
            self.changed.notify_all()
        return Response(status_code=self.status)

    def wait_for_calls(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.calls) >= count, 30), self.calls


@pytest.fixture
def servers() -> Iterator[list[tuple[BootstrapServer, str]]]:
    with ExitStack() as stack:
        made = [BootstrapServer() for _ in range(2)]
        yield [(server, stack.enter_context(listening(server.app))) for server in made]


def settings(servers: list[tuple[BootstrapServer, str]]) -> dict[str, object]:
    return {
        "public_url": PUBLIC,
        "bootstrap_urls": [url for _, url in servers],
        "register_every_s": 0.05,
    }


def test_every_server_is_told_again_and_again_and_untold_at_the_end(
    tiny: Path, servers: list[tuple[BootstrapServer, str]]
) -> None:
    with running(tiny, sglang=settings(servers)):
        for server, _ in servers:
            server.wait_for_calls(3)
            assert server.urls == {PUBLIC}

    for server, _ in servers:
        assert server.calls[-1] == "unregister"
        assert "unregister" not in server.calls[:-1]
        assert server.urls == set()


def test_a_server_that_refuses_is_told_until_it_takes_it(
    tiny: Path, servers: list[tuple[BootstrapServer, str]]
) -> None:
    (bad, _), (good, _) = servers
    bad.status = 500
    with running(tiny, sglang=settings(servers)):
        bad.wait_for_calls(2)
        good.wait_for_calls(2)
        assert good.urls == {PUBLIC}

        bad.status = 200
        bad.wait_for_calls(len(bad.calls) + 2)

        assert bad.urls == {PUBLIC}


def test_a_server_that_is_down_keeps_the_service_from_nothing(
    tiny: Path, servers: list[tuple[BootstrapServer, str]]
) -> None:
    told = settings(servers[:1])
    told["bootstrap_urls"] = ["http://127.0.0.1:9", *told["bootstrap_urls"]]  # type: ignore[misc]

    with running(tiny, sglang=told):
        servers[0][0].wait_for_calls(2)

    assert servers[0][0].urls == set()


async def test_what_is_being_deleted_registers_no_more_and_is_untold_at_once(
    servers: list[tuple[BootstrapServer, str]],
) -> None:
    deleted = asyncio.Event()

    async def is_deleted() -> bool:
        return deleted.is_set()

    told = SGLangSettings.model_validate(settings(servers))
    service: Any = Answers()
    bootstrap = Bootstrap(told, service, is_deleted)
    bootstrap.start()
    await until(lambda: all(len(server.calls) > 1 for server, _ in servers))

    deleted.set()

    await until(lambda: all("unregister" in server.calls for server, _ in servers))
    counts = [len(server.calls) for server, _ in servers]
    await asyncio.sleep(0.2)  # four times as long as between two registrations
    assert [len(server.calls) for server, _ in servers] == counts
    await bootstrap.stop()
    assert [server.urls for server, _ in servers] == [set(), set()]


class Answers:
    """A service whose encoder is there."""

    async def submit(self, *_: object) -> list[None]:
        return [None]


class Fails:
    """A connection that cannot even be closed."""

    async def stop(self) -> None:
        raise OSError("cannot be closed")


async def test_what_cannot_be_closed_keeps_nothing_else_open(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang = make_ingress(tiny, sglang={"chat_url": "http://127.0.0.1:9"})._sglang
    assert sglang
    assert sglang._chat
    monkeypatch.setattr(sglang._bootstrap, "stop", Fails().stop)

    with pytest.raises(OSError, match="cannot be closed"):
        async with sglang._lifespan(None):
            pass

    assert sglang._chat._client.is_closed
    assert sglang._delivery._pusher._context.closed


async def test_draining_unregisters_before_requests_are_refused(
    tiny: Path, servers: list[tuple[BootstrapServer, str]]
) -> None:
    ingress = make_ingress(tiny, sglang=settings(servers))
    app = ingress.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        await until(lambda: all(server.urls for server, _ in servers))

        left = await ingress.drain(1)

    assert left == 0
    for server, _ in servers:
        assert server.calls.count("unregister") == 1
        assert server.urls == set()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bootstrap_urls": ["http://a:8997"]}, "public_url, which is not set"),
        ({"public_url": "http://a:8000/"}, "String should match pattern"),
        ({"public_url": "ftp://a:8000"}, "String should match pattern"),
        ({"public_url": "http://user@a:8000"}, "String should match pattern"),
        ({"public_url": "http://a:99999"}, "port"),
        ({"public_url": "http://a:0"}, "port 0 cannot be called"),
        ({"public_url": "http://:8000"}, "host '' and port 8000 cannot"),
        ({"public_url": "http://a:port"}, "port"),
        ({"public_url": "http://a", "bootstrap_urls": ["http://b:99999"]}, "port"),
        ({"chat_url": "http://a:99999"}, "port"),
        ({"chat_key": "k"}, "chat_url, which is not set"),
        ({"push_timeout_s": 5}, "less than 5"),
        ({"receivers": ["10.0.0.1/8"]}, "receivers"),
        ({"receiver": ["10.0.0.0/8"]}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SGLangSettings.model_validate(values)
