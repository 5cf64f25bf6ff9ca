"""The reference backend and the argument layouts."""

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


@pytest.mark.parametrize("layout", [[CU_SEQLENS, torch.tensor(5)], [[0, 9], 9]], ids=str)
def test_a_layout_that_would_be_read_back_from_the_device_is_refused(layout: list) -> None:
    with pytest.raises(TypeError, match="max_seqlen int"):
        cu_seqlens_and_max(layout)
