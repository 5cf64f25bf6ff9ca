"""The parts of a packed vision transformer. No batch axis anywhere.

Shapes: T = packed rows, P = packed patches, D = model width, H = heads, K = head width, G = cells
of the trained position grid, Q = cells around a patch, R = merged rows, B = values of a merged row,
O = output width.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from encoders.attention import Attention, AttentionLayout
from encoders.kernels import add_layer_norm, add_positions, layer_norm, linear_gelu, rotate_

Rotary = tuple[Tensor, Tensor]
"""Row and column of each row's patch, int32 [T, 2], and the fp32 table [S, 2, Q] of turns by place.
See `encoders.kernels.rotate_`."""


class PackedAttention(nn.Module):
    """Self-attention within each image of a packed row."""

    def __init__(self, width: int, num_heads: int, *, qkv_bias: bool, attention: Attention) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = attention
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(
        self,
        x_TD: Tensor,
        layout: AttentionLayout,
        rotary: Rotary | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[T, D] -> [T, D], or only the `rows` of it that are named."""
        qkv_T3HK = self.qkv(x_TD).unflatten(-1, (3, self.num_heads, -1))
        if rotary is not None:
            rotate_(qkv_T3HK, *rotary)
        q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
        out_TD = self.attention(q_THK, k_THK, v_THK, layout).flatten(1)
        return self.proj(out_TD if rows is None else out_TD[rows])


class MLP(nn.Module):
    """Two linears around a GELU: exact (`none`) or its `tanh` approximation."""

    def __init__(self, width: int, hidden: int, *, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.fc2(linear_gelu(x_TD, self.fc1, self.approximate))


class Block(nn.Module):
    """Pre-norm transformer block; LayerScale, where a family has it, scales both branches."""

    def __init__(
        self,
        attention: PackedAttention,
        mlp: MLP,
        *,
        width: int,
        eps: float,
        layer_scale: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp
        self.scale1 = nn.Parameter(torch.ones(width)) if layer_scale else None
        self.scale2 = nn.Parameter(torch.ones(width)) if layer_scale else None

    def forward(
        self,
        x_TD: Tensor,
        y_TD: Tensor,
        then: nn.LayerNorm | None,
        layout: AttentionLayout,
        *,
        rotary: Rotary | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x and `norm1` of x -> the block's output, and that under `then`, the norm that follows.

        So each sum is normed in the pass that makes it. Without `then` the output comes twice.
        With `rows`, those alone go on after attention.
        """
        branch_TD = self.attention(y_TD, layout, rotary, rows)
        x_TD = x_TD if rows is None else x_TD[rows]
        x_TD, y_TD = add_layer_norm(x_TD, branch_TD, self.norm2, self.scale1)
        branch_TD = self.mlp(y_TD)
        if then is not None:
            return add_layer_norm(x_TD, branch_TD, then, self.scale2)
        x_TD = x_TD + (branch_TD if self.scale2 is None else self.scale2 * branch_TD)
        return x_TD, x_TD


def run_blocks(
    blocks: nn.ModuleList,
    x_TD: Tensor,
    final_norm: nn.LayerNorm | None,
    layout: AttentionLayout,
    *,
    rotary: Rotary | None = None,
    taps: Iterable[tuple[int, nn.Module]] = (),
    last_rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The last block's output under the final norm, and what each tap makes of its block's output.

    `last_rows`: those that are needed of the last block; its other rows are not computed.
    """
    modules = cast(list[Block], list(blocks))
    tapped, features = dict(taps), []
    y_TD = layer_norm(x_TD, modules[0].norm1)
    following = (*(block.norm1 for block in modules[1:]), final_norm)
    for depth, (block, then) in enumerate(zip(modules, following, strict=True)):
        rows = last_rows if depth == len(modules) - 1 else None
        x_TD, y_TD = block(x_TD, y_TD, then, layout, rotary=rotary, rows=rows)
        if depth in tapped:
            features.append(tapped[depth](x_TD))
    return y_TD, features


class Positions(nn.Module):
    """A trained grid of positions, interpolated at each patch."""

    def __init__(self, cells: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(cells, width))

    def forward(self, x_PD: Tensor, cell_PQ: Tensor, weight_PQ: Tensor) -> Tensor:
        """Patches plus the weighted sum of the cells that each names; fp32 weights."""
        return add_positions(x_PD, self.weight, cell_PQ, weight_PQ)


class PatchMerger(nn.Module):
    """Each block of neighbouring patches -> one row, normalised per patch or per block."""

    def __init__(
        self, width: int, block_width: int, out_width: int, *, norm_block: bool, eps: float
    ) -> None:
        super().__init__()
        self.block_width = block_width
        self.norm_width = block_width if norm_block else width
        self.norm = nn.LayerNorm(self.norm_width, eps=eps)
        self.fc1 = nn.Linear(block_width, block_width)
        self.fc2 = nn.Linear(block_width, out_width)

    def forward(self, x_PD: Tensor) -> Tensor:
        """[P, D] -> [R, O]."""
        return self.project(layer_norm(x_PD.reshape(-1, self.norm_width), self.norm))

    def project(self, y_PD: Tensor) -> Tensor:
        """Patches or blocks that are normalised already -> [R, O]."""
        y_RB = y_PD.reshape(-1, self.block_width)
        return self.fc2(linear_gelu(y_RB, self.fc1, "none"))  # exact, unlike the blocks' GELU
