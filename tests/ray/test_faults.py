"""Faults behind real Ray and real HTTP: killed replicas, a hung engine, clients that misbehave."""

import asyncio
import io
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import ray
from PIL import Image
from ray import serve
from ray.serve import Application
from ray.serve._private.build_app import build_app as unfold
from ray.serve.context import _get_global_client

from encoders import EncoderConfig
from encoders.encoder import Encoder
from encoders.packing import PackedBatch
from encoders.sizes import NUM_PREFIX, grid_thw
from serve_app import replica as replica_module
from serve_app.app import SLOTS, build_app, encoder_options, handle, ingress
from serve_app.args import AppArgs
from serve_app.batcher import Batcher
from serve_app.engine import Engine, Started
from serve_app.handles import BatcherHandle, EncoderHandle
from serve_app.replica import EncoderReplica
from tests.tiny import write_tiny_encoder

pytestmark = pytest.mark.slow

IMAGES = "/v1/images/embeddings"
NPY = {"Accept": "application/x-npy"}
NUM_IMAGES = 5000
PER_REQUEST = 25
NUM_CLIENTS = 6
SIDE = 28
# 18 x 18 x 18 colours, as far apart as that many can be.
COLOURS = np.array(list(product(range(0, 256, 15), repeat=3))[:NUM_IMAGES], np.uint8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of an encoder that takes a millisecond."""
    return write_tiny_encoder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def right(tiny: Path) -> np.ndarray:
    """What the bare encoder makes of each colour, a row each."""
    encoder = Encoder.load(EncoderConfig.load(str(tiny)))
    grid = grid_thw(encoder.config, SIDE, SIDE)
    rows = list[np.ndarray]()
    for part in np.array_split(COLOURS, 50):
        pixels = [np.broadcast_to(colour, (SIDE, SIDE, 3)) for colour in part]
        batch = PackedBatch.of(pixels, [grid] * len(pixels), NUM_PREFIX["dinov2"])
        rows += [row.numpy() for row in encoder.encode(batch)]
    return np.stack(rows)


@contextmanager
def running(app: Application, name: str, **num_replicas: int) -> Iterator[None]:
    """Deploy an app beside the others, under a path of its name, with dead replicas seen soon."""
    built = unfold(app, name=name, route_prefix=f"/{name}")
    built.deployments[:] = [
        deployment.options(
            num_replicas=num_replicas.get(deployment.name, 1), health_check_period_s=0.5
        )
        for deployment in built.deployments
    ]
    _get_global_client().deploy_applications([built])
    try:
        yield
    finally:
        serve.delete(name)


def pids(app: str, tier: str) -> set[int]:
    """The processes of a deployment's replicas. While one works, its title has a method's name."""
    title = f"ray::ServeReplica:{app}:{tier}".encode()
    found = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if (process / "cmdline").read_bytes().startswith(title):
                found.add(int(process.name))
    return found


def num_running(app: str, tier: str) -> int:
    """Replicas that Ray counts as running."""
    return serve.status().applications[app].deployments[tier].replica_states.get("RUNNING", 0)


def num_ongoing(app: str, tier: str) -> int:
    """Requests in the replicas of a deployment, and slots that are held for some."""
    names = [x["name"] for x in ray.util.list_named_actors(all_namespaces=True)]
    total = 0
    for replica in (ray.get_actor(x, "serve") for x in names if f"::{app}#{tier}#" in x):
        with suppress(ray.exceptions.RayActorError):  # it is dead, and not yet unlisted
            total += ray.get(replica.get_num_ongoing_requests.remote(), timeout=10)
    return total


def memory_mb(pid: int, peak: bool = False) -> int:
    """Resident memory of a process, now or at most since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) // 1024


