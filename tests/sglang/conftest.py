"""The service over real HTTP in this process, with a tiny tower, and receivers for its messages."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from encoders import EncoderConfig
from encoders.encoder import Encoder
from serve_app.app import SLOTS
from serve_app.args import AppArgs
from serve_app.ingress import Ingress
from serve_app.local import fused_service
from tests.sglang.receiver import Receiver, many
from tests.tiny import write_tiny_qwen3_vl

Serve = Callable[..., str]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a tower with deepstack that takes a millisecond."""
    return write_tiny_qwen3_vl(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def encoder(tiny: Path) -> Encoder:
    """The same, bare: what it gives is right."""
    return Encoder.load(EncoderConfig.load(str(tiny)))


def make_ingress(tiny: Path, **settings: Any) -> Ingress:
    """All tiers in one object, without Ray."""
    common = {"encoder": str(tiny), "topology": "fused", "device": "cpu", "sglang": {}}
    args = AppArgs.model_validate(common | settings)
    config = EncoderConfig.load(args.encoder)
    service = partial(fused_service, args, config, SLOTS)
    return Ingress(service, config, args.api, args.sglang)


@contextmanager
def running(tiny: Path, **settings: Any) -> Iterator[str]:
    """The URL of a whole service in this process."""
    with listening(make_ingress(tiny, **settings).__serve_build_asgi_app__()) as url:
        yield url


@contextmanager
def listening(app: Any, port: int = 0) -> Iterator[str]:
    """The URL of an ASGI app on a port of loopback: this one, or any."""
    config = uvicorn.Config(
        app, port=port, log_level="warning", ws="none", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serve(tiny: Path) -> Iterator[Serve]:
    """Starts services with given settings, which end with the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(tiny, **settings))


@pytest.fixture(scope="session")
def served(tiny: Path) -> Iterator[str]:
    """A service with the defaults, for every test that leaves it as it was."""
    with running(tiny) as url:
        yield url


@pytest.fixture
def receivers() -> Iterator[Iterator[Receiver]]:
    """As many as are asked for."""
    with many() as made:
        yield made


@pytest.fixture
def receiver(receivers: Iterator[Receiver]) -> Receiver:
    return next(receivers)


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client
