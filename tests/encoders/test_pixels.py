"""The kernels from pixels to patches in Triton's interpreter, against their twin, bit by bit.

In bf16 too: they round nothing, normalised values come from a table.
"""

import importlib.util

import pytest
import torch

from encoders import preprocess
from encoders.preprocess import Preprocessor
from tests.kernel_cases import Size, noise, resized

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs tests/gpu/test_pixels_gpu"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

SHAPES = [(14, 1, 1), (14, 2, 2), (16, 1, 2), (16, 2, 1), (16, 2, 2)]


def preprocessor(dtype: torch.dtype, patch_size: int, merge_size: int, frames: int) -> Preprocessor:
    """On the CPU, of some normalisation."""
    shape = {"patch_size": patch_size, "merge_size": merge_size, "frames": frames}
    return Preprocessor((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), torch.device("cpu"), dtype, **shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_of_every_kind_of_resizing_has_the_twins_bits(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    preprocess_batch = preprocessor(dtype, *shape)
    sizes, targets = resized(shape[0] * shape[1])
    pixels = noise(sizes)
    expected = preprocess_batch(pixels, sizes, targets)
    monkeypatch.setattr(preprocess, "fused", lambda x: True)

    patches = preprocess_batch(pixels, sizes, targets)

    assert patches.dtype == dtype
    assert torch.equal(patches, expected)


NOTHING, BOTH = ((16, 32), (16, 32)), ((9, 8), (16, 16))


@pytest.mark.parametrize(
    "batch",
    [[NOTHING], [BOTH], [NOTHING, BOTH, NOTHING], [BOTH, NOTHING], [BOTH, *[NOTHING] * 130, BOTH]],
    ids=["nothing to do", "alone", "between others", "first", "more than a search step"],
)
def test_each_program_finds_its_image(
    monkeypatch: pytest.MonkeyPatch, batch: list[tuple[Size, Size]]
) -> None:
    preprocess_batch = preprocessor(torch.float32, 16, 1, 1)
    sizes, targets = ([pair[i] for pair in batch] for i in range(2))
    pixels = noise(sizes)
    expected = preprocess_batch(pixels, sizes, targets)
    monkeypatch.setattr(preprocess, "fused", lambda x: True)

    patches = preprocess_batch(pixels, sizes, targets)

    assert torch.equal(patches, expected)


def test_making_a_preprocessor_runs_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from encoders import triton_pixels  # Triton is optional

    launched = []
    monkeypatch.setattr(preprocess, "fused", lambda x: True)
    monkeypatch.setattr(triton_pixels, "launch", lambda kernel, *_, **__: launched.append(kernel))

    preprocessor(torch.bfloat16, 16, 2, 2)

    assert launched == [triton_pixels._first_pass, triton_pixels._last_pass]
