"""The parts of a packed vision transformer. No batch axis anywhere.

Shapes: T = packed rows, D = model width, H = heads, K = head width, F = MLP width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoders.attention import Attention, AttentionLayout


class PackedAttention(nn.Module):
    """Self-attention within each image of a packed row."""

    def __init__(self, width: int, num_heads: int, *, qkv_bias: bool, attention: Attention) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = attention
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x_TD: Tensor, layout: AttentionLayout) -> Tensor:
        """[T, D] -> [T, D]."""
        qkv_T3HK = self.qkv(x_TD).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
        return self.proj(self.attention(q_THK, k_THK, v_THK, layout).flatten(1))


class MLP(nn.Module):
    """Two linears around an exact GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.fc2(F.gelu(self.fc1(x_TD)))


class Block(nn.Module):
    """Pre-norm transformer block whose two branches are scaled per channel (LayerScale)."""

    def __init__(self, attention: PackedAttention, mlp: MLP, *, width: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = attention
        self.scale1 = nn.Parameter(torch.ones(width))
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp
        self.scale2 = nn.Parameter(torch.ones(width))

    def forward(self, x_TD: Tensor, layout: AttentionLayout) -> Tensor:
        """[T, D] -> [T, D]."""
        x_TD = x_TD + self.scale1 * self.attention(self.norm1(x_TD), layout)
        return x_TD + self.scale2 * self.mlp(self.norm2(x_TD))
