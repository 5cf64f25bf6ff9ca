"""The parts of a packed vision transformer. No batch axis anywhere.

Shapes: T = packed rows, D = model width, H = heads, K = head width, F = MLP width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoders.attention import Attention, AttentionLayout

Rotary = tuple[Tensor, Tensor]
"""fp32 cosines and signed sines [T, 1, 1, K] of each row's rotation.

The sines of a head's first half are negated: `rotate` then needs no negation of its own.
"""


def rotate(x_T2HK: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the two halves of each head against each other, in fp32, cast back once.

    Queries and keys in one go, by four kernels: small batches are bound by launches.
    """
    cos_T11K, sin_T11K = rotary
    swapped_T2HK = x_T2HK.roll(x_T2HK.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_T2HK * cos_T11K, swapped_T2HK, sin_T11K).to(x_T2HK.dtype)


class PackedAttention(nn.Module):
    """Self-attention within each image of a packed row."""

    def __init__(self, width: int, num_heads: int, *, qkv_bias: bool, attention: Attention) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = attention
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(
        self, x_TD: Tensor, layout: AttentionLayout, rotary: Rotary | None = None
    ) -> Tensor:
        """[T, D] -> [T, D]."""
        qkv_T3HK = self.qkv(x_TD).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
        if rotary is not None:
            q_THK, k_THK = rotate(qkv_T3HK[:, :2], rotary).unbind(1)
        return self.proj(self.attention(q_THK, k_THK, v_THK, layout).flatten(1))


class MLP(nn.Module):
    """Two linears around a GELU: exact (`none`) or its `tanh` approximation."""

    def __init__(self, width: int, hidden: int, *, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.fc2(F.gelu(self.fc1(x_TD), approximate=self.approximate))


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
        self, x_TD: Tensor, layout: AttentionLayout, rotary: Rotary | None = None
    ) -> Tensor:
        """[T, D] -> [T, D]."""
        branch_TD = self.attention(self.norm1(x_TD), layout, rotary)
        x_TD = x_TD + (branch_TD if self.scale1 is None else self.scale1 * branch_TD)
        branch_TD = self.mlp(self.norm2(x_TD))
        return x_TD + (branch_TD if self.scale2 is None else self.scale2 * branch_TD)