def forget_peak(pid: int) -> None:
    """Let the kernel count the peak of resident memory from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")


async def until(condition: Callable[[], bool], within_s: float = 60) -> None:
    """Wait for a condition of the world outside, of which there is no event."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def solid(colour: tuple[int, int, int]) -> bytes:
    """A small image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), colour).save(file, "PNG")
    return file.getvalue()


def png(index: int) -> bytes:
    """The image whose embedding is row `index` of `right`."""
    return solid(tuple(COLOURS[index].tolist()))


@dataclass
class Load:
    """Clients that send every image, again and again until told to stop, and check each answer."""

    client: httpx.AsyncClient
    url: str
    right: np.ndarray
    killed: str = "nobody"
    """The tier that is being killed, or not whole again."""
    answered: Counter[int] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    """Answers that a client had to ask for again, by the tier that was being killed."""
    wrong: int = 0
    stop: bool = False
    pending: dict[int, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Send every image at least once."""
        while not self._is_done:
            starts = iter(range(0, NUM_IMAGES, PER_REQUEST))
            await asyncio.gather(*(self._send(starts) for _ in range(NUM_CLIENTS)))

    @property
    def oldest_s(self) -> float:
        """Age of the request that has waited for its answer longest."""
        now = time.monotonic()
        return now - min(self.pending.values(), default=now)

    @property
    def _is_done(self) -> bool:
        return self.stop and len(self.answered) == NUM_IMAGES

    async def _send(self, starts: Iterator[int]) -> None:
        for start in starts:
            if self._is_done:
                return
            indices = np.arange(start, start + PER_REQUEST)
            rows = await self._ask(start, [("file", png(index)) for index in indices])
            self.wrong += int(((rows @ self.right.T).argmax(1) != indices).sum())
            self.wrong += not np.allclose(rows, self.right[indices], atol=1e-5)
            self.answered.update(indices.tolist())

    async def _ask(self, start: int, files: list[tuple[str, bytes]]) -> np.ndarray:
        while True:
            self.pending[start] = time.monotonic()
            try:
                reply = await self.client.post(self.url, files=files, headers=NPY)
            except httpx.TransportError as error:
                self._note(type(error).__name__)
                continue
            finally:
                del self.pending[start]
            if reply.status_code == 200:
                return np.load(io.BytesIO(reply.content))
            self._note(f"{reply.status_code} {reply.text[:300]}")

    def _note(self, what: str) -> None:
        print(f"asked again while {self.killed} was killed: {what}")
        self.retries[self.killed] += 1


async def kill_one(load: Load, app: str, tier: str) -> None:
    """Kill a replica that has requests in flight, and wait until it is replaced and all goes on."""
    before = pids(app, tier)
    victim = min(before)
    load.killed = tier
    os.kill(victim, signal.SIGSTOP)
    await until(lambda: load.oldest_s > 1)  # so that one is surely caught inside
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    await until(lambda: len(pids(app, tier) - {victim}) == len(before))
    await until(lambda: num_running(app, tier) == len(before))
    await until(lambda: load.oldest_s < 1)
    print(f"{tier} {victim} replaced after {time.monotonic() - killed_at:.1f} s")
    load.killed = "nobody"


async def load_while_killing(url: str, right: np.ndarray, app: str, tiers: list[str]) -> Load:
    """Every image is sent while one replica of each tier is killed after the other."""
    async with httpx.AsyncClient(timeout=60) as client:
        load = Load(client, f"{url}/{app}{IMAGES}", right)
        clients = asyncio.create_task(load.run())
        start = time.monotonic()
        for tier in tiers:
            await kill_one(load, app, tier)
        load.stop = True
        await clients
    took = time.monotonic() - start
    print(f"{load.answered.total()} images, {tiers}, {took:.0f} s, {dict(load.retries)}")
    return load


def test_the_colours_differ_by_far_more_than_the_tolerance(right: np.ndarray) -> None:
    similarity = right @ right.T
    np.fill_diagonal(similarity, -1)

    nearest = np.sqrt(2 - 2 * similarity.max())

    assert nearest > 2e-3


@pytest.mark.parametrize(
    ("topology", "tiers"),
    [
        ("split", ["Encoder", "Batcher", "Ingress"]),
        ("inline", ["Encoder", "Ingress"]),
    ],
)
async def test_every_image_gets_its_own_answer_while_replicas_are_killed_in_turn(
    served: str, tiny: Path, right: np.ndarray, topology: str, tiers: list[str]
) -> None:
    name = f"killed-{topology}"
    args = AppArgs(encoder=str(tiny), device="cpu", topology=topology, hang_after_s=5)
    with running(build_app(args), name, Encoder=2, Batcher=2, Ingress=2):
        load = await load_while_killing(served, right, name, tiers)
        # Slots whose holders were killed are given back.
        await until(lambda: num_ongoing(name, "Encoder") == 0)

    assert sorted(load.answered) == list(range(NUM_IMAGES))
    assert load.wrong == 0
    assert set(load.retries) <= {"Ingress"}, "only its own connections die with a replica"
    assert load.retries["Ingress"] <= NUM_CLIENTS


