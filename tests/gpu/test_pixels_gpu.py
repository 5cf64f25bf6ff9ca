"""The kernels from pixels to patches on a GPU: their twin's bits, and how often they compile."""

import io
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from encoders import EncoderConfig, preprocess
from encoders.preprocess import Preprocessor
from encoders.sizes import grid_thw
from tests.gpu.sync import no_sync
from tests.kernel_cases import Size, noise, resized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.filterwarnings("ignore"),  # the sync detector's own
]

CUDA = torch.device("cuda")
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
SHAPES = [(14, 1, 1), (14, 2, 2), (16, 1, 2), (16, 2, 1), (16, 2, 2)]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def preprocessor(
    dtype: torch.dtype, patch_size: int, merge_size: int, frames: int, device: torch.device = CUDA
) -> Preprocessor:
    """Of some normalisation."""
    shape = {"patch_size": patch_size, "merge_size": merge_size, "frames": frames}
    return Preprocessor(MEAN, STD, device, dtype, **shape)


def by_twin(
    monkeypatch: pytest.MonkeyPatch,
    preprocess_batch: Preprocessor,
    pixels: Tensor,
    sizes: list[Size],
    targets: list[Size],
) -> Tensor:
    """The same on the GPU without kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "fused", lambda x: False)
        return preprocess_batch(pixels, sizes, targets)


def packed(images: list[Image.Image]) -> Tensor:
    """Their pixels on the GPU, one after another."""
    return torch.from_numpy(np.concatenate([np.array(x).reshape(-1) for x in images])).to(CUDA)


def compiled() -> list[int]:
    """Variants of each kernel."""
    from encoders import triton_pixels  # Triton comes with torch for GPUs

    kernels = triton_pixels._first_pass, triton_pixels._last_pass
    return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_batch_of_every_kind_of_resizing_has_the_twins_bits(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    preprocess_batch = preprocessor(dtype, *shape)
    sizes, targets = resized(shape[0] * shape[1])
    pixels = noise(sizes)

    patches = preprocess_batch(pixels.to(CUDA), sizes, targets)

    on_cpu = preprocessor(dtype, *shape, torch.device("cpu"))(pixels, sizes, targets)
    assert torch.equal(patches.cpu(), on_cpu)
    twin = by_twin(monkeypatch, preprocess_batch, pixels.to(CUDA), sizes, targets)
    assert torch.equal(patches, twin)


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "dinov2-demo"])
def test_photographs_in_one_batch_have_pillows_bytes(photos: dict[str, bytes], name: str) -> None:
    config = EncoderConfig.load(name)
    side = config.patch_size
    preprocess_batch = preprocessor(torch.bfloat16, side, config.merge_size, 1)
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in photos.values()]
    sizes = [(image.height, image.width) for image in images]
    grids = [grid_thw(config, *size) for size in sizes]
    targets = [(rows * side, columns * side) for _, rows, columns in grids]

    resized_by_pillow = [
        image.resize(target[::-1], Image.Resampling.BICUBIC)
        for image, target in zip(images, targets, strict=True)
    ]

    ours = preprocess_batch(packed(images), sizes, targets)

    pillows = preprocess_batch(packed(resized_by_pillow), targets, targets)
    assert torch.equal(ours, pillows)


def test_neither_sizes_nor_batches_make_a_kernel_compile_again() -> None:
    preprocess_batch = preprocessor(torch.bfloat16, 14, 2, 1)
    before = compiled()
    assert min(before) > 0

    for images in (1, 2, 15, 16, 17, 200):
        rng = np.random.default_rng(images)
        sizes = [(int(h), int(w)) for h, w in rng.integers(1, 300, (images, 2))]
        targets = [(28 * int(h), 28 * int(w)) for h, w in rng.integers(1, 9, (images, 2))]
        preprocess_batch(noise(sizes, "cuda"), sizes, targets)
        preprocess_batch(noise(targets, "cuda"), targets, targets)
    preprocess_batch(noise([(3000, 4000)], "cuda"), [(3000, 4000)], [(28, 28)])

    assert compiled() == before


def test_a_batch_waits_for_nothing() -> None:
    preprocess_batch = preprocessor(torch.bfloat16, 16, 2, 1)
    sizes, targets = resized(32)
    pixels = noise(sizes, "cuda")

    with no_sync():
        preprocess_batch(pixels, sizes, targets)


def test_places_beyond_32_bits_are_reached() -> None:
    preprocess_batch = preprocessor(torch.float32, 16, 1, 1)
    sizes, targets = [(36_000, 20_000), (33, 47)], [(16, 16), (16, 32)]
    small = noise([sizes[1]], "cuda")
    large = torch.full((3 * 36_000 * 20_000,), 7, dtype=torch.uint8, device=CUDA)
    # All that the lowest row of pixels is made of, the last of which begins beyond 2^31.
    large[-3 * 20_000 * 8_000 :] = 200

    patches = preprocess_batch(torch.cat([large, small]), sizes, targets)

    assert torch.equal(patches[1:], preprocess_batch(small, sizes[1:], targets[1:]))
    mean, std = (torch.tensor(values, device=CUDA)[:, None] for values in (MEAN, STD))
    dark, light = ((level / 255 - mean) / std for level in (7, 200))
    rows = patches[0].view(3, 16, 16)
    torch.testing.assert_close(rows[:, 0], dark.expand(3, 16))
    torch.testing.assert_close(rows[:, 15], light.expand(3, 16))
