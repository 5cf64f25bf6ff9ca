"""What Qwen3-VL's patches need by their place in a grid: taps of its positions, and rotations.

Shapes: P = packed patches, K = head width, Q = K / 4, S = the longest side in patches.
"""

import numpy as np
import numpy.typing as npt

from encoders.towers.taps import bilinear_taps, grid_taps


def block_tables(
    rows: int, columns: int, *, merge_size: int, side: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Row and column [P, 2], table cells [P, 4] and weights [P, 4] of a grid's packed patches.

    `side` is that of the trained grid.
    """
    # They are packed block by block, and row by row within a block.
    grid = np.arange(rows * columns).reshape(
        rows // merge_size, merge_size, columns // merge_size, merge_size
    )
    order_P = grid.swapaxes(1, 2).reshape(-1)
    cell_P4, weight_P4 = grid_taps(rows, columns, side, bilinear_taps)
    place_P2 = np.stack(np.divmod(order_P, columns), 1).astype(np.int32)
    return place_P2, cell_P4[order_P], weight_P4[order_P]


def turns(side: int, *, head_size: int, theta: float) -> npt.NDArray[np.float32]:
    """Cosines and sines [S, 2, Q] of rotations by each place along a side, in fp32 as transformers.

    Both halves of a head turn alike: Q channels by the patch's row, then Q by its column.
    """
    half = head_size // 2
    exponent_Q = np.arange(0, half, 2, dtype=np.float32) / half
    inverse_Q = 1 / np.float32(theta) ** exponent_Q
    angle_SQ = np.arange(side, dtype=np.float32)[:, None] * inverse_Q
    return np.stack([np.cos(angle_SQ), np.sin(angle_SQ)], axis=1, dtype=np.float32)