class SlowRequest:
    """A request over a connection of its own, whose body is sent as slowly as one likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, url: str, num_bytes: int) -> "SlowRequest":
        """Send the headers."""
        parts = urlsplit(url)
        request = cls(*await asyncio.open_connection(parts.hostname, parts.port))
        await request.send(
            f"POST {parts.path}{IMAGES} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Length: {num_bytes}\r\n\r\n".encode()
        )
        return request

    async def send(self, data: bytes) -> None:
        """Send a part, unless the answer is there already."""
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Wait for the answer: its status, and all of it."""
        answer = await self._reader.read()
        self._writer.close()
        return int(answer.split()[1]), answer


async def test_fused_loses_what_is_in_flight_on_the_killed_replica_and_nothing_else(
    served: str, tiny: Path
) -> None:
    args = AppArgs(encoder=str(tiny), device="cpu", topology="fused")
    with running(build_app(args), "fused-killed", Ingress=2):
        url = f"{served}/fused-killed"
        requests = [await SlowRequest.begin(url, len(png(1))) for _ in range(20)]
        await until(lambda: num_ongoing("fused-killed", "Ingress") == 20)

        answers = [asyncio.create_task(request.answer()) for request in requests]

        os.kill(min(pids("fused-killed", "Ingress")), signal.SIGKILL)

        await until(lambda: any(answer.done() for answer in answers))
        await until(lambda: num_running("fused-killed", "Ingress") == 2)
        for request in requests:
            await request.send(png(1))
        statuses = Counter(status for status, _ in await asyncio.gather(*answers))
        async with httpx.AsyncClient(timeout=60) as client:
            later = [(await client.post(url + IMAGES, content=png(1))).status_code for _ in "1234"]

    print(f"in flight: {dict(statuses)}")
    assert set(statuses) == {200, 500}
    assert later == [200] * 4


POISON = (1, 2, 3)
"""The colour on which the engine below hangs. No other test sends it."""


class HangingEngine(Engine):
    """An engine that never returns from a batch with a certain image in it."""

    def _start(self, batch: PackedBatch, *wanted: Any) -> Started:
        pixels = batch.pixels.reshape(-1, 3)
        if (pixels == POISON).all(1).any():
            threading.Event().wait()
        return super()._start(batch, *wanted)


class Hangs(EncoderReplica):
    """An encoder with that engine."""

    def __init__(self, *args: Any, **more: Any) -> None:
        replica_module.Engine = HangingEngine  # in this process, which is this replica's own
        super().__init__(*args, **more)


@pytest.fixture(scope="module")
def faulty(served: str, tiny: Path) -> Iterator[str]:
    """URL of an app in three tiers over two encoders that can be made to hang."""
    args = AppArgs.model_validate(
        {
            "encoder": str(tiny),
            "device": "cpu",
            "queue": {"max_images": 64},
            "api": {"max_body_bytes": 1_000_000},
        }
    )
    config = EncoderConfig.load(args.encoder)
    encoder = serve.deployment(
        name="Encoder",
        max_ongoing_requests=SLOTS,
        graceful_shutdown_timeout_s=1,
        ray_actor_options=encoder_options(args),
    )(Hangs).bind(config, "cpu", 4.0)
    batcher = serve.deployment(name="Batcher", max_ongoing_requests=1024)(Batcher).bind(
        EncoderHandle(handle(encoder)), config, args.batch, args.queue
    )
    app = ingress(args, config, partial(BatcherHandle, handle(batcher)))
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with running(app, "faulty", Encoder=2):
        yield f"{served}/faulty"


