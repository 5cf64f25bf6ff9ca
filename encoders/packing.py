"""Images of many sizes -> one packed row of patches, without a batch axis. Host data only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""One decoded image: uint8 [height, width, 3]."""

Output = Literal["pooled", "patch"]
"""What a tower gives: one row per image, or the rows that its patches became."""

GridTHW = tuple[int, int, int]
"""Frames, rows and columns of one image, in patches."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Which image lies where in a packed batch: images longest first, ties by arrival.

    The order is canonical, so that the same images in any order of arrival share one layout.
    """

    order: tuple[int, ...]
    """`order[i]` is the arrival position of the image that is packed i-th."""
    grid_thw: tuple[GridTHW, ...]
    cu_seqlens: tuple[int, ...]
    """Boundaries in rows: first 0, last the total. An image's rows are its prefix and patches."""
    num_prefix: int

    @classmethod
    def of(cls, grids: Sequence[GridTHW], num_prefix: int) -> "PackedLayout":
        """The layout of images that arrived with these grids, each after `num_prefix` rows."""
        order = sorted(range(len(grids)), key=lambda i: -num_patches(grids[i]))  # sorted is stable
        packed = tuple(grids[i] for i in order)
        lengths = (num_prefix + num_patches(grid) for grid in packed)
        return cls(tuple(order), packed, tuple(accumulate(lengths, initial=0)), num_prefix)

    @property
    def num_images(self) -> int:
        """Images in the batch."""
        return len(self.order)

    @property
    def num_patches(self) -> int:
        """Patches in the batch."""
        return sum(map(num_patches, self.grid_thw))

    @property
    def num_rows(self) -> int:
        """Rows in the batch, prefixes included."""
        return self.cu_seqlens[-1]

    @property
    def seqlens(self) -> tuple[int, ...]:
        """Rows of each image, in packed order."""
        return tuple(end - start for start, end in pairwise(self.cu_seqlens))

    @property
    def max_seqlen(self) -> int:
        """Rows of the longest image. Attention kernels given less are silently wrong."""
        return self.cu_seqlens[1]  # the first image is the longest


class Call(NamedTuple):
    """What is asked of a tower, patches apart."""

    layout: PackedLayout
    output: Output


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Decoded images in packed order, in one buffer, with the layout they will have as patches."""

    layout: PackedLayout
    sizes: tuple[tuple[int, int], ...]
    """Height and width of each decoded image, in packed order."""
    pixels: npt.NDArray[np.uint8]
    """uint8, flat: the images one after another, each [height, width, 3]."""

    @classmethod
    def of(
        cls, images: Sequence[Pixels], grids: Sequence[GridTHW], num_prefix: int
    ) -> "PackedBatch":
        """Pack images in order of arrival with the grids they will be resized to."""
        layout = PackedLayout.of(grids, num_prefix)
        packed = [images[i] for i in layout.order]
        # The one copy on the host: a single buffer crosses to the Encoder as a single object.
        pixels = np.concatenate([image.reshape(-1) for image in packed])
        return cls(layout, tuple((image.shape[0], image.shape[1]) for image in packed), pixels)


def num_patches(grid: GridTHW) -> int:
    """Patches of one image."""
    frames, rows, columns = grid
    return frames * rows * columns
