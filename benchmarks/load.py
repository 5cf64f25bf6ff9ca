"""Load for the image service: real JPEGs, closed and open loops, in processes of their own.

A closed loop keeps a number of callers busy: each sends its next request when the last is answered.
It shows what the service can do, and hides waiting, since a slow service is asked less often.
An open loop sends at Poisson times of a given rate, answered or not. Its latencies count from the
intended arrival, so neither a service that stalls nor a generator that is late can hide it.
"""

import asyncio
import math
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import aiohttp
import skimage
from PIL import Image

PHOTOS = (
    "astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg",
    "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip
BOUNDARY = b"bench-serve-boundary"
TIMEOUT_S = 60.0
UP_S = 60.0
"""How long a generator may take to start."""


@dataclass(frozen=True)
class Load:
    """What one measurement sends. `concurrency` makes the loop closed, `rate` (per s) open."""

    url: str
    images_per_request: int
    concurrency: int | None = None
    rate: float | None = None

    def share(self, index: int, processes: int) -> "Load":
        """The part of one of several generators. Poisson streams add up to a Poisson stream."""
        if self.concurrency is None:
            assert self.rate is not None
            return Load(self.url, self.images_per_request, rate=self.rate / processes)
        callers = len(range(index, self.concurrency, processes))
        return Load(self.url, self.images_per_request, concurrency=callers)


class Sample(NamedTuple):
    """One request, by the monotonic clock. `since` is the intended arrival in an open loop."""

    since: float
    until: float
    ok: bool


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


def jpegs(case: str, count: int) -> list[bytes]:
    """Distinct JPEGs of quality 90, "HEIGHTxWIDTH": parts of photographs, the same every time."""
    height, width = map(int, case.split("x"))
    folder = Path(skimage.__file__).parent / "data"
    photos = [Image.open(folder / name).convert("RGB") for name in PHOTOS]
    rng = random.Random(0)
    return [jpeg(photo, width, height, rng) for photo in islice(cycle(photos), count)]


def jpeg(photo: Image.Image, width: int, height: int, rng: random.Random) -> bytes:
    """A part of a photo, somewhere and of some size, brought to the wanted one."""
    scale = min(photo.width / width, photo.height / height) * rng.uniform(0.5, 1)
    left = rng.uniform(0, photo.width - scale * width)
    top = rng.uniform(0, photo.height - scale * height)
    box = (left, top, left + scale * width, top + scale * height)
    file = BytesIO()
    photo.resize((width, height), Image.Resampling.BICUBIC, box).save(file, "JPEG", quality=90)
    return file.getvalue()


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
        self._bodies = bodies(images, load.images_per_request)
        kind = "image/jpeg"
        if load.images_per_request > 1:
            kind = f"multipart/form-data; boundary={BOUNDARY.decode()}"
        self._headers = {"Content-Type": kind, "Accept": "application/x-npy"}

    async def send(self, since: float) -> None:
        """One request and its whole answer."""
        body, ok = next(self._bodies), False
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as reply:
                answer = await reply.read()
                ok = reply.status == 200 and answer.startswith(b"\x93NUMPY")
        except (aiohttp.ClientError, TimeoutError):
            pass  # the sample says so
        self.samples.append(Sample(since, time.monotonic(), ok))

    async def call(self, until: float) -> None:
        """One caller of a closed loop."""
        while (now := time.monotonic()) < until:
            await self.send(now)

    async def arrive(self, rate: float, until: float, rng: random.Random) -> None:
        """An open loop, to its last answer."""
        async with asyncio.TaskGroup() as requests:
            for moment in arrivals(rate, time.monotonic(), until, rng):
                await asyncio.sleep(moment - time.monotonic())
                requests.create_task(self.send(moment))


async def drive(load: Load, images: Sequence[bytes], window: Window, seed: int) -> Outcome:
    """Send from now, which warms up, to the window's end."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        sender = Sender(session, load, images)
        if load.concurrency is None:
            assert load.rate is not None
            loops = [sender.arrive(load.rate, window.end, random.Random(seed))]
        else:
            loops = [sender.call(window.end) for _ in range(load.concurrency)]
        async with asyncio.TaskGroup() as group:
            cpu_s = group.create_task(own_cpu(window))
            for loop in loops:
                group.create_task(loop)
    return Outcome(sender.samples, cpu_s.result())


async def own_cpu(window: Window) -> float:
    """CPU seconds of this process inside the window."""
    await asyncio.sleep(window.begin - time.monotonic())
    before = time.process_time()
    await asyncio.sleep(window.end - time.monotonic())
    return time.process_time() - before


def generate(pipe: Connection, load: Load, images: Sequence[bytes], seed: int) -> None:
    """A generator's process: it says that it is up, is told when to run, and hands back."""
    pipe.send(None)
    window = pipe.recv()
    pipe.send(asyncio.run(drive(load, images, window, seed)))


class Generators:
    """The processes of one measurement."""

    def __init__(self, load: Load, images: Sequence[bytes], processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit threads and sockets
        pairs = [spawn.Pipe() for _ in range(processes)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            spawn.Process(
                target=generate,
                args=(theirs, load.share(i, processes), images[i::processes], i),
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

    def start(self, window: Window) -> None:
        """All at once."""
        for pipe in self._pipes:
            pipe.send(window)

    def outcomes(self) -> list[Outcome]:
        """What each saw; they have ended then."""
        outcomes = [pipe.recv() for pipe in self._pipes]
        for process in self._processes:
            process.join()
        return outcomes


def summarize(samples: Sequence[Sample], window: Window, *, open_loop: bool) -> Summary:
    """Rate by the answers inside the window.

    Latencies by the answers too in a closed loop, by the arrivals in an open one: those answered
    after the window are the slow ones.
    """
    done = sum(sample.ok for sample in samples if window.has(sample.until))
    ours = [s for s in samples if window.has(s.since if open_loop else s.until)]
    times = sorted((sample.until - sample.since) * 1e3 for sample in ours if sample.ok)
    return Summary(
        requests_per_s=done / (window.end - window.begin),
        p50_ms=percentile(times, 50),
        p99_ms=percentile(times, 99),
        errors=len(ours) - len(times),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By nearest rank: a time that some request did take. NaN of nothing."""
    rank = max(math.ceil(len(ordered) * percent / 100), 1)
    return ordered[rank - 1] if ordered else math.nan
