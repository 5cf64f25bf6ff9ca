"""Pillow's bicubic for 8-bit images as whole numbers: its taps and the order of its passes.

Host data only. Pillow computes weights in fp64 and rounds them to 22 bits behind the point; all
that follows is whole numbers, so whoever uses these taps gets Pillow's bytes, on any device.
"""

from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

PRECISION_BITS = 22
"""Bits of a weight behind the point: 32, less 8 of a value and 2 for what overshoots."""

BAND = 32
"""Pixels that a `Band` makes: enough for a fast product, few enough for few zeros in it."""

KEPT_BYTES = 128 * 1024 * 1024
"""Of taps that are kept for the next image: some thousands of photographs' sizes."""

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
    return _kept(old, new)


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


class _Kept:
    """Taps that were asked for lately, by bytes: photographs come in thousands of sizes, and taps
    of one that was not met yet cost more than a small batch on a GPU.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._taps = OrderedDict[tuple[int, int], Taps]()
        self._lock = Lock()

    def __call__(self, old: int, new: int) -> Taps:
        with self._lock:
            if found := self._taps.get((old, new)):
                self._taps.move_to_end((old, new))
                return found
        made = _taps(old, new)
        with self._lock:
            if (old, new) not in self._taps:
                self._taps[old, new] = made
                self._num_bytes += sum(array.nbytes for array in made)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._taps.popitem(last=False)
                self._num_bytes -= sum(array.nbytes for array in oldest)
        return made


_kept = _Kept(KEPT_BYTES)


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
