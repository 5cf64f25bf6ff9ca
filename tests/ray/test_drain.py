"""Signals to `python -m serve_app`, in a process and a Ray of its own."""

import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml
from PIL import Image

from tests.tiny import write_tiny_encoder

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The launcher over a tiny encoder, and its URL."""
    port = free_port()
    # One image of 120 x 120 patches keeps this tower busy for a second on one CPU.
    encoder = write_tiny_encoder(tmp_path, shortest_edge=14 * 120, max_pixels=14 * 14 * 30_000)
    args = {
        "encoder": str(encoder),
        "device": "cpu",
        "topology": "fused",
        "batch": {"max_patches": 30_000},
    }
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"name": "app", "import_path": "serve_app.app:build_app", "args": args}],
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    # Unix sockets of Ray have short names at most, so no pytest folder.
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        environment = os.environ | {
            "RAY_TMPDIR": folder,
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        }
        environment.pop("RAY_ADDRESS", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", str(path)], env=environment, start_new_session=True
        )
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()  # a second signal does not wait
            process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"the server ended with {process.returncode}")


def slow_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (14 * 120, 14 * 120)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_refuses_new_ones(
    server: tuple[subprocess.Popen[bytes], str], signum: signal.Signals
) -> None:
    process, url = server
    wait_until_ready(process, url)
    images = f"{url}/v1/images/embeddings"
    with ThreadPoolExecutor(1) as pool:
        files = [("file", slow_image())] * 5  # one batch each: seconds together
        slow = pool.submit(httpx.post, images, files=files, timeout=60)
        started = time.monotonic()
        while not slow.running() or time.monotonic() < started + 1:
            time.sleep(0.05)  # until it is on the encoder: nothing public tells

        process.send_signal(signum)

        statuses = set()
        while not slow.done():
            with suppress(httpx.TransportError):
                statuses.add(httpx.get(f"{url}/v1/models", timeout=60).status_code)
        answer = slow.result()
    assert answer.status_code == 200, answer.text
    assert 503 in statuses, "no request came while it drained: the slow one was too fast"
    assert process.wait(60) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", timeout=5)
