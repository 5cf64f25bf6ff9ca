"""Decoded images that wait for an encoder: what a batch may hold, and who gets which row."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from encoders.config import EncoderConfig, Settings
from encoders.errors import InvalidImage
from encoders.packing import GridTHW, PackedBatch, Pixels, num_patches
from encoders.sizes import NUM_PREFIX
from serve_app.composing import choose
from serve_app.metrics import counter, histogram
from serve_app.service import POOLED, Digest, Dtype, Embedding, Output, Rows, Wanted

BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class BatchLimits(Settings):
    """What one batch may hold. `max_bytes` counts decoded uint8 pixels.

    `max_row_bytes` counts what patch output comes back as, once a first batch has told how much
    that is. One image may have more, and goes alone.
    """

    max_patches: PositiveInt = 16_384
    max_images: PositiveInt = 64
    max_bytes: PositiveInt = 256 * 1024 * 1024
    max_row_bytes: PositiveInt = 256 * 1024 * 1024
    prefer_within_ms: NonNegativeFloat = 50.0
    """For so long an image may be left behind by a batch that an encoder has a graph for."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A decoded image, what it costs a batch, and whoever waits for its row."""

    name: str
    pixels: Pixels
    grid: GridTHW
    wanted: Wanted = POOLED
    future: asyncio.Future[Embedding] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    since: float = field(default_factory=time.monotonic)


class WaitingImages:
    """Images from which batches are cut, each of one output kind: first come first served, or what
    of that an encoder can replay.
    """

    def __init__(self, limits: BatchLimits, config: EncoderConfig) -> None:
        self._limits = limits
        self._num_prefix = NUM_PREFIX[config.family]
        self._queues: defaultdict[Output, deque[Waiting]] = defaultdict(deque)
        self._values_per_row = 0.0
        """Of patch output. How wide rows are is the checkpoint's, so a batch has to show it."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def append(self, image: Waiting) -> None:
        """Put an image last."""
        self._queues[image.wanted.output].append(image)

    def take(self, digest: Digest | None, now: float) -> list[Waiting]:
        """Cut the next batch, of the kind that waits longest. What is left stays in front.

        `digest` tells what its encoder can replay. The image that waits longest is always taken,
        and so is what has waited for `prefer_within_ms` and has its turn.
        """
        images = min(filter(None, self._queues.values()), key=lambda x: x[0].since, default=deque())
        batch = self._first_come(images)
        if digest is None or len(batch) < 2:
            return batch
        overdue = now - self._limits.prefer_within_ms * 1e-3
        num_overdue = sum(image.since <= overdue for image in batch)
        patches = [num_patches(image.grid) for image in batch]
        output = batch[0].wanted.output
        chosen = choose(patches, num_overdue, output, self._num_prefix, digest)
        left = set(range(len(batch))).difference(chosen)
        images.extendleft(batch[i] for i in sorted(left, reverse=True))
        return [batch[i] for i in chosen]

    def _first_come(self, images: deque[Waiting]) -> list[Waiting]:
        limits, batch = self._limits, list[Waiting]()
        patches, num_bytes, values, width = 0, 0, 0.0, 0
        while images and len(batch) < limits.max_images:
            image = images[0]
            if not image.future.done():  # a caller that left costs no encoder time
                patches += num_patches(image.grid)
                num_bytes += image.pixels.nbytes
                values += self._values(image)
                # All of them leave the device in one dtype, the widest.
                width = max(width, BYTES[image.wanted.dtype])
                if batch and (
                    patches > limits.max_patches
                    or num_bytes > limits.max_bytes
                    or values * width > limits.max_row_bytes
                ):
                    break
                batch.append(image)
            images.popleft()
        return batch

    def learn(self, batch: Sequence[Waiting], rows: Sequence[Rows] | Rows) -> None:
        """How large the rows of a batch are."""
        if batch[0].wanted.output == "patch":
            made = sum(num_patches(image.grid) + self._num_prefix for image in batch)
            self._values_per_row = sum(row.size for row in rows) / made

    def _values(self, image: Waiting) -> float:
        if image.wanted.output == "pooled":
            return 0.0
        return self._values_per_row * (num_patches(image.grid) + self._num_prefix)

    def observe(self, batch: Sequence[Waiting]) -> None:
        """Measure a batch that is about to be encoded."""
        now, limits = time.monotonic(), self._limits
        patches = sum(num_patches(image.grid) for image in batch)
        num_bytes = sum(image.pixels.nbytes for image in batch)
        for image in batch:
            histogram("encoder_queue_wait_ms").observe((now - image.since) * 1e3)
        fill = histogram("encoder_batch_fill")
        fill.observe(patches / limits.max_patches, tags={"budget": "patches"})
        fill.observe(len(batch) / limits.max_images, tags={"budget": "images"})
        fill.observe(num_bytes / limits.max_bytes, tags={"budget": "bytes"})
        row_bytes = sum(map(self._values, batch)) * max(BYTES[x.wanted.dtype] for x in batch)
        fill.observe(row_bytes / limits.max_row_bytes, tags={"budget": "row_bytes"})


def still_wanted(batch: Sequence[Waiting]) -> list[Waiting]:
    """Those of a batch whose callers have not left."""
    return [image for image in batch if not image.future.done()]


def pack(batch: Sequence[Waiting], config: EncoderConfig) -> PackedBatch:
    """One buffer of a batch's pixels, with the layout of its patches."""
    pixels, grids = [image.pixels for image in batch], [image.grid for image in batch]
    return PackedBatch.of(pixels, grids, NUM_PREFIX[config.family])


def num_not_finite(rows: Rows) -> int:
    """How many values are NaN or infinite."""
    if rows.dtype == np.float32:
        return rows.size - int(np.count_nonzero(np.isfinite(rows)))
    # Their exponents are all ones. NumPy has no bfloat16, and is slow to test float16.
    ones = np.uint16({"uint16": 0x7F80, "float16": 0x7C00}[rows.dtype.name])
    return int(np.count_nonzero(rows.view(np.uint16) & ones == ones))


def count_not_finite(batch: Sequence[Waiting], rows: Sequence[Rows] | Rows) -> list[int]:
    """Of each image's rows. Raises `ValueError` if not every image has some."""
    if len(rows) != len(batch):  # whose row is missing cannot be known: nobody gets one
        raise ValueError(f"{len(rows)} rows came for {len(batch)} images")
    return [num_not_finite(row) for row in rows]


def settle(batch: Sequence[Waiting], rows: Sequence[Rows] | Rows, bad: Sequence[int]) -> None:
    """Give each caller its rows; those with NaN or infinity are that image's error alone."""
    counter("encoder_images_total").inc(len(batch))
    counter("encoder_patches_total").inc(sum(num_patches(image.grid) for image in batch))
    for image, row, count in zip(batch, rows, bad, strict=True):
        if image.future.done():
            continue  # the caller left while the batch ran
        if not count:
            image.future.set_result(Embedding(row, image.grid))
        else:
            error = InvalidImage(f"{count} of {row.size} values of the embedding are not finite")
            image.future.set_exception(error.named(image.name))


def fail(batch: Sequence[Waiting], error: Exception) -> None:
    """Tell every caller that still waits why there is no row."""
    for image in still_wanted(batch):
        image.future.set_exception(error)
