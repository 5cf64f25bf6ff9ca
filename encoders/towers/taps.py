"""Which cells of a trained position grid a patch reads, and with which weights. Host arithmetic."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

AxisTaps = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Indices into one side of the table and their weights: two [size, taps]."""


@lru_cache(maxsize=256)
def grid_taps(
    rows: int, columns: int, side: int, axis_taps: Callable[[int, int], AxisTaps]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Cells of a side x side table and their weights for each patch of a grid, row by row.

    Both are [rows * columns, taps^2]: interpolation is separable, so a weight is the product of
    its row's and its column's.
    """
    row_index, row_weight = axis_taps(rows, side)
    column_index, column_weight = axis_taps(columns, side)
    index = row_index[:, None, :, None] * side + column_index[None, :, None, :]
    weight = row_weight[:, None, :, None] * column_weight[None, :, None, :]
    flat = (rows * columns, row_index.shape[1] * column_index.shape[1])
    return index.reshape(flat).astype(np.int32), weight.reshape(flat).astype(np.float32)


def bicubic_taps(size: int, table: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The 4 table cells around each of `size` half-pixel centres, and their weights: two [size, 4].

    Cubic convolution with a = -0.75 and clamped borders, as `torch.nn.functional.interpolate`
    computes it for `mode="bicubic", align_corners=False`.
    """
    a = -0.75
    centre = (np.arange(size) + 0.5) * table / size - 0.5
    low = np.floor(centre)
    distance = np.abs(centre[:, None] - (low[:, None] + np.arange(-1, 3)))
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    index = low[:, None].astype(np.int64) + np.arange(-1, 3)
    return index.clip(0, table - 1), np.where(distance <= 1, near, far)


def bilinear_taps(size: int, table: int) -> AxisTaps:
    """The 2 table cells around each of `size` points, which spread from end to end, and weights."""
    # In fp32, as transformers computes them: the weights are then equal to the last bit.
    point = np.arange(size, dtype=np.float32)[:, None] * (table - 1) / max(size - 1, 1)
    low = np.floor(point)
    weight = 1 - np.abs(point - low - np.arange(2, dtype=np.float32))
    return (low + np.arange(2)).astype(np.int64).clip(0, table - 1), weight.astype(np.float64)
