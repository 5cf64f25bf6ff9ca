"""The reference backend and the argument layouts."""

import re

import pytest
import torch

from encoders.attention import AttentionLayout, cu_seqlens_and_max, sdpa

CU_SEQLENS = torch.tensor([0, 5, 6, 9], dtype=torch.int32)


def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 9, 2, 8, generator=torch.Generator().manual_seed(0))
    return q, k, v


@pytest.mark.parametrize("layout", [[CU_SEQLENS, 5], CU_SEQLENS], ids=["list", "tensor"])
def test_each_row_attends_to_its_own_image_only(layout: AttentionLayout) -> None:
    q, k, v = qkv()
    image = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2])
    scores = torch.einsum("ihk,jhk->hij", q, k) / 8**0.5
    scores = scores.masked_fill(image[:, None] != image[None, :], -torch.inf)
    expected = torch.einsum("hij,jhk->ihk", scores.softmax(-1), v)

    out = sdpa(q, k, v, layout)

    torch.testing.assert_close(out, expected)


def test_a_list_is_used_as_it_is() -> None:
    cu_seqlens, max_seqlen = cu_seqlens_and_max([CU_SEQLENS, 7])

    assert cu_seqlens is CU_SEQLENS
    assert max_seqlen == 7


def test_a_bare_tensor_is_asked_for_its_longest_image() -> None:
    assert cu_seqlens_and_max(CU_SEQLENS) == (CU_SEQLENS, 5)


@pytest.mark.parametrize(
    ("layout", "got"),
    [
        ([CU_SEQLENS, torch.tensor(5)], "[Tensor, Tensor]"),  # the kernel would read it back
        ([[0, 9], 9], "[list, int]"),
        ([CU_SEQLENS, CU_SEQLENS.diff(), 5], "[Tensor, Tensor, int]"),  # SGLang's Triton layout
        ([CU_SEQLENS], "[Tensor]"),
    ],
    ids=["tensor as max", "list as boundaries", "three parts", "one part"],
)
def test_another_layout_is_refused_by_what_it_holds(layout: list, got: str) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"[cu_seqlens tensor, max_seqlen int], got {got}")
    ):
        cu_seqlens_and_max(layout)


def test_the_reference_leaves_max_seqlen_to_the_kernels() -> None:
    q, k, v = qkv()

    assert torch.equal(sdpa(q, k, v, [CU_SEQLENS, 5]), sdpa(q, k, v, [CU_SEQLENS, 9]))


def test_strided_views_of_a_packed_qkv_give_the_bits_of_copies() -> None:
    views = torch.randn(9, 3, 2, 8, generator=torch.Generator().manual_seed(0)).unbind(1)
    copies = [view.contiguous() for view in views]

    assert torch.equal(sdpa(*views, CU_SEQLENS), sdpa(*copies, CU_SEQLENS))
