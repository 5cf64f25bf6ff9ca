"""Attention kernels that need a GPU, and why one of them cannot run here.

Shapes: T = packed rows, H = heads, K = head width.
"""

import importlib
import importlib.util
import inspect
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from encoders.attention import Attention, AttentionLayout, cu_seqlens_and_max
from encoders.errors import BackendUnavailable

HALF = (torch.bfloat16, torch.float16)
AITER_ARCHITECTURES = ("gfx942", "gfx950")
AITER_IMAGES = (
    "AITER comes with the images lmsysorg/sglang-rocm, rocm/sgl-dev and rocm/vllm, not from PyPI"
)
# Beside q, k and v what we pass, and `out`: an AITER without it is older than any that was read.
AITER_PARAMETERS = frozenset(
    {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "out"}
)
FLASH_INSTALL = "pip install 'flash-attn-4[cu13]==4.0.0b36'"
# Importing a kernel library probes devices, sets up compilers and registers operators, and raises
# whatever those raise: AITER a RuntimeError where ROCm is missing, others by version. All of it
# means "cannot run here"; an interrupt or a lack of memory does not, and is let through.
KERNEL_FAILURES = (
    ImportError,
    RuntimeError,
    OSError,
    AttributeError,
    LookupError,
    ValueError,
    TypeError,
    NameError,
    AssertionError,
    SyntaxError,
    subprocess.SubprocessError,
)

Kernel = Callable[..., Tensor]
FlashKernel = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Target:
    """What a kernel is asked to run on."""

    architecture: str
    dtype: torch.dtype
    head_size: int

    def __str__(self) -> str:
        """As in "gfx950, bfloat16, head size 72"."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.architecture}, {dtype}, head size {self.head_size}"

    @property
    def compute_capability(self) -> int:
        """Of an NVIDIA GPU, 90 for 9.0; 0 for everything else."""
        name = self.architecture
        return int(name.removeprefix("sm")) if name.startswith("sm") else 0


def is_rocm() -> bool:
    """Whether this torch was built for ROCm. Nobody else asks `torch.version.hip`."""
    return torch.version.hip is not None


def architecture(device: torch.device) -> str:
    """What the table of backends and the kernels' gates go by: "sm90", "gfx950", "cpu"."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if is_rocm():
        return str(properties.gcnArchName).split(":")[0]  # of "gfx950:sramecc+:xnack-"
    return f"sm{properties.major}{properties.minor}"


def load_aiter(target: Target) -> Attention:
    """AMD's AITER. Raises `BackendUnavailable`, whose message says what to change."""
    if not is_rocm():
        raise BackendUnavailable(
            f"aiter: needs a ROCm build of torch, this is torch {torch.__version__}"
        )
    if problem := aiter_problem():
        raise BackendUnavailable(f"aiter: {problem}; {AITER_IMAGES}")
    refuse_architecture(
        "aiter", target, target.architecture in AITER_ARCHITECTURES, "gfx942, gfx950"
    )
    refuse_shape("aiter", target, max_head_size=256)
    try:  # only now: the import takes seconds, starts processes, and fails where ROCm is missing
        kernel = importlib.import_module("aiter").flash_attn_varlen_func
        missing = AITER_PARAMETERS - inspect.signature(kernel).parameters.keys()
    except KERNEL_FAILURES as error:
        raise BackendUnavailable(f"aiter: {import_failure(error)}; {AITER_IMAGES}") from error
    if missing:
        raise BackendUnavailable(
            "aiter: this version's flash_attn_varlen_func has no parameter "
            f"{', '.join(sorted(missing))}; {AITER_IMAGES}"
        )
    return partial(_aiter, kernel)


def aiter_problem() -> str | None:
    """Why `import aiter` would not bring AMD's AITER, found without importing it."""
    try:
        spec = importlib.util.find_spec("aiter")
    except ValueError:  # a bare stub stands in sys.modules
        return "the module 'aiter' was replaced at run time"
    if spec is None:
        return "AITER is not installed"
    # By its files: the distribution was named `aiter` too before it became `amd-aiter`.
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    if any((root / "ops/mha.py").is_file() and (root / "jit/core.py").is_file() for root in roots):
        return None
    origin = spec.origin or ", ".join(map(str, roots))
    return f"'aiter' at {origin} is not AMD's AITER (PyPI's 'aiter' is an async-iterator library)"


