"""The fake is worth its name only while it is stricter than AITER."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fake_aiter import Refused, capturing, flash_attn_varlen_func

BF16 = torch.bfloat16
CU_SEQLENS = torch.tensor([0, 7, 8, 20], dtype=torch.int32)


def arguments(**changed: Any) -> dict[str, Any]:
    """A call that is allowed, but for what is changed."""
    q, k, v = (
        torch.randn(20, 3, 2, 16, generator=torch.Generator().manual_seed(0)).to(BF16).unbind(1)
    )
    both = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS}
    return {"q": q, "k": k, "v": v, **both, "max_seqlen_q": 12, "max_seqlen_k": 12} | changed


def heads(size: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of other heads than the other arguments have."""
    return torch.zeros(20, 2, size, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"max_seqlen_q": torch.tensor(12)}, "max_seqlen_q of type Tensor"),
        ({"max_seqlen_k": 12.0}, "max_seqlen_k of type float"),
        ({"cu_seqlens_q": CU_SEQLENS.long()}, "cu_seqlens_q of torch.int64"),
        ({"cu_seqlens_k": CU_SEQLENS.repeat(2)[::2]}, "cu_seqlens_k that is not contiguous"),
        ({"cu_seqlens_q": CU_SEQLENS[:1]}, "cu_seqlens_q without a segment"),
        ({"cu_seqlens_q": CU_SEQLENS.to("meta")}, "cu_seqlens_q on meta"),
        ({"k": heads(16).to("meta")}, "k on meta"),
        ({"v": heads(32)[..., ::2]}, "v whose last stride is 2"),
        ({"q": heads(264), "k": heads(264)}, "head size 264"),
        ({"q": heads(16, torch.float32)}, "torch.float32"),
        ({"k": heads(16, torch.float16)}, "k of another dtype than q"),
        ({"causal": True}, "causal=True"),
        ({"min_seqlen_q": 1}, r"arguments \['min_seqlen_q'\]"),
        ({"dropout": 0.0}, r"arguments \['dropout'\]"),
    ],
)
@torch.inference_mode()
def test_what_aiter_would_not_take_or_get_wrong_is_refused(
    changed: dict[str, Any], what: str
) -> None:
    with pytest.raises(Refused, match=what):
        flash_attn_varlen_func(**arguments(**changed))


def test_grad_mode_is_refused() -> None:
    with pytest.raises(Refused, match="grad mode"):
        flash_attn_varlen_func(**arguments())


@torch.inference_mode()
def test_positional_arguments_are_refused() -> None:
    with pytest.raises(Refused, match="the eighth is min_seqlen_q"):
        flash_attn_varlen_func(*arguments().values())


@torch.inference_mode()
def test_a_missing_argument_is_a_type_error() -> None:
    given = arguments()
    del given["cu_seqlens_k"]

    with pytest.raises(TypeError, match="cu_seqlens_k"):
        flash_attn_varlen_func(**given)


@torch.inference_mode()
def test_a_max_seqlen_that_is_too_small_leaves_the_rest_of_a_segment_unwritten() -> None:
    short = flash_attn_varlen_func(**arguments(max_seqlen_q=5))

    right = flash_attn_varlen_func(**arguments())
    unwritten = torch.tensor([*range(5, 7), *range(13, 20)])
    assert short[unwritten].isnan().all()
    written = torch.tensor([*range(5), *range(7, 13)])
    assert torch.equal(short[written], right[written])


@torch.inference_mode()
def test_a_max_seqlen_that_is_too_large_changes_nothing() -> None:
    assert torch.equal(
        flash_attn_varlen_func(**arguments(max_seqlen_q=99, max_seqlen_k=99)),
        flash_attn_varlen_func(**arguments()),
    )


@torch.inference_mode()
def test_a_given_output_keeps_the_rows_of_no_segment() -> None:
    out = torch.full((20, 2, 16), 7.0, dtype=BF16)
    boundaries = CU_SEQLENS[:3]

    returned = flash_attn_varlen_func(
        **arguments(cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, out=out)
    )

    assert returned.data_ptr() == out.data_ptr()
    assert (out[8:] == 7).all()
    assert (out[:8] != 7).all()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.max().item(),
        lambda x: x.tolist(),
        lambda x: int(x.max()),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x.cpu(),
        lambda x: range(x.max()),
    ],
    ids=["item", "tolist", "int", "bool", "nonzero", "equal", "cpu", "index"],
)
def test_a_read_of_the_device_fails_while_capturing_and_only_then(read: Any) -> None:
    read(CU_SEQLENS)

    with capturing(), pytest.raises(Refused, match="while capturing"):
        read(CU_SEQLENS)


def test_the_signature_is_aiters() -> None:
    names = list(inspect.signature(flash_attn_varlen_func).parameters)

    assert names[:8] == [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        "min_seqlen_q",
    ]
    assert len(names) == 24
