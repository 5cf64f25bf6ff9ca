"""What the tiers promise: Ingress needs an `ImageService`, Batcher needs `EncoderSlots`."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

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


class ImageService(Protocol):
    """Turns images into embeddings."""

    async def submit(self, images: Sequence[ImageItem]) -> list[Embedding]:
        """One embedding per image, in order. Raises an `EncoderError` that names the item."""
        ...


class EncoderSlot(Protocol):
    """The right to have one batch on one encoder."""

    async def encode(self, batch: PackedBatch) -> Rows:
        """One row per image, in order of arrival."""
        ...


class EncoderSlots(Protocol):
    """Every slot of every encoder."""

    def lease(self) -> AbstractAsyncContextManager[EncoderSlot]:
        """Wait until some encoder has a free slot, and hold it."""
        ...
