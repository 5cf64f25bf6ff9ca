"""What the tiers promise: Ingress needs an `ImageService`, Batcher needs `EncoderSlots`."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from encoders.errors import DeadlineExceeded
from encoders.packing import PackedBatch

Rows = npt.NDArray[np.float32]


class ImageItem(NamedTuple):
    """One compressed image of a request, and what to call it in an error: `input[3]`."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Embedding:
    """What became of one image: float32 [dimensions], and the patches it took."""

    values: Rows
    num_patches: int


Stats = dict[str, float]
"""What a replica tells Ray's autoscaler of itself."""


@asynccontextmanager
async def deadline(timeout_s: float, num_images: int) -> AsyncIterator[None]:
    """Give the block up after `timeout_s`. Raises `DeadlineExceeded`."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise  # somebody else's
        message = f"{num_images} images were not encoded within {timeout_s:g} s"
        raise DeadlineExceeded(message) from error


class ImageService(Protocol):
    """Turns images into embeddings."""

    async def submit(self, images: Sequence[ImageItem], timeout_s: float) -> list[Embedding]:
        """One embedding per image, in order. Raises an `EncoderError` that names the item.

        What is not done in `timeout_s` is given up, and costs no encoder time after that.
        """
        ...

    async def check_health(self) -> None:
        """Raise if what runs in this process is stuck."""
        ...

    def record_autoscaling_stats(self) -> Stats:
        """What runs in this process, for its deployment's policy."""
        ...


class EncoderSlot(Protocol):
    """The right to have one batch on one encoder."""

    async def encode(self, batch: PackedBatch) -> Rows:
        """One row per image, in order of arrival."""
        ...


class EncoderSlots(Protocol):
    """Every slot of every encoder."""

    def lease(self) -> AbstractAsyncContextManager[EncoderSlot]:
        """Wait until some encoder has a free slot, and hold it.

        The lease, or encoding under it, raises `ReplicaLost` if that encoder goes away.
        """
        ...

    async def check_health(self) -> None:
        """Raise if an encoder of this process is stuck."""
        ...

    def record_autoscaling_stats(self) -> Stats:
        """What the encoders of this process have outstanding."""
        ...
