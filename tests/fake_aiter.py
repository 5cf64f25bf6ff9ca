"""A strict stand-in for AMD's AITER: its real signature, and none of its leniency.

`install` writes a package that the real detection, import and signature checks accept. The kernel
computes what CK computes: `min(length, max_seqlen_q)` rows of each segment. All others are NaN.

Shapes: T = packed rows, H = heads, K = head width.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CALLABLE = {  # aiter.md, section 0: the only arguments that a caller may pass
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "causal", "out"),
}
MAX_HEAD_SIZE = 256
HOST_READS = {
    *("item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose"),
    *("__int__", "__float__", "__bool__", "__index__"),
}
READING_OPS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)

calls: list[dict[str, Any]] = []
"""The keywords of each call, in order."""


class Refused(AssertionError):
    """AITER would fail, stall the stream, or be silently wrong."""


def _signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int, int] = (-1, -1, 0),
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    sink_ptr: Tensor | None = None,
) -> Tensor:
    """The signature of v0.1.10.post3 to v0.1.20.post1."""
    raise NotImplementedError


@functools.wraps(_signature)
def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Tensor:
    """AITER's attention, or `Refused`."""
    refuse_unless(not args, "positional arguments: the eighth is min_seqlen_q, not dropout_p")
    refuse_unless(kwargs.keys() <= CALLABLE, f"arguments {sorted(kwargs.keys() - CALLABLE)}")
    given = inspect.signature(_signature).bind(**kwargs)  # TypeError for a missing one
    given.apply_defaults()
    check_tensors(given.arguments)
    calls.append(kwargs)
    return attend(given.arguments)


def refuse_unless(allowed: bool, what: str) -> None:
    """Raise `Refused` with what was not allowed."""
    if not allowed:
        raise Refused(f"aiter refuses {what}")


def check_tensors(given: dict[str, Any]) -> None:
    """Everything that the kernel takes for granted."""
    q_THK: Tensor = given["q"]
    refuse_unless(not torch.is_grad_enabled(), "grad mode")
    refuse_unless(q_THK.dtype in (torch.bfloat16, torch.float16), f"{q_THK.dtype}")
    for name in ("q", "k", "v"):
        x_THK: Tensor = given[name]
        refuse_unless(x_THK.ndim == 3, f"{name} of {x_THK.ndim} dimensions")
        refuse_unless(x_THK.dtype == q_THK.dtype, f"{name} of another dtype than q")
        refuse_unless(x_THK.device == q_THK.device, f"{name} on {x_THK.device}")
        refuse_unless(x_THK.stride(-1) == 1, f"{name} whose last stride is {x_THK.stride(-1)}")
        refuse_unless(x_THK.shape[-1] <= MAX_HEAD_SIZE, f"head size {x_THK.shape[-1]}")
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        cu_seqlens: Tensor = given[name]
        refuse_unless(cu_seqlens.device == q_THK.device, f"{name} on {cu_seqlens.device}")
        refuse_unless(cu_seqlens.dtype == torch.int32, f"{name} of {cu_seqlens.dtype}")
        refuse_unless(cu_seqlens.is_contiguous(), f"{name} that is not contiguous")
        refuse_unless(cu_seqlens.ndim == 1 and len(cu_seqlens) > 1, f"{name} without a segment")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        # AITER itself takes a tensor and reads it back: a sync per layer, an error in capture.
        refuse_unless(type(given[name]) is int, f"{name} of type {type(given[name]).__name__}")
    refuse_unless(not given["causal"], "causal=True: an image is not a sequence")


def attend(given: dict[str, Any]) -> Tensor:
    """Attention within segments. Reads no value back, like the kernel itself."""
    q_THK, k_THK, v_THK = (given[name].float() for name in ("q", "k", "v"))
    segment_q, position_q = segments(given["cu_seqlens_q"], q_THK.shape[0])
    segment_k, _ = segments(given["cu_seqlens_k"], k_THK.shape[0])
    scale = given["softmax_scale"] or q_THK.shape[-1] ** -0.5

    scores_HTT = torch.einsum("ihk,jhk->hij", q_THK, k_THK) * scale
    scores_HTT = scores_HTT.masked_fill(segment_q[:, None] != segment_k[None, :], -torch.inf)
    out_THK = torch.einsum("hij,jhk->ihk", scores_HTT.softmax(-1), v_THK).to(given["q"].dtype)

    num_segments = len(given["cu_seqlens_q"]) - 1
    covered_T = (segment_q >= 0) & (segment_q < num_segments)
    written_T = (covered_T & (position_q < given["max_seqlen_q"]))[:, None, None]
    if given["out"] is None:
        return torch.where(written_T, out_THK, torch.nan)
    return given["out"].copy_(torch.where(written_T, out_THK, given["out"]))


def segments(cu_seqlens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Segment of each row, and the row's position in it."""
    rows_T = torch.arange(num_rows, device=cu_seqlens.device, dtype=torch.int32)
    segment_T = torch.searchsorted(cu_seqlens, rows_T, right=True) - 1
    return segment_T, rows_T - cu_seqlens[segment_T.clamp(min=0)]


class _NoReadingCalls(TorchFunctionMode):
    """On the CPU `tolist` reads memory without an operator, so the call itself is caught."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        refuse_unless(name not in HOST_READS, f"a read of the device while capturing: {name}")
        return func(*args, **(kwargs or {}))


class _NoReadingOps(TorchDispatchMode):
    """What reads a value from inside another operator, such as a tensor given as an int."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_unless(func not in READING_OPS, f"a read of the device while capturing: {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def capturing() -> Iterator[None]:
    """As if a graph were being captured: whatever would wait for the device is `Refused`."""
    with _NoReadingCalls(), _NoReadingOps():
        yield


def install(root: Path, init: str = "from aiter.ops.mha import flash_attn_varlen_func\n") -> Path:
    """Write the package `aiter` below `root`, laid out as AMD's, and return its folder."""
    package = root / "aiter"
    files = {
        "__init__.py": init,
        "ops/__init__.py": "",
        "ops/mha.py": f"from {__name__} import flash_attn_varlen_func\n",
        "jit/__init__.py": "",
        "jit/core.py": "",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    return package
