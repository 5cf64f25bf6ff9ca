"""Which backend an architecture gets, and what an impossible request is told."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from encoders import attention_kernels, backends
from encoders.attention import Backend, sdpa
from encoders.attention_kernels import Target
from encoders.backends import DEFAULT, FALLBACKS, LOADERS, choose_backend, table_choice
from encoders.errors import BackendUnavailable

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def pretend(monkeypatch: pytest.MonkeyPatch, architecture: str, *, rocm: bool = False) -> None:
    """Let the rest of the code believe that it runs on that GPU."""
    monkeypatch.setattr(backends, "architecture", lambda device: architecture)
    monkeypatch.setattr(attention_kernels, "is_rocm", lambda: rocm)


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel can be loaded."""

    def absent(name: str, target: Target) -> None:
        raise BackendUnavailable(f"{name}: absent")

    loaders = {name: partial(absent, name) for name in LOADERS}
    monkeypatch.setattr(backends, "LOADERS", loaders)


@pytest.fixture
def all_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel can be loaded. None is called."""
    monkeypatch.setattr(backends, "LOADERS", dict.fromkeys(LOADERS, lambda target: sdpa))


@pytest.mark.parametrize(
    ("architecture", "dtype", "head_size", "name"),
    [
        ("cpu", BF16, 64, "sdpa"),
        ("cpu", FP32, 64, "sdpa"),
        ("mps", BF16, 64, "sdpa"),
        ("sm75", BF16, 64, "sdpa"),
        ("sm80", BF16, 72, "varlen"),
        ("sm89", BF16, 64, "varlen"),
        ("sm90", BF16, 64, "varlen"),
        ("sm90", BF16, 72, "flash"),
        ("sm90", torch.float16, 80, "varlen"),
        ("sm90", FP32, 72, "sdpa"),
        ("sm100", BF16, 72, "varlen"),
        ("gfx942", BF16, 64, "aiter"),
        ("gfx950", torch.float16, 72, "aiter"),
        ("gfx950", FP32, 72, "sdpa"),
        ("gfx1100", BF16, 64, "sdpa"),
    ],
)
def test_auto_takes_what_the_table_names(
    monkeypatch: pytest.MonkeyPatch,
    all_libraries: None,
    architecture: str,
    dtype: torch.dtype,
    head_size: int,
    name: str,
) -> None:
    pretend(monkeypatch, architecture)

    backend = choose_backend("auto", CPU, dtype, head_size)

    assert backend.name == name
    assert table_choice(Target(architecture, dtype, head_size)) == name
    assert f"auto for {architecture}, " in backend.reason
    assert f"head size {head_size}" in backend.reason


@pytest.mark.parametrize(
    ("architecture", "passed_over"),
    [("sm90", ["flash", "varlen"]), ("sm80", ["varlen"]), ("gfx950", ["aiter"]), ("cpu", [])],
)
def test_auto_falls_back_in_order_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    no_libraries: None,
    architecture: str,
    passed_over: list[str],
) -> None:
    pretend(monkeypatch, architecture)

    with caplog.at_level(logging.WARNING):
        backend = choose_backend("auto", CPU, BF16, 72)

    assert backend.name == "sdpa"
    refusals = [f"{name}: absent" for name in passed_over]
    target = f"{architecture}, bfloat16, head size 72"
    assert backend.reason == "; ".join([f"auto for {target}", *refusals])
    assert [record.getMessage() for record in caplog.records] == [
        f"attention: auto for {target} passes over {refusal}" for refusal in refusals
    ]


def test_auto_on_the_cpu_really_is_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    backend = choose_backend("auto", CPU, FP32, 64)

    assert backend == Backend(
        "sdpa", sdpa, "host", capturable=False, reason="auto for cpu, float32, head size 64"
    )
    assert caplog.records == []


@pytest.mark.parametrize("name", ["aiter", "flash", "varlen"])
def test_kernels_read_boundaries_on_the_device_and_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, all_libraries: None, name: str
) -> None:
    backend = choose_backend(name, CPU, BF16, 64)

    assert (backend.name, backend.boundaries, backend.capturable) == (name, "device", True)
    assert backend.reason == "as requested"


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("aiter", r"aiter: needs a ROCm build of torch, this is torch \d"),
        ("varlen", r"varlen: runs on CUDA from sm80 up, gfx942, gfx950, this is cpu"),
        ("flash", r"flash: runs on CUDA from sm90 up, this is cpu"),
        ("triton", r"no attention backend 'triton', only auto, flash, varlen, aiter, sdpa"),
    ],
)
def test_a_named_backend_that_cannot_run_is_an_error_and_never_another(
    requested: str, message: str
) -> None:
    with pytest.raises(BackendUnavailable, match=message):
        choose_backend(requested, CPU, BF16, 64)


@pytest.mark.parametrize(
    ("name", "architecture", "dtype", "head_size", "message"),
    [
        ("flash", "sm90", FP32, 64, "takes bfloat16 or float16, not torch.float32"),
        ("flash", "sm90", BF16, 66, "a multiple of 8 up to 256, got 66"),
        ("flash", "sm90", BF16, 264, "a multiple of 8 up to 256, got 264"),
        ("flash", "sm100", BF16, 256, "a multiple of 8 up to 128, got 256"),
        ("flash", "sm89", BF16, 64, "runs on CUDA from sm90 up, this is sm89"),
        ("varlen", "sm75", BF16, 64, "runs on CUDA from sm80 up, gfx942, gfx950, this is sm75"),
        ("varlen", "gfx1100", BF16, 64, "this is gfx1100"),
    ],
)
def test_a_shape_or_gpu_that_a_kernel_does_not_take_is_named(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    architecture: str,
    dtype: torch.dtype,
    head_size: int,
    message: str,
) -> None:
    pretend(monkeypatch, architecture)

    with pytest.raises(BackendUnavailable, match=f"^{name}: .*{message}"):
        choose_backend(name, CPU, dtype, head_size)


def test_every_fallback_ends_where_everything_runs() -> None:
    assert all(name == "sdpa" or after[-1] == "sdpa" for name, after in FALLBACKS.items())
    assert set(DEFAULT.values()) <= FALLBACKS.keys()


def test_torch_is_asked_for_its_build_in_one_place() -> None:
    package = Path(backends.__file__).parent
    askers = [f.name for f in package.rglob("*.py") if "torch.version.hip is" in f.read_text()]

    assert askers == ["attention_kernels.py"]