@pytest.fixture
async def client(faulty: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it without a limit of connections."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=faulty, timeout=60, limits=limits) as client:
        yield client


def scraped(application: str) -> dict[str, float]:
    """Our metrics as Prometheus would see them, summed over replicas."""
    node = ray.nodes()[0]
    text = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10).text
    sums = Counter[str]()
    for name, tags, value in re.findall(r"^ray_(encoder_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        found = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        if found.get("application") == application:
            own = [found[key] for key in ("status", "reason") if key in found]
            sums[" ".join([name, *own])] += float(value)
    return dict(sums)


# The first test of this app, whose counters begin at nothing.
async def test_the_metrics_port_tells_what_was_asked_refused_and_encoded(
    client: httpx.AsyncClient,
) -> None:
    await client.post(IMAGES, files=[("file", png(index)) for index in range(4)])
    await client.post(IMAGES, content=png(5))
    await client.post(IMAGES, content=b"no image")

    expected = {
        "encoder_requests_total 200": 2,
        "encoder_requests_total 415": 1,
        "encoder_refusals_total unsupported_image_type": 1,
        "encoder_images_total": 5,
        "encoder_patches_total": 20,
        "encoder_admitted_images": 0,
        "encoder_decode_ms_count": 5,
        "encoder_queue_wait_ms_count": 5,
        "encoder_request_ms_count": 3,
    }

    def counted() -> dict[str, float]:
        now = scraped("faulty")
        return {name: now.get(name, -1) for name in expected}

    with suppress(TimeoutError):
        await until(lambda: counted() == expected, within_s=30)
    assert counted() == expected
    assert scraped("faulty")["encoder_outstanding_patches"] in (0, 4), "idle, or at the canary"


async def test_a_client_that_sends_a_byte_at_a_time_blocks_nobody(
    faulty: str, client: httpx.AsyncClient
) -> None:
    slow, statuses = await SlowRequest.begin(faulty, len(png(7))), set[int]()

    for byte in png(7):
        await slow.send(bytes([byte]))
        statuses.add((await client.post(IMAGES, content=png(8))).status_code)

    status, _ = await slow.answer()
    assert statuses == {200}
    assert status == 200


async def test_300_megabytes_in_chunks_are_refused_and_fill_no_replica(
    client: httpx.AsyncClient,
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(300):
            yield bytes(1_000_000)

    await client.get("/health")
    (replica,) = pids("faulty", "Ingress")
    before = memory_mb(replica)
    forget_peak(replica)

    reply = await client.post(IMAGES, content=chunks())

    peak, after = memory_mb(replica, peak=True), memory_mb(replica)
    print(f"Ingress had {before} MB, at most {peak} MB, then {after} MB")
    assert reply.status_code == 413
    assert "the limit is 1000000" in reply.json()["detail"]
    assert peak < before + 100


async def test_2000_requests_at_once_are_answered_or_told_when_to_come_back(faulty: str) -> None:
    tiers = [*pids("faulty", "Ingress"), *pids("faulty", "Batcher")]
    before = [memory_mb(pid) for pid in tiers]
    for pid in tiers:
        forget_peak(pid)
    start = time.monotonic()

    async def ask() -> tuple[int, bytes]:
        request = await SlowRequest.begin(faulty, len(png(9)))
        await request.send(png(9))
        return await request.answer()

    answers = await asyncio.gather(*(ask() for _ in range(2000)))

    took, peaks = time.monotonic() - start, [memory_mb(pid, peak=True) for pid in tiers]
    statuses = Counter(status for status, _ in answers)
    print(f"{dict(statuses)} in {took:.0f} s; Ingress, Batcher: {before} MB, at most {peaks} MB")
    assert set(statuses) == {200, 503}
    refusals = [answer.lower() for status, answer in answers if status == 503]
    assert all(b"\r\nretry-after: 1\r\n" in refusal for refusal in refusals)
    assert all(peak < mb + 300 for peak, mb in zip(peaks, before, strict=True))


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon", "1e", ""])
async def test_an_impossible_timeout_is_a_bad_request(
    client: httpx.AsyncClient, seconds: str
) -> None:
    headers = {"x-request-timeout-seconds": seconds}

    reply = await client.post(IMAGES, content=png(0), headers=headers)

    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("seconds", ["inf", "1e300", "30"])
async def test_a_generous_timeout_passes(client: httpx.AsyncClient, seconds: str) -> None:
    headers = {"x-request-timeout-seconds": seconds}

    reply = await client.post(IMAGES, content=png(0), headers=headers)

    assert reply.status_code == 200


async def test_a_client_that_leaves_fails_no_neighbour_in_its_batch(
    client: httpx.AsyncClient, right: np.ndarray
) -> None:
    (await client.post(IMAGES, content=png(0))).raise_for_status()
    encoders = pids("faulty", "Encoder")
    for pid in encoders:
        os.kill(pid, signal.SIGSTOP)
    try:
        requests = [
            asyncio.create_task(client.post(IMAGES, content=png(index), headers=NPY))
            for index in range(30)
        ]
        await until(lambda: num_ongoing("faulty", "Batcher") == 30)
        for request in requests[::3]:
            request.cancel()
        await until(lambda: num_ongoing("faulty", "Batcher") == 20)
    finally:
        for pid in encoders:
            os.kill(pid, signal.SIGCONT)
    replies = await asyncio.gather(*requests, return_exceptions=True)

    for index, reply in enumerate(replies):
        if index % 3 == 0:
            assert isinstance(reply, asyncio.CancelledError)
        else:
            assert isinstance(reply, httpx.Response)
            row = np.load(io.BytesIO(reply.content))[0]
            np.testing.assert_allclose(row, right[index], atol=1e-5)
    assert pids("faulty", "Encoder") == encoders


@ray.remote(num_cpus=0)
class Leaser:
    """Takes encoder slots, and dies before it sends a batch."""

    async def take_and_die(self, slots: EncoderHandle, num_slots: int) -> None:
        """Does not return."""
        async with AsyncExitStack() as stack:
            for _ in range(num_slots):
                await stack.enter_async_context(slots.lease())
            os.kill(os.getpid(), signal.SIGKILL)


async def test_the_slots_of_a_caller_that_died_are_free_again(client: httpx.AsyncClient) -> None:
    (await client.post(IMAGES, content=png(0))).raise_for_status()
    encoders = pids("faulty", "Encoder")
    slots = EncoderHandle(serve.get_deployment_handle("Encoder", "faulty"))

    with pytest.raises(ray.exceptions.RayActorError):
        await Leaser.remote().take_and_die.remote(slots, 2 * SLOTS)
    held = num_ongoing("faulty", "Encoder")
    reply = await client.post(IMAGES, content=png(0))

    assert held == 2 * SLOTS
    assert reply.status_code == 200
    await until(lambda: num_ongoing("faulty", "Encoder") == 0)
    assert pids("faulty", "Encoder") == encoders, "no encoder had to load again for it"


async def test_a_hung_engine_is_replaced_and_only_the_image_that_hangs_it_goes_unanswered(
    client: httpx.AsyncClient, right: np.ndarray
) -> None:
    (await client.post(IMAGES, content=png(0))).raise_for_status()
    encoders = pids("faulty", "Encoder")
    headers = {"x-request-timeout-seconds": "3"}
    start = time.monotonic()
    stuck = asyncio.create_task(client.post(IMAGES, content=solid(POISON), headers=headers))
    others = list[asyncio.Task[httpx.Response]]()
    while not stuck.done():
        image = png(len(others))
        others.append(asyncio.create_task(client.post(IMAGES, content=image, headers=NPY)))
        await asyncio.sleep(0.05)  # the pace at which they come
    meanwhile = sum(other.done() for other in others)
    replies = await asyncio.gather(*others)
    await until(lambda: len(pids("faulty", "Encoder") & encoders) == 1)
    took = time.monotonic() - start
    await until(lambda: num_running("faulty", "Encoder") == len(pids("faulty", "Encoder")) == 2)
    answer = await stuck

    print(
        f"{meanwhile} of {len(others)} others were answered meanwhile; {took:.1f} s; {answer.text}"
    )
    rows = [np.load(io.BytesIO(reply.raise_for_status().content))[0] for reply in replies]
    np.testing.assert_allclose(rows, right[: len(rows)], atol=1e-5)
    assert meanwhile > len(others) / 2
    assert answer.status_code == 408
    assert 2.9 < answer.elapsed.total_seconds() < 6
    assert len(pids("faulty", "Encoder") & encoders) == 1, "the image hung a second encoder"
