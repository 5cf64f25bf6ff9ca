"""Chat completions pass through: the answer as it comes, and failures in plain words."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse

from tests.sglang.conftest import Serve, listening

CHAT = "/v1/chat/completions"
SECRET = "Traceback: /opt/secret/model.py"


class Upstream:
    """A language model server that does what the model's name says."""

    def __init__(self) -> None:
        self.seen = list[tuple[dict[str, str], Any]]()
        self.go_on = threading.Event()
        self.left = threading.Event()
        self.app = FastAPI()
        self.app.post(CHAT)(self.completions)

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append((dict(request.headers), body))
        match body["model"]:
            case "stream" | "endless" | "breaks":
                return StreamingResponse(
                    self._events(body["model"]), media_type="text/event-stream"
                )
            case "slow":
                await asyncio.sleep(30)
            case "moved":
                return RedirectResponse("http://10.0.0.7/")
            case int() as status:
                return JSONResponse({"error": {"message": SECRET}}, status)
        return JSONResponse({"choices": [{"message": {"content": "a cat"}}]})

    async def _events(self, kind: str) -> AsyncIterator[bytes]:
        yield b'data: {"n": 1}\n\n'
        while kind == "endless":
            try:
                await asyncio.sleep(0.01)
                yield b": still here\n\n"
            except asyncio.CancelledError:
                self.left.set()
                raise
        while not self.go_on.is_set():  # noqa: ASYNC110 (a thread sets it)
            await asyncio.sleep(0.01)
        if kind == "breaks":
            await asyncio.sleep(30)
        yield b"data: [DONE]\n\n"


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def upstream_url(upstream: Upstream) -> Iterator[str]:
    with listening(upstream.app) as url:
        yield url


@pytest.fixture
def url(serve: Serve, upstream_url: str) -> str:
    """A service that passes chat on, with a key of its own and another for the server behind."""
    return serve(
        api={"api_key": "ours"},
        sglang={"chat_url": upstream_url, "chat_key": "theirs", "chat_timeout_s": 1.5},
    )


def ask(url: str, model: object, key: str = "ours") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "what is it?"}]}
    return httpx.post(url + CHAT, json=body, headers={"authorization": f"Bearer {key}"}, timeout=30)


def test_an_answer_passes_as_it_is(url: str, upstream: Upstream) -> None:
    reply = ask(url, "plain")

    assert reply.status_code == 200
    assert reply.json() == {"choices": [{"message": {"content": "a cat"}}]}
    ((headers, body),) = upstream.seen
    assert body["messages"] == [{"role": "user", "content": "what is it?"}]
    assert headers["authorization"] == "Bearer theirs"


def test_a_stream_passes_piece_by_piece(url: str, upstream: Upstream) -> None:
    headers = {"authorization": "Bearer ours"}

    with httpx.stream("POST", url + CHAT, json={"model": "stream"}, headers=headers) as reply:
        pieces = reply.iter_raw()
        first = next(pieces)
        upstream.go_on.set()
        rest = b"".join(pieces)

    assert reply.headers["content-type"].startswith("text/event-stream")
    assert (first, rest) == (b'data: {"n": 1}\n\n', b"data: [DONE]\n\n")


def test_a_client_that_leaves_ends_the_stream_behind_it(url: str, upstream: Upstream) -> None:
    headers = {"authorization": "Bearer ours"}

    with httpx.stream("POST", url + CHAT, json={"model": "endless"}, headers=headers) as reply:
        next(reply.iter_raw())

    assert upstream.left.wait(10)


def test_the_key_is_wanted(url: str, upstream: Upstream) -> None:
    reply = ask(url, "plain", key="wrong")

    assert reply.status_code == 401
    assert upstream.seen == []


def test_a_clients_mistake_passes_as_it_is(url: str) -> None:
    reply = ask(url, 422)

    assert (reply.status_code, reply.json()) == (422, {"error": {"message": SECRET}})


@pytest.mark.parametrize(
    ("model", "status", "said"),
    [
        (500, 502, "failed with status 500"),
        (401, 502, "refuses this service"),
        ("moved", 502, "failed with status 307"),
        (503, 503, "overloaded, or has no encoder"),
        ("slow", 504, "did nothing for 1.5 s"),
    ],
)
def test_a_failure_of_the_server_behind_is_told_in_plain_words(
    url: str, upstream_url: str, model: object, status: int, said: str
) -> None:
    reply = ask(url, model)

    assert reply.status_code == status
    assert said in reply.json()["error"]["message"]
    for leak in (SECRET, upstream_url, upstream_url.partition(":")[2], "10.0.0.7"):
        assert leak not in reply.text


def test_a_server_that_is_down_is_a_502_at_once(serve: Serve) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    url = serve(sglang={"chat_url": nobody})
    start = time.monotonic()

    reply = ask(url, "plain")

    assert time.monotonic() - start < 5
    assert reply.status_code == 502
    assert "cannot be reached" in reply.json()["detail"]
    assert nobody.partition("//")[2] not in reply.text


def test_a_stream_that_breaks_off_says_so_in_the_stream(url: str, upstream: Upstream) -> None:
    upstream.go_on.set()

    reply = ask(url, "breaks")

    first, second = reply.text.strip().split("\n\n")
    assert first == 'data: {"n": 1}'
    assert "did nothing" in json.loads(second.removeprefix("data: "))["error"]["message"]


def test_without_a_server_to_pass_to_there_is_no_such_path(served: str) -> None:
    assert ask(served, "plain").status_code == 404
