"""What a request leaves behind, and how an Ingress replica ends."""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from encoders.config import EncoderConfig
from encoders.errors import Overloaded
from serve_app import metrics
from serve_app.api import build_api
from serve_app.endpoints import ApiLimits
from serve_app.ingress import Ingress
from serve_app.middleware import Traffic
from serve_app.service import POOLED, Embedding, ImageItem, Stats, Wanted

CONFIG = EncoderConfig.load("dinov2-demo")
IMAGES = "/v1/images/embeddings"


class Service:
    """Answers no request before `go`; raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.go = asyncio.Event()
        self.num_running = 0

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        self.num_running += 1
        try:
            await self.go.wait()
        finally:
            self.num_running -= 1
        if self.error is not None:
            raise self.error
        return []

    async def check_health(self) -> None:
        if self.error is not None:
            raise self.error

    def record_autoscaling_stats(self) -> Stats:
        return {"queue_age_s": 5.0}


def make_client(
    service: Service, traffic: Traffic | None = None, root_path: str = "", **limits: Any
) -> httpx.AsyncClient:
    app = build_api(service, CONFIG, ApiLimits(**limits), traffic)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url=f"http://test{root_path}")


async def until_running(service: Service, count: int) -> None:
    async with asyncio.timeout(30):
        while service.num_running != count:  # noqa: ASYNC110 (httpx takes some turns of the loop)
            await asyncio.sleep(0)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Access log lines, parsed."""
    caplog.set_level(logging.INFO, "serve_app")
    return lambda: [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "serve_app.middleware"
    ]


async def test_a_request_is_one_line_of_json_when_the_access_log_is_on(lines: Any) -> None:
    service = Service(Overloaded("full"))
    service.go.set()
    async with make_client(service, access_log=True) as client:
        await client.get("/health")
        await client.post(f"{IMAGES}?dimensions=3", content=b"SECRET")

    first, second = lines()
    assert list(first) == ["time", "client", "method", "path", "status", "ms"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["time"])
    assert (first["method"], first["path"], first["status"]) == ("GET", "/health", 200)
    assert (second["method"], second["path"], second["status"]) == ("POST", IMAGES, 503)
    assert first["client"] == "127.0.0.1"
    assert second["ms"] >= 0


async def test_nothing_is_logged_when_the_access_log_is_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "serve_app")
    service = Service(Overloaded("full"))
    service.go.set()
    async with make_client(service) as client:
        await client.get("/health")
        await client.post(IMAGES, content=b"a")

    assert [record for record in caplog.records if record.name.startswith("serve_app")] == []


async def test_a_path_cannot_forge_a_second_line(lines: Any, caplog: Any) -> None:
    async with make_client(Service(), access_log=True) as client:
        await client.get("/a%0A%7B%22status%22%3A200%7D%E2%80%A8")

    (line,) = lines()
    assert line["path"] == '/a\n{"status":200}\u2028'
    assert all(len(r.getMessage().splitlines()) == 1 for r in caplog.records[-1:])


@pytest.mark.parametrize(
    ("error", "status"), [(None, 500), (RuntimeError("lost"), 500), (Overloaded("full"), 503)]
)
async def test_a_fault_of_ours_is_noted_with_the_status_that_the_client_gets(
    lines: Any, error: Exception | None, status: int
) -> None:
    service = Service(error)  # without an error: no rows for one image, which is a fault as well
    service.go.set()
    async with make_client(service, access_log=True) as client:
        headers = {"accept": "application/x-npy"}
        response = await client.post(IMAGES, content=b"a", headers=headers)

    assert response.status_code == status
    assert [line["status"] for line in lines()] == [status]


