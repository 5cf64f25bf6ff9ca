"""The argument layouts of packed self-attention, and the reference that every kernel is held to.

Shapes: T = packed rows, H = heads, K = head width, S = rows of one image, N = images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionLayout = Tensor | list[Tensor | int]
"""`[cu_seqlens, max_seqlen]`, used as it is, or a bare `cu_seqlens` that the device is asked about.

`cu_seqlens` is int32 [N + 1], first 0, last T; `max_seqlen` is a Python int.
"""

Attention = Callable[[Tensor, Tensor, Tensor, AttentionLayout], Tensor]
"""(q, k, v, layout) -> out, each [T, H, K]: every row attends to the rows of its own image."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One attention kernel and what it needs."""

    name: str
    attention: Attention
    boundaries: Literal["host", "device"]
    """Where `attention` reads `cu_seqlens`."""
    capturable: bool
    """Whether it may be recorded in a HIP or CUDA graph."""
    reason: str = "as requested"
    """Why this one, for the log; after "auto" also what was passed over and why."""


def cu_seqlens_and_max(layout: AttentionLayout) -> tuple[Tensor, int]:
    """Both parts of a layout; a bare tensor costs one read of the device."""
    if isinstance(layout, Tensor):
        return layout, int(layout.diff().max())  # syncs: eager callers only
    match layout:
        case [Tensor() as cu_seqlens, int() as max_seqlen]:
            return cu_seqlens, max_seqlen
    # A tensor as max_seqlen would be read back by the kernel's launcher, once per layer.
    raise TypeError(
        "an attention layout is [cu_seqlens tensor, max_seqlen int], got "
        f"[{', '.join(type(part).__name__ for part in layout)}]"
    )


def sdpa(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: AttentionLayout) -> Tensor:
    """The reference: torch's own attention, one image at a time.

    Reads the boundaries on the host, so the Encoder keeps `cu_seqlens` in host memory for it;
    on a device tensor `tolist` would stall the stream in every layer.
    """
    cu_seqlens, _ = cu_seqlens_and_max(layout)
    lengths = cu_seqlens.diff().tolist()
    images = zip(*(torch.split(x_THK, lengths) for x_THK in (q_THK, k_THK, v_THK)), strict=True)
    return torch.cat([_one_image(q_SHK, k_SHK, v_SHK) for q_SHK, k_SHK, v_SHK in images])


def _one_image(q_SHK: Tensor, k_SHK: Tensor, v_SHK: Tensor) -> Tensor:
    q_1HSK, k_1HSK, v_1HSK = (x.transpose(0, 1).unsqueeze(0) for x in (q_SHK, k_SHK, v_SHK))
    return F.scaled_dot_product_attention(q_1HSK, k_1HSK, v_1HSK).squeeze(0).transpose(0, 1)
