"""Load for the image service: real JPEGs, closed and open loops, in processes of their own.

A closed loop keeps a number of callers busy: each sends its next request when the last is answered.
It shows what the service can do, and hides waiting, since a slow service is asked less often.
An open loop sends at Poisson times of a given rate, answered or not. Its latencies count from the
intended arrival, so neither a service that stalls nor a generator that is late can hide it.
Answers are counted and dropped as they arrive: nothing parses them.
"""

import asyncio
import math
import multiprocessing
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import NamedTuple

import aiohttp

from benchmarks.serving.images import share

BOUNDARY = b"bench-serve-boundary"
NPY = "application/x-npy"
NPY_MAGIC = b"\x93NUMPY"
TIMEOUT_S = 30.0
UP_S = 60.0
"""How long a generator may take to start."""
DOWN_S = TIMEOUT_S + 5
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Load:
    """What one measurement sends. `concurrency` makes the loop closed, `rate` (per s) open."""

    url: str
    images_per_request: int
    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    """Of a closed loop, after which it ends."""
    accept: str = NPY

    def share(self, index: int, processes: int) -> "Load":
        """The part of one of several generators. Poisson streams add up to a Poisson stream."""
        if self.concurrency is None:
            assert self.rate is not None
            return replace(self, rate=self.rate / processes)
        callers = len(range(index, self.concurrency, processes))
        active = min(processes, self.concurrency)
        requests = self.requests and len(range(index, self.requests, active))
        return replace(self, concurrency=callers, requests=requests)


class Sample(NamedTuple):
    """One request, by the monotonic clock. `since` is the intended arrival in an open loop."""

    since: float
    until: float
    ok: bool
    num_bytes: int = 0
    """Of the answer's body."""


class Window(NamedTuple):
    """What is counted, by the monotonic clock, which all processes of a host share."""

    begin: float
    end: float

    def has(self, moment: float) -> bool:
        """Whether a moment lies inside."""
        return self.begin <= moment < self.end


class Outcome(NamedTuple):
    """What one generator saw, and its own CPU seconds inside the window."""

    samples: list[Sample]
    cpu_s: float


class Summary(NamedTuple):
    """One measurement."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int
    bytes_per_s: float = 0.0


def bodies(images: Sequence[bytes], per_request: int) -> Iterator[bytes]:
    """Endless request bodies, each with the images next in turn."""
    turn = cycle(images)
    while True:
        files = list(islice(turn, per_request))
        yield files[0] if per_request == 1 else multipart(files)


def multipart(files: Sequence[bytes]) -> bytes:
    """A form of files, ready before it is sent: the generator should cost little."""
    head = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%d.jpg"\r\n\r\n'
    parts = [head % (BOUNDARY, i) + data + b"\r\n" for i, data in enumerate(files)]
    return b"".join(parts) + b"--%b--\r\n" % BOUNDARY


def arrivals(rate: float, since: float, until: float, rng: random.Random) -> Iterator[float]:
    """Poisson times at a rate, from the one moment to the other."""
    moment = since
    while (moment := moment + rng.expovariate(rate)) < until:
        yield moment


class Sender:
    """One connection pool, and a sample of each request that went through it."""

    def __init__(self, session: aiohttp.ClientSession, load: Load, images: Sequence[bytes]) -> None:
        self.samples: list[Sample] = []
        self._session = session
        self._url = load.url
        self._left = math.inf if load.requests is None else load.requests
        self._bodies = bodies(images, load.images_per_request)
        kind = "image/jpeg"
        if load.images_per_request > 1:
            kind = f"multipart/form-data; boundary={BOUNDARY.decode()}"
        self._headers = {"Content-Type": kind, "Accept": load.accept}
        self._magic = NPY_MAGIC if load.accept == NPY else b""

    async def send(self, since: float) -> None:
        """One request and its whole answer."""
        body, ok, first, size = next(self._bodies), False, b"", 0
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as reply:
                async for chunk in reply.content.iter_any():
                    first = first or chunk
                    size += len(chunk)
                ok = reply.status == 200 and size > 0 and first.startswith(self._magic)
        except (aiohttp.ClientError, TimeoutError):
            pass  # the sample says so
        self.samples.append(Sample(since, time.monotonic(), ok, size))

    async def call(self, until: float) -> None:
        """One caller of a closed loop."""
        while (now := time.monotonic()) < until and self._left > 0:
            self._left -= 1
            await self.send(now)

    async def arrive(self, rate: float, until: float, rng: random.Random) -> None:
        """An open loop, to its last answer."""
        async with asyncio.TaskGroup() as requests:
            for moment in arrivals(rate, time.monotonic(), until, rng):
                await asyncio.sleep(moment - time.monotonic())
                requests.create_task(self.send(moment))


async def drive(load: Load, images: Sequence[bytes], window: Window, seed: int) -> Outcome:
    """Send from now, which warms up, to the window's end or the last request."""
    before = time.process_time()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=READ_BYTES
    ) as session:
        sender = Sender(session, load, images)
        if load.concurrency is None:
            assert load.rate is not None
            loops = [sender.arrive(load.rate, window.end, random.Random(seed))]
        else:
            loops = [sender.call(window.end) for _ in range(load.concurrency)]
        cpu = asyncio.create_task(own_cpu(window))
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop)
        if load.requests is not None:
            cpu.cancel()  # there the window's end is only the latest
            return Outcome(sender.samples, time.process_time() - before)
    return Outcome(sender.samples, await cpu)


