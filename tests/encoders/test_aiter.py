"""AITER through its real detection, import and signature checks, with a strict fake below."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from encoders import attention_kernels
from encoders.attention import Attention, AttentionLayout, sdpa
from encoders.attention_kernels import Target, aiter_problem, load_aiter
from encoders.errors import BackendUnavailable
from tests import fake_aiter

BF16 = torch.bfloat16
MI355X = Target("gfx950", BF16, 72)
CU_SEQLENS = torch.tensor([0, 7, 8, 8, 20], dtype=torch.int32)  # with one row, and with none
PASSED = {
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "causal",
}


def packed_qkv(rows: int = 20, head_size: int = 72) -> tuple[Tensor, ...]:
    """Views of one packed [T, 3, H, K], as the attention layer makes them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, 2, head_size, generator=generator).to(BF16).unbind(1)


def forget_aiter() -> None:
    """Drop every module of the package, so that the next import is a first one."""
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder that Python imports from, on a machine whose torch is for ROCm."""
    monkeypatch.setattr(attention_kernels, "is_rocm", lambda: True)
    monkeypatch.syspath_prepend(tmp_path)
    forget_aiter()
    yield tmp_path
    forget_aiter()


@pytest.fixture
def aiter(site: Path) -> Iterator[Attention]:
    """The backend, on the fake, under the mode that the Encoder runs it in."""
    fake_aiter.install(site)
    fake_aiter.calls.clear()
    with torch.inference_mode():
        yield load_aiter(MI355X)


@pytest.mark.parametrize("layout", [[CU_SEQLENS, 12], CU_SEQLENS], ids=["list", "tensor"])
def test_aiter_equals_the_reference_in_either_form(
    aiter: Attention, layout: AttentionLayout
) -> None:
    q, k, v = packed_qkv()

    out = aiter(q, k, v, layout)

    # In fp32, since the fake rounds to bfloat16 once, at its end: half a step of 2**-8.
    expected = sdpa(q.float(), k.float(), v.float(), CU_SEQLENS)
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-5)


def test_aiter_gets_its_arguments_by_name_and_the_boundaries_as_one_object(
    aiter: Attention,
) -> None:
    q, k, v = packed_qkv()

    aiter(q, k, v, [CU_SEQLENS, 12])

    (call,) = fake_aiter.calls
    assert call.keys() == PASSED
    assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is CU_SEQLENS
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == 12
    assert call["causal"] is False


def test_aiter_gets_views_of_a_packed_qkv_uncopied(aiter: Attention) -> None:
    q, k, v = packed_qkv()

    aiter(q, k, v, [CU_SEQLENS, 12])

    (call,) = fake_aiter.calls
    assert not q.is_contiguous()
    assert [call[name].data_ptr() for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]


def test_aiter_gets_a_copy_where_heads_are_strided(aiter: Attention) -> None:
    q, k, v = packed_qkv()
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)

    out = aiter(apart, k, v, [CU_SEQLENS, 12])

    assert apart.stride(-1) != 1
    assert torch.equal(out, aiter(q, k, v, [CU_SEQLENS, 12]))


def test_the_list_form_reads_nothing_back(aiter: Attention) -> None:
    q, k, v = packed_qkv()

    with fake_aiter.capturing():
        out = aiter(q, k, v, [CU_SEQLENS, 12])

    assert torch.equal(out, aiter(q, k, v, CU_SEQLENS))


def test_a_bare_tensor_is_read_and_so_cannot_be_captured(aiter: Attention) -> None:
    q, k, v = packed_qkv()

    with fake_aiter.capturing(), pytest.raises(fake_aiter.Refused, match="while capturing"):
        aiter(q, k, v, CU_SEQLENS)


def test_a_tensor_as_max_seqlen_never_reaches_aiter(aiter: Attention) -> None:
    q, k, v = packed_qkv()

    with pytest.raises(TypeError, match=r"got \[Tensor, Tensor\]"):
        aiter(q, k, v, [CU_SEQLENS, torch.tensor(12)])

    assert fake_aiter.calls == []


def test_rows_of_no_segment_stay_unwritten_and_touch_no_other(aiter: Attention) -> None:
    q, k, v = packed_qkv(rows=23)

    out = aiter(q, k, v, [CU_SEQLENS, 12])

    assert out[20:].isnan().all()
    assert torch.equal(out[:20], aiter(q[:20], k[:20], v[:20], [CU_SEQLENS, 12]))


def test_nothing_installed_is_named(site: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"AITER is not installed; .*sglang-rocm"):
        load_aiter(MI355X)


def test_the_aiter_of_pypi_is_named_with_its_place_and_never_imported(site: Path) -> None:
    (site / "aiter").mkdir()
    (site / "aiter" / "__init__.py").write_text("raise SystemExit('imported')")

    with pytest.raises(BackendUnavailable) as caught:
        load_aiter(MI355X)

    assert str(site / "aiter" / "__init__.py") in str(caught.value)
    assert "is not AMD's AITER" in str(caught.value)


def test_a_module_file_of_that_name_is_not_aiter_either(site: Path) -> None:
    (site / "aiter.py").write_text("")

    assert f"'aiter' at {site / 'aiter.py'} is not AMD's" in str(aiter_problem())


def test_a_stub_without_a_spec_is_not_aiter_either(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))

    assert aiter_problem() == "the module 'aiter' was replaced at run time"


def test_detection_imports_nothing(site: Path) -> None:
    fake_aiter.install(site, init="raise SystemExit('imported')")

    assert aiter_problem() is None


@pytest.mark.parametrize(
    "failure",
    [
        "RuntimeError('ROCm version file not found')",
        "ImportError('libamdhip64.so.7: cannot open shared object file')",
        "OSError('rocminfo')",
        "AttributeError('gfx')",
        "KeyError('gfx')",
        "__import__('subprocess').CalledProcessError(1, 'hipconfig')",
    ],
)
def test_an_import_that_fails_in_any_way_is_one_error_with_its_cause(
    site: Path, failure: str
) -> None:
    fake_aiter.install(site, init=f"raise {failure}")

    with pytest.raises(BackendUnavailable, match="importing it failed with") as caught:
        load_aiter(MI355X)

    cause = caught.value.__cause__
    assert f"{type(cause).__name__}: {cause}" in str(caught.value)


def test_another_signature_is_named_by_what_it_lacks(site: Path) -> None:
    old = "def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, causal): ..."
    fake_aiter.install(site, init=old)

    with pytest.raises(BackendUnavailable, match="no parameter max_seqlen_k, max_seqlen_q, out;"):
        load_aiter(MI355X)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target("gfx90a", BF16, 64), "runs on gfx942, gfx950, this is gfx90a"),
        (Target("cpu", BF16, 64), "runs on gfx942, gfx950, this is cpu"),
        (Target("gfx950", torch.float32, 64), "takes bfloat16 or float16, not torch.float32"),
        (Target("gfx950", BF16, 264), "head size has to be up to 256, got 264"),
    ],
    ids=str,
)
def test_what_aiter_does_not_take_is_refused_before_its_import(
    site: Path, target: Target, message: str
) -> None:
    fake_aiter.install(site, init="raise SystemExit('imported')")

    with pytest.raises(BackendUnavailable, match=message):
        load_aiter(target)