def load_varlen(target: Target) -> Attention:
    """torch's own FlashAttention. Raises `BackendUnavailable`."""
    runs = target.compute_capability >= 80 or target.architecture in AITER_ARCHITECTURES
    refuse_architecture("varlen", target, runs, "CUDA from sm80 up, gfx942, gfx950")
    if not torch.backends.cuda.is_flash_attention_available():
        raise BackendUnavailable(
            f"varlen: torch {torch.__version__} was built without FlashAttention"
        )
    refuse_shape("varlen", target, max_head_size=256, multiple_of=8)
    try:  # not at the top: it registers operators, and CPU processes do without
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except KERNEL_FAILURES as error:
        raise BackendUnavailable(f"varlen: {import_failure(error)}") from error
    return partial(_varlen, kernel)


def load_flash(target: Target) -> Attention:
    """FlashAttention 4, an optional package. Raises `BackendUnavailable`.

    It compiles at the first call of a head size, and again, each at its first occurrence, for a
    longest image of one tile (192 rows; 128 from head size 97) and for more than 256 images.
    """
    hopper_or_blackwell = target.compute_capability >= 90
    refuse_architecture("flash", target, hopper_or_blackwell, "CUDA from sm90 up")
    max_head_size = 256 if target.architecture == "sm90" else 128
    refuse_shape("flash", target, max_head_size=max_head_size, multiple_of=8)
    try:
        kernel = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except KERNEL_FAILURES as error:
        raise BackendUnavailable(f"flash: {import_failure(error)}; {FLASH_INSTALL}") from error
    return partial(_flash, kernel)


def refuse_architecture(name: str, target: Target, runs: bool, where: str) -> None:
    """Raise `BackendUnavailable` unless the kernel `runs` on the target's GPU."""
    if not runs:
        raise BackendUnavailable(f"{name}: runs on {where}, this is {target.architecture}")


def refuse_shape(name: str, target: Target, *, max_head_size: int, multiple_of: int = 1) -> None:
    """Raise `BackendUnavailable` unless a half-precision kernel takes the target's heads."""
    if target.dtype not in HALF:
        raise BackendUnavailable(f"{name}: takes bfloat16 or float16, not {target.dtype}")
    size = target.head_size
    if size > max_head_size or size % multiple_of:
        steps = f"a multiple of {multiple_of} " if multiple_of > 1 else ""
        raise BackendUnavailable(
            f"{name}: head size has to be {steps}up to {max_head_size}, got {size}"
        )


def import_failure(error: BaseException) -> str:
    """The line that a failed import gets in a message."""
    return f"importing it failed with {type(error).__name__}: {error}"


def _aiter(
    kernel: Kernel, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: AttentionLayout
) -> Tensor:
    q_THK, k_THK, v_THK = map(_dense_heads, (q_THK, k_THK, v_THK))
    return kernel(**_keywords(q_THK, k_THK, v_THK, layout))


def _flash(
    kernel: FlashKernel, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: AttentionLayout
) -> Tensor:
    # Tensors as they are: it copies those itself that its 16-byte loads cannot read, and views of
    # a packed qkv are none. Heads of 72 too: padded to 80 the kernel alone gained 5 to 9 %.
    out_THK, _ = kernel(**_keywords(q_THK, k_THK, v_THK, layout))
    return out_THK


def _varlen(
    kernel: Kernel, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: AttentionLayout
) -> Tensor:
    q_THK, k_THK, v_THK = map(_dense_heads, (q_THK, k_THK, v_THK))
    cu, longest = cu_seqlens_and_max(layout)
    return kernel(q_THK, k_THK, v_THK, cu_seq_q=cu, cu_seq_k=cu, max_q=longest, max_k=longest)


def _keywords(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: AttentionLayout
) -> dict[str, Tensor | int]:
    # By name alone: AITER's eighth positional is `min_seqlen_q`, which selects another kernel.
    cu_seqlens, max_seqlen = cu_seqlens_and_max(layout)
    return {
        "q": q_THK,
        "k": k_THK,
        "v": v_THK,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "causal": False,
    }


def _dense_heads(x_THK: Tensor) -> Tensor:
    # AITER and torch take any row and head stride, so views of a packed qkv pass uncopied.
    return x_THK if x_THK.stride(-1) == 1 else x_THK.contiguous()
