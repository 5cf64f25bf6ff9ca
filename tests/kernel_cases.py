"""Inputs of the fused kernels and what their results may differ by: for the CPU and for a GPU.

Shapes: T = rows, D = width, H = heads, K = head width, G = cells, Q = taps.
"""

from typing import Any

import torch
from torch import Tensor, nn

NAN_ROW = 1
Size = tuple[int, int]
SIDE = 128
"""Places along a side, of a table of turns."""


def near(dtype: torch.dtype) -> dict[str, Any]:
    """One unit in the last place, and where values cancel to almost nothing fp32's own error."""
    rtol = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps
    return {"rtol": rtol, "atol": 2e-6, "equal_nan": True}


def random(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    """Values of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def norm_of(width: int, dtype: torch.dtype, device: str = "cpu") -> nn.LayerNorm:
    """A norm whose weight and bias both show."""
    norm = nn.LayerNorm(width, eps=1e-6)
    norm.weight.data = random(width, dtype=torch.float32, seed=1)
    norm.bias.data = random(width, dtype=torch.float32, seed=2)
    return norm.to(device, dtype).requires_grad_(False)


def turns(rows: int, size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Places [T, 2] and a table [S, 2, Q] in which no two of them turn alike."""
    generator = torch.Generator().manual_seed(6)
    place_T2 = torch.randint(0, SIDE, (rows, 2), generator=generator, dtype=torch.int32)
    angles = random(SIDE, size // 4, dtype=torch.float32, seed=3)
    return place_T2.to(device), torch.stack([angles.cos(), angles.sin()], 1).to(device)


def taps(rows: int, cells: int, count: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Cells [T, Q] and fp32 weights [T, Q], some negative as bicubic ones are."""
    generator = torch.Generator().manual_seed(4)
    cell_TQ = torch.randint(0, cells, (rows, count), generator=generator, dtype=torch.int32)
    return cell_TQ.to(device), random(rows, count, dtype=torch.float32, seed=5).to(device)


def spoilt(x_TD: Tensor) -> Tensor:
    """A copy with NaN and an infinity in one row."""
    x_TD = x_TD.clone()
    x_TD[NAN_ROW, 0] = torch.nan
    x_TD[NAN_ROW, 1] = torch.inf
    return x_TD


def others(x_TD: Tensor) -> Tensor:
    """The rows that `spoilt` left alone."""
    return torch.cat([x_TD[:NAN_ROW], x_TD[NAN_ROW + 1 :]])


def resized(block: int) -> tuple[list[Size], list[Size]]:
    """Sizes and targets of images that need every kind of passes; targets are whole blocks."""
    one, two = block, 2 * block
    pairs = [
        ((one, two), (one, two)),  # nothing to resize
        ((one, 37), (one, two)),  # columns alone
        ((61, one), (two, one)),  # rows alone
        ((2 * one + 1, 33), (two, one)),  # columns first
        ((5 * one, one + 3), (one, one)),  # rows first
        ((1, 1), (one, one)),
        ((3, 90), (one, two)),
    ]
    return [size for size, _ in pairs], [target for _, target in pairs]


def noise(sizes: list[Size], device: str = "cpu") -> Tensor:
    """Flat pixels of images of these sizes."""
    generator = torch.Generator().manual_seed(10)
    values = sum(3 * height * width for height, width in sizes)
    return torch.randint(0, 256, (values,), generator=generator, dtype=torch.uint8).to(device)
