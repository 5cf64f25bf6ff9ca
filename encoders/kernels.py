"""Memory-bound steps of a tower: one pass over memory on a GPU, plain torch elsewhere.

Each operation has its plain twin beside it, which defines what it computes and where it rounds;
the fused kernels (`encoders.triton_kernels`) round at the same places, to the tower's dtype, and
compute in fp32 between. `fused` alone decides which of the two runs.

Shapes: T = packed rows, D = model width, H = heads, K = head width, F = MLP width, Q = taps of a
position, G = cells of a table of positions, S = places along a side, Q = K / 4 where heads turn.
"""

import importlib.util
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fused(x: Tensor) -> bool:
    """Whether the fused kernels run on this tensor: on a GPU, where Triton is installed."""
    return x.is_cuda and _triton_kernels() is not None


@cache
def _triton_kernels() -> ModuleType | None:
    # Not at the top: Triton is part of torch for GPUs, and absent beside torch for the CPU.
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("encoders.triton_kernels")


def _launchers() -> ModuleType:
    launchers = _triton_kernels()
    assert launchers is not None
    return launchers


def layer_norm(x_TD: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm of each row: moments in fp32, rounded once."""
    if fused(x_TD):
        _, y_TD = _launchers().add_layer_norm(x_TD, None, None, norm.weight, norm.bias, norm.eps)
        return y_TD
    return norm(x_TD)


def add_layer_norm(
    x_TD: Tensor, branch_TD: Tensor, norm: nn.LayerNorm, scale_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`x + branch`, or `x + scale * branch`, and the LayerNorm of that sum. x stays as it was."""
    if fused(x_TD):
        return _launchers().add_layer_norm(
            x_TD, branch_TD, scale_D, norm.weight, norm.bias, norm.eps
        )
    return plain_add_layer_norm(x_TD, branch_TD, norm, scale_D)


def plain_add_layer_norm(
    x_TD: Tensor, branch_TD: Tensor, norm: nn.LayerNorm, scale_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The twin: product, sum and norm, each rounded."""
    x_TD = x_TD + (branch_TD if scale_D is None else scale_D * branch_TD)
    return x_TD, norm(x_TD)


def rotate_(qkv_T3HK: Tensor, place_T2: Tensor, turn_S2Q: Tensor) -> None:
    """Rotate the two halves of each head of q and k against each other, in place.

    Row t's channels turn by what the table holds at its row and column in the image, `place_T2`:
    Q channels of a half by the first, Q by the second. In fp32, rounded once. The table [S, 2, Q]
    holds cosines, then sines; places have to be below S.
    """
    if fused(qkv_T3HK):
        _launchers().rotate_(qkv_T3HK, place_T2, turn_S2Q)
    else:
        plain_rotate_(qkv_T3HK, place_T2, turn_S2Q)


def plain_rotate_(qkv_T3HK: Tensor, place_T2: Tensor, turn_S2Q: Tensor) -> None:
    """The twin: queries and keys in one go."""
    x_T2HK = qkv_T3HK[:, :2]
    cos, sin = (turn_S2Q[:, i][place_T2].flatten(1) for i in range(2))  # of half a head
    cos_TK, sin_TK = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
    swapped_T2HK = x_T2HK.roll(x_T2HK.shape[-1] // 2, dims=-1)
    cos_T11K, sin_T11K = cos_TK[:, None, None], sin_TK[:, None, None]
    x_T2HK.copy_(torch.addcmul(x_T2HK * cos_T11K, swapped_T2HK, sin_T11K))


def linear_gelu(x_TD: Tensor, linear: nn.Linear, approximate: str) -> Tensor:
    """GELU of a linear: exact (`none`), or its `tanh` approximation.

    In half precision on a GPU the BLAS library applies the `tanh` form to its fp32 sums before it
    rounds them, which costs nothing. The exact form, which it lacks, and fp32, for which its tanh
    is too coarse, are a pass over the sums, as in the twin.
    """
    if not fused(x_TD):
        return plain_linear_gelu(x_TD, linear, approximate)
    if approximate == "tanh" and x_TD.dtype != torch.float32:
        # On a GPU `use_gelu` means the tanh form; on the CPU it means the exact one.
        return torch._addmm_activation(linear.bias, x_TD, linear.weight.t(), use_gelu=True)
    return _launchers().gelu(linear(x_TD), tanh=approximate == "tanh")


def plain_linear_gelu(x_TD: Tensor, linear: nn.Linear, approximate: str) -> Tensor:
    """The twin: two operations, each rounded."""
    return F.gelu(linear(x_TD), approximate=approximate)


def add_positions(x_TD: Tensor, table_GD: Tensor, cell_TQ: Tensor, weight_TQ: Tensor) -> Tensor:
    """`x` plus the weighted rows of a table that each row names: summed in fp32, rounded, added."""
    if fused(x_TD):
        return _launchers().add_positions(x_TD, table_GD, cell_TQ, weight_TQ)
    return plain_add_positions(x_TD, table_GD, cell_TQ, weight_TQ)


def plain_add_positions(
    x_TD: Tensor, table_GD: Tensor, cell_TQ: Tensor, weight_TQ: Tensor
) -> Tensor:
    """The twin: a weighted bag is the whole interpolation in one operation."""
    position_TD = F.embedding_bag(
        cell_TQ, table_GD.float(), mode="sum", per_sample_weights=weight_TQ
    )
    return x_TD + position_TD.to(x_TD.dtype)