async def own_cpu(window: Window) -> float:
    """CPU seconds of this process inside the window."""
    await asyncio.sleep(window.begin - time.monotonic())
    before = time.process_time()
    await asyncio.sleep(window.end - time.monotonic())
    return time.process_time() - before


def generate(pipe: Connection, images: Mapping[str, Sequence[bytes]], seed: int) -> None:
    """A generator's process: it says that it is up, and takes one load after another."""
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        load, case, window = task
        pipe.send(asyncio.run(drive(load, images[case], window, seed)))


class Generators:
    """Processes that stay up for many measurements, each with its part of every case's images."""

    def __init__(self, images: Mapping[str, Sequence[bytes]], processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit threads and sockets
        pairs = [spawn.Pipe() for _ in range(processes)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            spawn.Process(
                target=generate,
                args=(theirs, {c: share(x, c, i, processes) for c, x in images.items()}, i),
                daemon=True,
            )
            for i, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()  # else a generator that dies would never be missed
        for pipe in self._pipes:
            if not pipe.poll(UP_S):
                raise TimeoutError(f"a load generator was not up within {UP_S:g} s")
            pipe.recv()

    def start(self, load: Load, case: str, window: Window) -> None:
        """All at once."""
        for index, pipe in enumerate(self._pipes):
            pipe.send((load.share(index, len(self._pipes)), case, window))

    def outcomes(self) -> list[Outcome]:
        """What each saw, when all are done."""
        return [pipe.recv() for pipe in self._pipes]

    def end(self) -> None:
        """Let them end, or those that do not be ended."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(DOWN_S)
            process.kill()


def summarize(samples: Sequence[Sample], window: Window, *, open_loop: bool) -> Summary:
    """Rate by the answers inside the window.

    Latencies by the answers too in a closed loop, by the arrivals in an open one: those answered
    after the window are the slow ones.
    """
    seconds = window.end - window.begin
    done = [sample for sample in samples if sample.ok and window.has(sample.until)]
    ours = [s for s in samples if window.has(s.since if open_loop else s.until)]
    times = sorted((sample.until - sample.since) * 1e3 for sample in ours if sample.ok)
    return Summary(
        requests_per_s=len(done) / seconds,
        p50_ms=percentile(times, 50),
        p99_ms=percentile(times, 99),
        errors=len(ours) - len(times),
        bytes_per_s=sum(sample.num_bytes for sample in done) / seconds,
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By nearest rank: a time that some request did take. NaN of nothing."""
    rank = max(math.ceil(len(ordered) * percent / 100), 1)
    return ordered[rank - 1] if ordered else math.nan
