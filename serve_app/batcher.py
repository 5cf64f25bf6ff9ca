"""Compressed images in, embeddings out: header checks, decoding, packing, one slot per batch."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import PositiveInt

from encoders.config import EncoderConfig, ImageLimits, Settings
from encoders.errors import EncoderError, InvalidImage, Overloaded
from encoders.image import ImageHeader, decode_rgb, read_header
from encoders.packing import GridTHW, PackedBatch, Pixels, num_patches
from encoders.sizes import NUM_PREFIX, grid_thw
from serve_app.budget import ByteBudget
from serve_app.service import Embedding, EncoderSlots, ImageItem, Rows

T = TypeVar("T")


class BatchLimits(Settings):
    """What one batch may hold. `max_bytes` counts decoded uint8 pixels."""

    max_patches: PositiveInt = 16_384
    max_images: PositiveInt = 64
    max_bytes: PositiveInt = 256 * 1024 * 1024


class QueueLimits(Settings):
    """What one Batcher may hold. Past images or compressed bytes it refuses; decoding waits."""

    max_images: PositiveInt = 1024
    max_bytes: PositiveInt = 512 * 1024 * 1024
    max_decoded_bytes: PositiveInt = 1024 * 1024 * 1024
    decode_threads: PositiveInt = 4


@dataclass(frozen=True, slots=True)
class Waiting:
    """A decoded image, what it costs a batch, and whoever waits for its row."""

    name: str
    pixels: Pixels
    grid: GridTHW
    future: asyncio.Future[Embedding]


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
        self._batch_limits = batch_limits
        self._queue_limits = queue_limits
        self._cpu_pool = ThreadPoolExecutor(queue_limits.decode_threads, "decode")
        self._decoded = ByteBudget(queue_limits.max_decoded_bytes)
        self._waiting: deque[Waiting] = deque()
        self._num_images = 0
        self._num_bytes = 0
        self._leasing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, images: Sequence[ImageItem]) -> list[Embedding]:
        """One embedding per image, in order. Raises an `EncoderError` that names the item."""
        with self._admitted(len(images), sum(len(item.data) for item in images)):
            headers = await self._in_thread(read_headers, images, self._config.limits)
            tasks = [
                asyncio.create_task(self._embed(item, header))
                for item, header in zip(images, headers, strict=True)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one bad item fails its request, so the others cost no more
                    task.cancel()

    @contextmanager
    def _admitted(self, num_images: int, num_bytes: int) -> Iterator[None]:
        limits = self._queue_limits
        for unit, held, more, limit in (
            ("images", self._num_images, num_images, limits.max_images),
            ("bytes", self._num_bytes, num_bytes, limits.max_bytes),
        ):
            if held + more > limit:
                raise Overloaded(f"{held} {unit} wait and {more} came, the limit is {limit}")
        self._num_images += num_images
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_images -= num_images
            self._num_bytes -= num_bytes

    async def _embed(self, item: ImageItem, header: ImageHeader) -> Embedding:
        async with self._decoded.hold(header.num_pixels * 3):  # until its row is here
            pixels = await self._in_thread(decode, item, self._config.limits)
            grid = grid_thw(self._config, *pixels.shape[:2])
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(Waiting(item.name, pixels, grid, future))
            self._ask_for_slot()
            return await future

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
        """Lease a slot, encode what waits then, and settle every future, whatever happens."""
        batch: list[Waiting] | None = None  # None until the slot is ours
        try:
            async with self._slots.lease() as slot:
                batch = self._take()
                if batch:
                    packed = await self._in_thread(self._pack, batch)
                    settle(batch, await slot.encode(packed))
        except Exception as error:  # belongs to the callers; the next batch is served
            batch = self._take() if batch is None else batch
            for item in batch:
                if not item.future.done():
                    item.future.set_exception(error)
        finally:
            for item in self._take() if batch is None else batch:
                item.future.cancel()  # only if we were cancelled: the others are settled

    def _take(self) -> list[Waiting]:
        """The next batch, first come first served; what does not fit waits at the front."""
        limits, batch, patches, num_bytes = self._batch_limits, list[Waiting](), 0, 0
        while self._waiting and len(batch) < limits.max_images:
            item = self._waiting[0]
            if not item.future.done():  # a caller that left costs no encoder time
                patches += num_patches(item.grid)
                num_bytes += item.pixels.nbytes
                if batch and (patches > limits.max_patches or num_bytes > limits.max_bytes):
                    break
                batch.append(item)
            self._waiting.popleft()
        self._leasing = False
        self._ask_for_slot()
        return batch

    def _pack(self, batch: Sequence[Waiting]) -> PackedBatch:
        num_prefix = NUM_PREFIX[self._config.family]
        return PackedBatch.of([x.pixels for x in batch], [x.grid for x in batch], num_prefix)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._cpu_pool, function, *args)


def read_headers(images: Sequence[ImageItem], limits: ImageLimits) -> list[ImageHeader]:
    """The header of every image, before any pixel is decoded. Raises a named `RequestError`."""
    headers = []
    for item in images:
        with naming(item.name):
            headers.append(read_header(item.data, limits))
    return headers


def decode(item: ImageItem, limits: ImageLimits) -> Pixels:
    """One image's pixels. Raises a named `RequestError`."""
    with naming(item.name):
        return decode_rgb(item.data, limits)


@contextmanager
def naming(item: str) -> Iterator[None]:
    """Errors that leave this block begin with the item's name."""
    try:
        yield
    except EncoderError as error:
        raise error.named(item) from error


def settle(batch: Sequence[Waiting], rows: Rows) -> None:
    """Give each caller its row; a row with NaN or infinity is that image's error alone."""
    if len(rows) != len(batch):  # whose row is missing cannot be known: nobody gets one
        raise ValueError(f"{len(rows)} rows came for {len(batch)} images")
    for item, row in zip(batch, rows, strict=True):
        if item.future.done():
            continue  # the caller left while the batch ran
        if np.isfinite(row).all():
            item.future.set_result(Embedding(row, num_patches(item.grid)))
        else:
            count = np.count_nonzero(~np.isfinite(row))
            error = InvalidImage(f"{count} of {row.size} values of the embedding are not finite")
            item.future.set_exception(error.named(item.name))
