"""The attention backends, and which of them an architecture and a head size get."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from encoders.attention import Attention, Backend, sdpa
from encoders.attention_kernels import (
    HALF,
    Target,
    architecture,
    load_aiter,
    load_flash,
    load_varlen,
)
from encoders.errors import BackendUnavailable

logger = logging.getLogger(__name__)

LOADERS: Mapping[str, Callable[[Target], Attention]] = MappingProxyType(
    {"aiter": load_aiter, "flash": load_flash, "varlen": load_varlen}
)

BEST: Mapping[tuple[str, int], str] = MappingProxyType(
    {
        # Measured on an H200, ms of a whole tower before its kernels were fused: flash costs the
        # device less, 83 against 127 for one image of 2048x1600 and 54 against 57 for 16 of
        # 512x512. The host it costs more, which replayed graphs hide.
        ("sm90", 72): "flash",
    }
)
"""(architecture, head size) -> backend, where it was measured."""

DEFAULT: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "sdpa",  # the only one with a CPU kernel
        "sm80": "varlen",  # not measured: it comes with torch, and can be captured
        "sm90": "varlen",  # 64 and 128 not measured
        "gfx942": "aiter",  # not measured
        "gfx950": "aiter",  # not measured
    }
)
"""architecture -> backend. Others get `varlen` on CUDA from sm80 up, else `sdpa`."""

FALLBACKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "flash": ("varlen", "sdpa"),
        "varlen": ("sdpa",),
        # Not varlen: torch's kernel for ROCm is another one (AOTriton), which nobody has run here.
        "aiter": ("sdpa",),
        "sdpa": (),
    }
)
"""What "auto" tries, in this order, where the table's choice cannot run."""


def choose_backend(
    requested: str, device: torch.device, dtype: torch.dtype, head_size: int
) -> Backend:
    """The backend of that name, or the table's for "auto". Raises `BackendUnavailable`.

    A name is never replaced by something else. "auto" is, with a warning in the log: replicas
    answer with the same bits only if they chose alike, so name the backend where that matters.
    """
    target = Target(architecture(device), dtype, head_size)
    if requested == "auto":
        return _auto(target)
    if requested not in FALLBACKS:
        names = ", ".join(("auto", *FALLBACKS))
        raise BackendUnavailable(f"there is no attention backend {requested!r}, only {names}")
    return _load(requested, target, "as requested")


def table_choice(target: Target) -> str:
    """What the table names for a target, whether or not it is installed."""
    if target.dtype not in HALF:
        return "sdpa"  # the other kernels take half precision alone
    best = BEST.get((target.architecture, target.head_size))
    other = "varlen" if target.compute_capability >= 80 else "sdpa"
    return best or DEFAULT.get(target.architecture, other)


def _auto(target: Target) -> Backend:
    choice = table_choice(target)
    reason = f"auto for {target}"
    for name in (choice, *FALLBACKS[choice]):
        try:
            return _load(name, target, reason)
        except BackendUnavailable as error:
            logger.warning("attention: auto for %s passes over %s", target, error)
            reason = f"{reason}; {error}"
    raise AssertionError("sdpa runs everywhere")


def _load(name: str, target: Target, reason: str) -> Backend:
    if name == "sdpa":
        return Backend(name, sdpa, boundaries="host", capturable=False, reason=reason)
    attention = LOADERS[name](target)
    return Backend(name, attention, boundaries="device", capturable=True, reason=reason)
