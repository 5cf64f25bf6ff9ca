"""The fused kernels in Triton, and their launchers. `encoders.kernels` has their plain twins.

Portable Triton: nothing of CUDA's own, so that ROCm's compiles them too. One program takes one row
(GELU: one run of values), so a row's result depends on that row alone, whatever the batch.

How many variants are compiled follows from the model's shape and from nothing else, so a forward
at start-up compiles all that requests will use: widths are `constexpr`, the number of rows is
only the grid or an argument that is not specialised on, and every tensor begins at a multiple of
16 bytes, or is copied to one. Nothing is tuned at run time.

Shapes: T = rows, D = width, H = heads, K = head width, F = MLP width, Q = taps of a position.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16  # bytes of the widest load
GELU_BLOCK = 2048


@triton.jit
def _add_layer_norm(
    x,
    branch,
    scale,
    weight,
    bias,
    x_out,
    y,
    D: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * D
    column = tl.arange(0, BLOCK)
    inside = column < D
    stream = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        # Each rounding is one that the twin's separate operations do.
        part = tl.load(branch + row + column, mask=inside, other=0.0).to(tl.float32)
        if scale is not None:
            part *= tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
            part = part.to(x.dtype.element_ty).to(tl.float32)
        stream = (stream + part).to(x.dtype.element_ty)
        tl.store(x_out + row + column, stream, mask=inside)
        stream = stream.to(tl.float32)
    mean = tl.sum(stream, axis=0) / D
    centred = tl.where(inside, stream - mean, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, axis=0) / D + EPS)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    out = centred / deviation * gain + shift
    tl.store(y + row + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    qkv, place, turns, HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    # A row holds the heads of q, then those of k, then those of v, which are left alone.
    inside = (head < 2 * HEADS) & (column < HALF)
    here = qkv + row * (6 * HEADS * HALF) + head * (2 * HALF) + column
    # The first half of a half turns by the patch's row, the second by its column. Loaded as a
    # vector, one for each channel: AMD's scalar loads may read what a copy just replaced.
    turned = column < HALF
    side = tl.load(place + row * 2 + column // (HALF // 2), mask=turned, other=0)
    turn = turns + side.to(tl.int64) * HALF + column % (HALF // 2)
    cos = tl.load(turn, mask=turned, other=0.0)
    sin = tl.load(turn + HALF // 2, mask=turned, other=0.0)
    first = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(here + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_first = first * cos + second * -sin
    turned_second = second * cos + first * sin
    tl.store(here, turned_first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(here + HALF, turned_second.to(qkv.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gelu(x, y, rows, F: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows.to(tl.int64) * F
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)): one exponential in place of a tanh.
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)  # 2 sqrt(2 / pi)
        out = value / (1.0 + tl.exp(-inner))
    else:
        out = value * 0.5 * (1.0 + tl.math.erf(value * 0.7071067811865476))  # 1 / sqrt(2)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_positions(
    x, table, cell, weight, y, D: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tap = tl.arange(0, TAPS)
    column = tl.arange(0, BLOCK)
    inside = column < D
    # Taps as vectors, not one by one: AMD's scalar loads may read what a copy just replaced.
    source = tl.load(cell + row * TAPS + tap).to(tl.int64)
    share = tl.load(weight + row * TAPS + tap)
    places = table + source[:, None] * D + column[None, :]
    values = tl.load(places, mask=inside[None, :], other=0.0).to(tl.float32)
    position = tl.sum(values * share[:, None], axis=0).to(x.dtype.element_ty)
    patch = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    out = patch + position.to(tl.float32)
    tl.store(y + row * D + column, out.to(y.dtype.element_ty), mask=inside)


def add_layer_norm(
    x_TD: Tensor,
    branch_TD: Tensor | None,
    scale_D: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Launch: `x + scale * branch` and its LayerNorm; x itself where there is no branch."""
    x_TD = aligned(x_TD)
    rows, width = x_TD.shape
    y_TD = torch.empty_like(x_TD)
    sum_TD = x_TD if branch_TD is None else torch.empty_like(x_TD)
    branch_TD = None if branch_TD is None else aligned(branch_TD)
    block = triton.next_power_of_2(width)
    tensors = (x_TD, branch_TD, scale_D, weight_D, bias_D, sum_TD, y_TD)
    constants = {"D": width, "EPS": eps, "BLOCK": block, "num_warps": _warps(block)}
    # Else the product with the scale joins the sum, even in half precision, and is not rounded.
    constants["enable_fp_fusion"] = False
    launch(_add_layer_norm, rows, *tensors, **constants)
    return sum_TD, y_TD


def rotate_(qkv_T3HK: Tensor, place_T2: Tensor, turn_S2Q: Tensor) -> None:
    """Launch: turn q and k of a packed qkv where they lie."""
    assert qkv_T3HK is aligned(qkv_T3HK), "the rotation is in place, a copy would be lost"
    rows, _, heads, size = qkv_T3HK.shape
    block_heads, block_half = (triton.next_power_of_2(n) for n in (2 * heads, size // 2))
    constants = {"HEADS": heads, "HALF": size // 2}
    constants |= {"BLOCK_HEADS": block_heads, "BLOCK_HALF": block_half}
    constants |= {"num_warps": _warps(block_heads * block_half)}
    launch(_rotate, rows, qkv_T3HK, aligned(place_T2), aligned(turn_S2Q), **constants)


def gelu(x_TF: Tensor, *, tanh: bool) -> Tensor:
    """Launch: GELU of every value."""
    x_TF = aligned(x_TF)
    rows, width = x_TF.shape
    y_TF = torch.empty_like(x_TF)
    constants = {"F": width, "TANH": tanh, "BLOCK": GELU_BLOCK, "num_warps": 4}
    launch(_gelu, triton.cdiv(rows * width, GELU_BLOCK), x_TF, y_TF, rows, **constants)
    return y_TF


def add_positions(x_TD: Tensor, table_GD: Tensor, cell_TQ: Tensor, weight_TQ: Tensor) -> Tensor:
    """Launch: `x` plus weighted rows of a table."""
    x_TD = aligned(x_TD)
    rows, width = x_TD.shape
    y_TD = torch.empty_like(x_TD)
    taps, block = cell_TQ.shape[1], triton.next_power_of_2(width)
    tensors = (x_TD, table_GD, aligned(cell_TQ), aligned(weight_TQ), y_TD)
    constants = {"D": width, "TAPS": taps, "BLOCK": block, "num_warps": _warps(taps * block)}
    launch(_add_positions, rows, *tensors, **constants)
    return y_TD


def aligned(x: Tensor) -> Tensor:
    """The same values, contiguous, from a place that asks for no variant of its own."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def launch(kernel: Any, programs: int, first: Tensor, *others: Any, **constants: Any) -> None:
    """Run so many programs of a kernel on the device of its first tensor."""
    # Triton launches on the current device, whatever the tensors' own is.
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[(programs,)](first, *others, **constants)


def _warps(values: int) -> int:
    # 16 values a thread on NVIDIA, 8 on AMD, whose warps are of 64 threads: enough loads in flight
    # for the memory's full rate, few enough registers for several programs on a core.
    return min(max(values // 512, 1), 8)
