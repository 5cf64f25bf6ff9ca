"""Compressed images in, embeddings out: header checks, decoding, packing, one slot per batch."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar

from pydantic import PositiveInt

from encoders import errors
from encoders.config import EncoderConfig, Settings
from serve_app import decoding, metrics, waiting
from serve_app.budget import ByteBudget
from serve_app.service import (
    POOLED,
    Embedding,
    EncoderGraphs,
    EncoderSlot,
    EncoderSlots,
    ImageItem,
    Rows,
    Stats,
    Wanted,
    deadline,
)
from serve_app.waiting import BatchLimits, Waiting, WaitingImages

T = TypeVar("T")

LITTLE = 1 << 20
"""Bytes that are read through, or copied, about as soon as a thread would answer."""

MAX_RETRIES = 2
"""Times that a batch is sent again after its encoder went away."""


class QueueLimits(Settings):
    """What one Batcher may hold. Past images or compressed bytes it refuses; decoding waits."""

    max_images: PositiveInt = 1024
    max_bytes: PositiveInt = 512 * 1024 * 1024
    max_decoded_bytes: PositiveInt = 1024 * 1024 * 1024
    decode_threads: PositiveInt = 4


class Batcher:
    """Leases an encoder slot, then packs what waits: batches grow while every encoder is busy."""

    def __init__(
        self,
        slots: EncoderSlots,
        config: EncoderConfig,
        batch_limits: BatchLimits,
        queue_limits: QueueLimits,
    ) -> None:
        self._slots = slots
        self._config = config
        self._queue_limits = queue_limits
        self._cpu_pool = ThreadPoolExecutor(queue_limits.decode_threads, "decode")
        # Headers and packing are quick, and would wait behind every image that is to be decoded, or
        # with a slot in hand until the rows of other batches have been read through.
        self._helper = ThreadPoolExecutor(1, "helper")
        self._checker = ThreadPoolExecutor(1, "checker")
        self._decoded = ByteBudget(queue_limits.max_decoded_bytes)
        self._undecoded: dict[object, float] = {}
        self._waiting = WaitingImages(batch_limits, config)
        self._num_images = 0
        self._num_bytes = 0
        self._leasing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        """One embedding per image, in order. Raises an `EncoderError` that names the item.

        What is not done in `timeout_s` is given up, and costs no encoder time after that.
        """
        num_bytes = sum(len(item.data) for item in images)
        with self._admitted(len(images), num_bytes):
            async with deadline(timeout_s, len(images)):
                return await self._embed_all(images, wanted)

    async def answer(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding] | errors.EncoderError:
        """`submit` for another process: Ray logs and sends a traceback with all that is raised."""
        try:
            return await self.submit(images, timeout_s, wanted)
        except errors.EncoderError as error:
            return error

    async def encoders(self) -> EncoderGraphs:
        """What each encoder said of its graphs when it last answered, by encoder."""
        return self._slots.encoders()

    async def check_health(self) -> None:
        """Raise if an encoder of this process is stuck."""
        await self._slots.check_health()

    def record_autoscaling_stats(self) -> Stats:
        """How long the oldest image has waited to be decoded, beside the encoders' own."""
        now = time.monotonic()
        age_s = now - next(iter(self._undecoded.values()), now)  # a dict keeps its order
        return {"queue_age_s": age_s, **self._slots.record_autoscaling_stats()}

    @contextmanager
    def _admitted(self, num_images: int, num_bytes: int) -> Iterator[None]:
        limits = self._queue_limits
        for unit, held, more, limit in (
            ("images", self._num_images, num_images, limits.max_images),
            ("bytes", self._num_bytes, num_bytes, limits.max_bytes),
        ):
            if held + more > limit:
                raise errors.Overloaded(f"{held} {unit} wait and {more} came, the limit is {limit}")
        self._count(num_images, num_bytes)
        try:
            yield
        finally:
            self._count(-num_images, -num_bytes)

    def _count(self, num_images: int, num_bytes: int) -> None:
        self._num_images += num_images
        self._num_bytes += num_bytes
        metrics.gauge("encoder_admitted_images").set(self._num_images)

    async def _embed_all(self, images: Sequence[ImageItem], wanted: Wanted) -> list[Embedding]:
        num_bytes, limits = sum(len(item.data) for item in images), self._config.limits
        headers = await little_in(self._helper, num_bytes, decoding.read_headers, images, limits)
        tasks = [
            asyncio.create_task(self._embed(item, wanted, 3 * header.num_pixels))
            for item, header in zip(images, headers, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one bad item fails its request, so the others cost no more
                task.cancel()

    async def _embed(self, item: ImageItem, wanted: Wanted, num_bytes: int) -> Embedding:
        ticket = object()
        try:
            async with self._decoded.hold(num_bytes):  # until its row is here
                # Not before: what waits for bytes may do so because an encoder is slow.
                self._undecoded[ticket] = time.monotonic()
                pixels, grid = await in_thread(self._cpu_pool, decoding.decode, item, self._config)
                del self._undecoded[ticket]
                return await self._encoded(Waiting(item.name, pixels, grid, wanted))
        finally:
            self._undecoded.pop(ticket, None)

    async def _encoded(self, image: Waiting) -> Embedding:
        self._waiting.append(image)
        self._ask_for_slot()
        return await image.future

    def _ask_for_slot(self) -> None:
        """Start one lease, unless one is being waited for or nothing needs it."""
        if self._waiting and not self._leasing:
            self._leasing = True
            # In a context of its own: in that of the request that asked, Ray would cancel the
            # whole batch when that one caller leaves.
            task = asyncio.create_task(self._encode_next(), context=Context())
            self._tasks.add(task)  # the loop itself keeps only weak references
            task.add_done_callback(self._tasks.discard)

    async def _encode_next(self) -> None:
        """Encode what waits when a slot is free, and settle every future, whatever happens."""
        batch: list[Waiting] | None = None  # None until a slot is ours
        try:
            for retries_left in reversed(range(1 + MAX_RETRIES)):
                try:
                    asked = time.perf_counter()
                    async with self._slots.lease() as slot:
                        metrics.observe_since("encoder_lease_wait_ms", asked)
                        batch = self._take(slot) if batch is None else waiting.still_wanted(batch)
                        rows = await self._encode(slot, batch)
                except errors.ReplicaLost:  # to encode twice is harmless: nothing is sent by it
                    if not retries_left:
                        raise
                    metrics.counter("encoder_retries_total").inc()
                else:
                    if batch:  # the slot has its next one meanwhile
                        await self._settle(batch, rows)
                    return
        except Exception as error:  # belongs to the callers; the next batch is served
            batch = self._take() if batch is None else batch
            waiting.fail(batch, error)
        finally:
            for image in self._take() if batch is None else batch:
                image.future.cancel()  # only if we were cancelled: the others are settled

    def _take(self, slot: EncoderSlot | None = None) -> list[Waiting]:
        """Cut a batch, for that slot; from now on the next one may ask for one."""
        digest = None if slot is None else slot.digest
        batch = self._waiting.take(digest, time.monotonic())
        self._leasing = False
        self._ask_for_slot()
        return batch

    async def _encode(self, slot: EncoderSlot, batch: list[Waiting]) -> Sequence[Rows] | Rows:
        if not batch:  # everyone left while the slot was waited for
            return []
        num_bytes = sum(image.pixels.nbytes for image in batch)
        packed = await little_in(self._helper, num_bytes, waiting.pack, batch, self._config)
        self._waiting.observe(batch)
        dtypes = [image.wanted.dtype for image in batch]
        return await slot.encode(packed, batch[0].wanted.output, dtypes)

    async def _settle(self, batch: list[Waiting], rows: Sequence[Rows] | Rows) -> None:
        # Patch rows are megabytes for each image, so they are read through in a thread.
        num_bytes = sum(row.nbytes for row in rows)
        bad = await little_in(self._checker, num_bytes, waiting.count_not_finite, batch, rows)
        self._waiting.learn(batch, rows)
        waiting.settle(batch, rows, bad)


async def little_in(
    pool: ThreadPoolExecutor, num_bytes: int, function: Callable[..., T], *args: Any
) -> T:
    """A call that passes over so many bytes: in a thread of the pool, if the way there is less."""
    if num_bytes <= LITTLE:
        return function(*args)
    return await in_thread(pool, function, *args)


async def in_thread(pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread of the pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
