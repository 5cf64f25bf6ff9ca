"""Pillow's bicubic for 8-bit images as whole numbers: its taps and the order of its passes.

Host data only. Pillow computes weights in fp64 and rounds them to 22 bits behind the point; all
that follows is whole numbers, so whoever uses these taps gets Pillow's bytes, on any device.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

PRECISION_BITS = 22
"""Bits of a weight behind the point: 32, less 8 of a value and 2 for what overshoots."""

BAND = 32
"""Pixels that a `Band` makes: enough for a fast product, few enough for few zeros in it."""

LONGEST_KEPT = 8192
"""Pixels of the longest line whose taps are kept for the next image."""

SUPPORT = 2.0  # pixels to each side that a bicubic reaches, where an image grows


class Taps(NamedTuple):
    """Which pixels of a line make each pixel of a resized one, in which shares.

    Pixel `i` is the sum over `t < counts[i]` of `weights[t, i]` times pixel `starts[i] + t`.
    """

    starts: Ints
    counts: Ints
    weights: Ints
    """[most taps, pixels] in units of 2^-22; zero from a pixel's count on."""


class Band(NamedTuple):
    """Some neighbouring pixels of a resized line as a product with a few of the line's."""

    made: slice
    used: slice
    matrix: npt.NDArray[np.float64]
    """[pixels made, pixels used], multiples of 2^-22."""


def taps(old: int, new: int) -> Taps:
    """Taps of a line of `old` pixels resized to `new`. Not to be written to: they are shared."""
    # Longer lines are rare, and a few hundred of them would fill a gigabyte.
    return (_kept_taps if max(old, new) <= LONGEST_KEPT else _taps)(old, new)


def _taps(old: int, new: int) -> Taps:
    # Pillow's operations in Pillow's order: a weight on the edge of rounding depends on the last
    # bit of each.
    scale = old / new
    stretch = max(scale, 1.0)
    center = (np.arange(new) + 0.5) * scale
    starts = np.maximum((center - SUPPORT * stretch + 0.5).astype(np.int32), 0)
    counts = np.minimum((center + SUPPORT * stretch + 0.5).astype(np.int32), old) - starts
    tap = np.arange(counts.max(), dtype=np.int32)[:, None]
    weights = _bicubic((tap + starts - center + 0.5) * (1.0 / stretch))
    weights[tap >= counts] = 0.0
    # One after another, as a loop adds them; `sum` adds in pairs.
    weights /= np.add.accumulate(weights)[-1]
    fixed = weights * (1 << PRECISION_BITS)
    rounded = np.trunc(fixed + np.copysign(0.5, fixed)).astype(np.int32)
    return Taps(starts, counts, rounded)


_kept_taps = lru_cache(maxsize=512)(_taps)


def bands(old: int, new: int) -> Iterator[Band]:
    """The same taps as fp64 matrices, each as wide as what its few pixels are made of."""
    starts, counts, weights = taps(old, new)
    tap = np.arange(len(weights))[:, None]
    for first in range(0, new, BAND):
        made = slice(first, min(first + BAND, new))
        low, high = int(starts[first]), int(starts[made.stop - 1] + counts[made.stop - 1])
        # Wider by the most taps, for the zeros behind the last ones of a line.
        matrix = np.zeros((made.stop - first, high - low + len(weights)))
        row = np.broadcast_to(np.arange(made.stop - first), weights[:, made].shape)
        matrix[row, starts[made] - low + tap] = weights[:, made] / (1 << PRECISION_BITS)
        yield Band(made, slice(low, high), matrix[:, : high - low])


def _bicubic(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Keys' cubic convolution, a = -1/2."""
    x = np.abs(distance)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def passes(old_height: int, old_width: int, height: int, width: int) -> Iterator[tuple[int, int]]:
    """Sizes after each pass that changes one. Horizontal first, with Pillow 13's exception.

    The exception (python-pillow/Pillow#9549): rows shrink, by more than twice what columns do.
    """
    between = (old_height, width)
    if height < old_height and old_height - height > 2 * (old_width - width):
        between = (height, old_width)
    if between != (old_height, old_width):
        yield between
    if between != (height, width):
        yield height, width
