"""torch's varlen attention and FlashAttention 4: what they are given, and what is said without."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from encoders import attention_kernels
from encoders.attention_kernels import Target, architecture, load_flash, load_varlen
from encoders.errors import BackendUnavailable

H200 = Target("sm90", torch.bfloat16, 72)
CU_SEQLENS = torch.tensor([0, 7, 8, 20], dtype=torch.int32)

RECORDING_FLASH = """
calls = []

def flash_attn_varlen_func(**given):
    calls.append(given)
    return given["v"], None
"""


def packed_qkv() -> tuple[Tensor, ...]:
    """Views of one packed [T, 3, H, K], as the attention layer makes them."""
    return torch.zeros(20, 3, 2, 72, dtype=torch.bfloat16).unbind(1)


@pytest.fixture
def flash_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder that Python imports from first, with no `flash_attn` loaded."""
    others = {name: module for name, module in sys.modules.items() if is_flash(name)}
    for name in others:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if is_flash(name)]:
        del sys.modules[name]


def is_flash(module_name: str) -> bool:
    """Whether a module belongs to the package `flash_attn`."""
    return module_name.split(".")[0] == "flash_attn"


def write_package(site: Path, cute: str) -> None:
    """A `flash_attn` with that `cute` in it."""
    (site / "flash_attn" / "cute").mkdir(parents=True)
    (site / "flash_attn" / "__init__.py").write_text("")
    (site / "flash_attn" / "cute" / "__init__.py").write_text(cute)


def test_flash_gets_views_and_one_boundaries_object_by_name(flash_site: Path) -> None:
    write_package(flash_site, RECORDING_FLASH)
    q, k, v = packed_qkv()

    out = load_flash(H200)(q, k, v, [CU_SEQLENS, 12])

    (call,) = sys.modules["flash_attn.cute"].calls
    assert out is v
    assert (call["q"] is q, call["k"] is k, call["v"] is v) == (True, True, True)
    assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is CU_SEQLENS
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == 12
    assert call["causal"] is False


@pytest.mark.parametrize(
    "cute",
    ["import no_such_cutlass", "raise RuntimeError('no driver')", "flash_attn_func = None"],
    ids=["a dependency is missing", "its import raises", "it has no such function"],
)
def test_without_a_working_flash_the_message_says_how_to_install_it(
    flash_site: Path, cute: str
) -> None:
    write_package(flash_site, cute)

    with pytest.raises(BackendUnavailable, match=r"^flash: importing it failed with \w+Error: "):
        load_flash(H200)


def test_another_flash_attn_is_not_version_four(flash_site: Path) -> None:
    (flash_site / "flash_attn").mkdir()
    (flash_site / "flash_attn" / "__init__.py").write_text("")

    with pytest.raises(BackendUnavailable, match=r"pip install 'flash-attn-4\[cu13\]==") as caught:
        load_flash(H200)

    assert "No module named 'flash_attn.cute'" in str(caught.value)


def test_varlen_gets_views_and_one_boundaries_object_under_torchs_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(
        torch.nn.attention.varlen,
        "varlen_attn",
        lambda *qkv, **rest: calls.append({"qkv": qkv, **rest}),
    )
    q, k, v = packed_qkv()

    load_varlen(H200)(q, k, v, [CU_SEQLENS, 12])

    (call,) = calls
    assert call.keys() == {"qkv", "cu_seq_q", "cu_seq_k", "max_q", "max_k"}
    assert (call["qkv"][0] is q, call["qkv"][1] is k, call["qkv"][2] is v) == (True, True, True)
    assert call["cu_seq_q"] is call["cu_seq_k"] is CU_SEQLENS
    assert call["max_q"] == call["max_k"] == 12


def test_a_torch_without_flash_attention_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)

    with pytest.raises(BackendUnavailable, match=r"torch \d.* was built without FlashAttention"):
        load_varlen(H200)


@pytest.mark.parametrize(("rocm", "name"), [(True, "gfx950"), (False, "sm95")])
def test_an_architecture_is_named_without_its_features(
    monkeypatch: pytest.MonkeyPatch, rocm: bool, name: str
) -> None:
    properties = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-", major=9, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(attention_kernels, "is_rocm", lambda: rocm)

    assert architecture(torch.device("cuda", 0)) == name
    assert architecture(torch.device("cpu")) == "cpu"
