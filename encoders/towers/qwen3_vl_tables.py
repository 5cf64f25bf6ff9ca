"""What Qwen3-VL's patches need by their place in a grid: taps of its positions, and rotations.

Shapes: P = packed patches, K = head width, Q = K / 4, S = a side in patches.
"""

import numpy as np
import numpy.typing as npt

from encoders.towers.taps import bilinear_taps, grid_taps


def block_tables(
    rows: int, columns: int, *, merge_size: int, side: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Row and column [P, 2], table cells [P, 4] and weights [P, 4] of a grid's packed patches.

    `side` is that of the trained grid.
    """
    # They are packed block by block, and row by row within a block.
    grid = np.arange(rows * columns).reshape(
        rows // merge_size, merge_size, columns // merge_size, merge_size
    )
    order_P = grid.swapaxes(1, 2).reshape(-1)
    cell_P4, weight_P4 = grid_taps(rows, columns, side, bilinear_taps)
    return np.stack(np.divmod(order_P, columns), 1), cell_P4[order_P], weight_P4[order_P]


def rotations(
    place_P2: npt.NDArray[np.int64], *, head_size: int, theta: float
) -> npt.NDArray[np.float32]:
    """Cosines and signed sines [2, P, K] of patches at these places, in fp32 as transformers."""
    half = head_size // 2
    exponent_Q = np.arange(0, half, 2, dtype=np.float32) / half
    inverse_Q = 1 / np.float32(theta) ** exponent_Q
    angle_SQ = np.arange(place_P2.max() + 1, dtype=np.float32)[:, None] * inverse_Q
    turn_2SQ = np.stack([np.cos(angle_SQ), np.sin(angle_SQ)], dtype=np.float32)
    # Both halves of a head turn alike: Q channels by the row, then Q by the column.
    turn_2PK = turn_2SQ.take(np.tile(place_P2, 2), axis=1).reshape(2, len(place_P2), head_size)
    turn_2PK[1, :, :half] *= -1  # see `encoders.kernels.rotate_`
    return turn_2PK
