"""`python -m serve_app --production`, in a process and a Ray of its own."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.serving.service import apart, free_ports
from tests.tiny import write_tiny_encoder

pytestmark = pytest.mark.slow

LISTEN = "0A"


class Launched:
    """The launcher's process, where it serves, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    def told(self, what: str) -> list[str]:
        """What stands behind a word in its lines."""
        return re.findall(rf"^production: {what}: (.+)$", self._log.read_text(), re.MULTILINE)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    port, metrics, stats, fallback = free_ports(4)
    args = {"encoder": str(write_tiny_encoder(tmp_path)), "device": "cpu", "topology": "fused"}
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"name": "app", "import_path": "serve_app.app:build_app", "args": args}],
    }
    path, log = tmp_path / "serve.yaml", tmp_path / "log"
    path.write_text(yaml.safe_dump(config))
    # Unix sockets of Ray and HAProxy have short names at most, so no pytest folder.
    with tempfile.TemporaryDirectory(prefix="r") as folder, log.open("wb") as file:
        environment = (
            os.environ
            | {
                "RAY_TMPDIR": folder,
                "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            }
            | apart(folder, (metrics, stats, fallback), 30_600)
        )
        environment.pop("RAY_ADDRESS", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", "--production", str(path)],
            env=environment,
            stderr=file,
            start_new_session=True,
        )
        try:
            yield Launched(process, port, log)
        finally:
            process.terminate()
            process.wait(60)


def wait_until_ready(launched: Launched) -> None:
    while launched.process.poll() is None:
        try:
            if httpx.get(f"{launched.url}/ready", timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the launcher ended with {launched.process.returncode}")


def listening() -> set[tuple[str, int]]:
    """IPv4 addresses and ports that something on this machine listens on."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == LISTEN:
            address, port = local.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def address(told: str) -> tuple[str, int]:
    """`0.0.0.0:9101/metrics, ...` -> its first half."""
    host, port = re.match(r"([\d.]+):(\d+)", told).groups()  # type: ignore[union-attr]
    return host, int(port)


def by_haproxy(metrics_port: int) -> int:
    """Requests that HAProxy says it took."""
    counters = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
    found = re.search(
        r'haproxy_frontend_http_requests_total\{proxy="http_frontend"\} (\d+)', counters
    )
    assert found is not None
    return int(found[1])


@pytest.mark.timeout(240)
def test_requests_come_by_haproxy_and_the_ports_are_those_that_are_told(
    launched: Launched, photos: dict[str, bytes]
) -> None:
    wait_until_ready(launched)

    answer = httpx.post(f"{launched.url}/v1/images/embeddings", content=photos["chelsea.png"])

    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"][0]["embedding"]) == 32
    open_ports = listening()
    kinds = ("requests", "fallback", "metrics", "statistics")
    told = {kind: address(line) for kind in kinds for line in launched.told(kind)}
    assert set(told.values()) <= open_ports
    assert len(told) == 4
    assert launched.url == "http://{}:{}".format(*told["requests"])
    assert launched.told("replicas")[0].startswith("127.0.0.1:30600-30649,")
    assert any(host == "127.0.0.1" and 30600 <= port <= 30699 for host, port in open_ports)
    while not by_haproxy(told["metrics"][1]):  # it starts to count anew when it is configured anew
        assert httpx.get(f"{launched.url}/health").status_code == 200
    assert "HAProxy" in httpx.get(f"http://127.0.0.1:{told['statistics'][1]}/stats").text
    assert not launched.told("WARNING")  # on loopback nobody needs a key
    environment = Path(f"/proc/{launched.process.pid}/environ").read_bytes()
    assert b"MALLOC_MMAP_THRESHOLD_=" in environment

    launched.process.send_signal(signal.SIGTERM)

    assert launched.process.wait(60) == 0
