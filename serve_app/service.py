"""What the tiers promise: Ingress needs an `ImageService`, Batcher needs `EncoderSlots`."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy.typing as npt

from encoders.errors import DeadlineExceeded
from encoders.graph_stats import Digest as Digest
from encoders.graph_stats import GraphStats as GraphStats
from encoders.packing import GridTHW, PackedBatch, num_patches
from encoders.packing import Output as Output

Dtype = Literal["float32", "float16", "bfloat16"]

Rows = npt.NDArray[Any]
"""float32, float16, or the bits of bfloat16 as uint16: NumPy has no type for these."""


class ImageItem(NamedTuple):
    """One compressed image of a request, and what to call it in an error: `input[3]`."""

    name: str
    data: bytes


class Wanted(NamedTuple):
    """What a request wants of each of its images, and as what."""

    output: Output = "pooled"
    dtype: Dtype = "float32"


POOLED = Wanted()


@dataclass(frozen=True, slots=True)
class Embedding:
    """What became of one image: [dimensions] or [rows, width], and the patches that it took."""

    values: Rows
    grid_thw: GridTHW

    @property
    def num_patches(self) -> int:
        """Patches that the tower saw; patch output may have fewer rows."""
        return num_patches(self.grid_thw)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What became of one batch, and how the encoder that it was on stands."""

    rows: Sequence[Rows] | Rows
    """One array per image, in order of arrival, each in its own dtype."""
    encoder: str
    """Which encoder of the cluster it was."""
    graphs: GraphStats
    digest: Digest | None
    """What it can replay; None if it never replays."""


EncoderGraphs = dict[str, GraphStats]
"""How each encoder's graphs stood when it last answered, by encoder."""

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

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        """One embedding per image, in order. Raises an `EncoderError` that names the item.

        What is not done in `timeout_s` is given up, and costs no encoder time after that.
        """
        ...

    async def encoders(self) -> EncoderGraphs:
        """What each encoder said of its graphs when it last answered, by encoder."""
        ...

    async def check_health(self) -> None:
        """Raise if what runs in this process is stuck."""
        ...

    def record_autoscaling_stats(self) -> Stats:
        """What runs in this process, for its deployment's policy."""
        ...


class EncoderSlot(Protocol):
    """The right to have one batch on one encoder."""

    @property
    def digest(self) -> Digest | None:
        """What that encoder could replay when it last answered here; None if that is not known."""
        ...

    async def encode(
        self, batch: PackedBatch, output: Output, dtypes: Sequence[Dtype]
    ) -> Sequence[Rows] | Rows:
        """One array per image, in order of arrival, each in its own dtype."""
        ...


class EncoderSlots(Protocol):
    """Every slot of every encoder."""

    def encoders(self) -> EncoderGraphs:
        """What each encoder said of its graphs when it last answered, by encoder."""
        ...

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