async def test_a_client_that_leaves_is_noted_with_no_status(lines: Any) -> None:
    service, traffic = Service(), Traffic()
    async with make_client(service, traffic, access_log=True) as client:
        request = asyncio.create_task(client.post(IMAGES, content=b"a"))
        await until_running(service, 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    assert [line["status"] for line in lines()] == [0]
    assert await traffic.drain(0) == 0


async def test_every_request_is_counted_by_its_status_and_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, timed = list[tuple[str, Any]](), list[float]()
    counter = metrics.counter("encoder_requests_total")
    histogram = metrics.histogram("encoder_request_ms")
    monkeypatch.setattr(counter, "inc", lambda value=1.0, tags=None: counted.append((value, tags)))
    monkeypatch.setattr(histogram, "observe", lambda value, tags=None: timed.append(value))
    service = Service(RuntimeError("lost"))
    service.go.set()

    async with make_client(service) as client:
        await client.get("/health")
        await client.get("/nowhere")
        await client.post(IMAGES, content=b"a")

    assert counted == [(1.0, {"status": status}) for status in ("200", "404", "500")]
    assert len(timed) == 3
    assert min(timed) >= 0


async def test_a_drain_waits_for_the_requests_that_run_and_says_that_none_is_left() -> None:
    service, traffic = Service(Overloaded("full")), Traffic()
    async with make_client(service, traffic) as client:
        requests = [asyncio.create_task(client.post(IMAGES, content=b"a")) for _ in range(3)]
        await until_running(service, 3)
        drain = asyncio.create_task(traffic.drain(60))
        for _ in range(20):
            await asyncio.sleep(0)
        early = drain.done()

        service.go.set()
        left = await drain

        assert not early
        assert left == 0
        statuses = [(await request).status_code for request in requests]
        assert statuses == [503] * 3, "the service's own answer"


async def test_a_drain_says_how_many_are_left_when_its_time_is_up() -> None:
    service, traffic = Service(), Traffic()
    async with make_client(service, traffic) as client:
        requests = [asyncio.create_task(client.post(IMAGES, content=b"a")) for _ in range(2)]
        await until_running(service, 2)

        left = await traffic.drain(0.02)

        assert left == 2
        assert service.num_running == 2, "they go on, it is only said that they do"
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def test_an_idle_replica_is_drained_at_once() -> None:
    async with asyncio.timeout(5):
        left = await Traffic().drain(60)

    assert left == 0


@pytest.mark.parametrize("root_path", ["", "/prefix"])
async def test_while_it_drains_new_requests_are_refused_and_health_answers(root_path: str) -> None:
    service, traffic = Service(), Traffic()
    await traffic.drain(0)
    async with make_client(service, traffic, root_path) as client:
        refused = [
            await client.post(IMAGES, content=b"a"),
            await client.get("/ready"),
            await client.get("/v1/models"),
            await client.get("/nowhere"),
        ]
        health = await client.get("/health")

    assert [response.status_code for response in refused] == [503] * 4
    assert {response.headers["retry-after"] for response in refused} == {"1"}
    assert "shutting down" in refused[0].json()["detail"]
    assert refused[0].json()["error"]["code"] == "overloaded"
    assert health.status_code == 200
    assert service.num_running == 0


async def test_an_ingress_drains_the_requests_of_its_own_app() -> None:
    service = Service(Overloaded("full"))
    ingress = Ingress(lambda: service, CONFIG, ApiLimits())
    transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        request = asyncio.create_task(client.post(IMAGES, content=b"a"))
        await until_running(service, 1)

        left = await ingress.drain(0.02)
        refused = await client.post(IMAGES, content=b"a")
        service.go.set()
        await request

        assert left == 1
        assert refused.status_code == 503
        assert await ingress.drain(5) == 0


async def test_an_ingress_is_as_well_as_what_runs_in_it() -> None:
    service = Service()
    ingress = Ingress(lambda: service, CONFIG, ApiLimits())

    await ingress.check_health()
    service.error = TimeoutError("stuck")
    with pytest.raises(TimeoutError, match="stuck"):
        await ingress.check_health()

    assert ingress.record_autoscaling_stats() == {"queue_age_s": 5.0}
