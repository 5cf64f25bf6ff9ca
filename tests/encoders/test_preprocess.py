"""uint8 images to normalised patches by the plain twin, against Pillow and by hand."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from encoders import EncoderConfig
from encoders.image import decode_rgb
from encoders.preprocess import Preprocessor, patchify, resize
from encoders.sizes import grid_thw


def pillows(image: Image.Image, height: int, width: int) -> Tensor:
    """The image as Pillow resizes it, uint8 [height, width, 3]."""
    return torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BICUBIC)))


@pytest.mark.parametrize("target", [(224, 336), (98, 56), (700, 700), (14, 1400)], ids=str)
@pytest.mark.parametrize("name", ["chelsea.png", "rocket.jpg", "text.png"])
def test_resizing_is_pillows_bicubic_to_the_bit(
    photos: dict[str, bytes], name: str, target: tuple[int, int]
) -> None:
    with Image.open(io.BytesIO(photos[name])) as file:
        image = file.convert("RGB")

    resized = resize(torch.from_numpy(np.array(image)), *target)

    assert torch.equal(resized, pillows(image, *target))


SIDES = [
    ((1, 1), (1, 1)), ((1, 1), (32, 28)), ((1, 300), (28, 14)), ((300, 1), (14, 28)),
    ((7, 5), (1, 1)), ((2, 3), (500, 2)), ((3000, 3), (16, 16)), ((3, 3000), (16, 16)),
    ((32, 48), (32, 48)), ((32, 48), (32, 64)), ((32, 48), (64, 48)), ((1001, 333), (224, 448)),
    ((33, 65), (32, 64)), ((31, 63), (32, 64)), ((20, 4000), (16, 3200)), ((64, 64), (640, 63)),
]  # fmt: skip


@pytest.mark.parametrize(("size", "target"), SIDES, ids=str)
@pytest.mark.parametrize("kind", ["noise", "black and white"])
def test_any_size_becomes_any_other_as_pillow_has_it(
    size: tuple[int, int], target: tuple[int, int], kind: str
) -> None:
    rng = np.random.default_rng(0)
    # Black beside white overshoots at both ends: values are clipped after either pass.
    values = {"noise": np.arange(256), "black and white": np.array([0, 255])}[kind]
    pixels = rng.choice(values.astype(np.uint8), (*size, 3))

    resized = resize(torch.from_numpy(pixels), *target)

    assert torch.equal(resized, pillows(Image.fromarray(pixels), *target))


def test_a_thousand_sizes_by_chance_are_resized_as_pillow_has_it() -> None:
    rng = np.random.default_rng(1)
    for most in [6, 24, 90, 90] * 250:
        height, width, *target = (int(side) for side in rng.integers(1, most, 4))
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)

        resized = resize(torch.from_numpy(pixels), *target)

        assert torch.equal(resized, pillows(Image.fromarray(pixels), *target)), (
            (height, width),
            target,
        )


@pytest.mark.parametrize("height", [96, 104, 112, 128, 144])
@pytest.mark.parametrize("width", [96, 112, 120, 136])
def test_the_passes_come_in_pillows_order(height: int, width: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)

    resized = resize(torch.from_numpy(pixels), height, width)

    # The other order differs in about every sixth value.
    assert torch.equal(resized, pillows(Image.fromarray(pixels), height, width))


ODD_SIZES = [
    (1, 1), (13, 7), (5, 1000), (200, 1), (999, 31), (63, 65),
    (64, 64), (257, 1023), (1411, 8), (640, 480), (301, 299), (17, 1700),
]  # fmt: skip


def odd_image(photos: dict[str, bytes], height: int, width: int) -> Image.Image:
    with Image.open(io.BytesIO(photos["coffee.png"])) as file:
        return file.convert("RGB").resize((width, height))


def test_patches_are_those_of_the_transformers_processor_to_the_bit(
    photos: dict[str, bytes],
) -> None:
    config = EncoderConfig.load("qwen3-vl-8b")
    rule = config.resize
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        image_mean=list(config.image_mean),
        image_std=list(config.image_std),
        size={"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels},
    )
    images = [Image.fromarray(decode_rgb(data, config.limits)) for data in photos.values()]
    images += [odd_image(photos, *size) for size in ODD_SIZES]
    preprocess = Preprocessor(
        config.image_mean,
        config.image_std,
        torch.device("cpu"),
        torch.float32,
        patch_size=16,
        merge_size=2,
        frames=2,
    )
    for image in images:
        expected = processor(image, return_tensors="pt")
        pixels = torch.from_numpy(np.array(image))
        _, rows, columns = grid = grid_thw(config, *pixels.shape[:2])

        patches = preprocess(pixels.flatten(), [pixels.shape[:2]], [(rows * 16, columns * 16)])

        assert expected["image_grid_thw"].tolist() == [list(grid)]
        assert torch.equal(patches, expected["pixel_values"]), image.size


def test_an_image_of_the_target_size_keeps_its_values() -> None:
    image = torch.arange(28 * 14 * 3, dtype=torch.uint8).reshape(28, 14, 3)

    assert torch.equal(resize(image, 28, 14), image)


def test_patches_run_row_by_row_and_channel_first() -> None:
    image = torch.arange(3 * 4 * 6).reshape(3, 4, 6).float()

    patches = patchify(image, 2, merge_size=1, frames=1)

    assert patches.shape == (6, 12)
    torch.testing.assert_close(patches[4], image[:, 2:4, 2:4].flatten())


def test_each_image_of_a_batch_is_normalised_as_if_alone() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    preprocess = Preprocessor(mean, std, torch.device("cpu"), torch.float32, patch_size=14)
    sizes, targets = [(20, 33), (14, 14)], [(28, 42), (14, 14)]
    images = [torch.randint(0, 256, (*size, 3), dtype=torch.uint8) for size in sizes]

    patches = preprocess(torch.cat([x.flatten() for x in images]), sizes, targets)

    alone = [preprocess(images[i].flatten(), [sizes[i]], [targets[i]]) for i in range(2)]
    torch.testing.assert_close(patches, torch.cat(alone), atol=0, rtol=0)
    by_hand = (images[1].permute(2, 0, 1) / 255 - torch.tensor(mean).reshape(3, 1, 1)) / (
        torch.tensor(std).reshape(3, 1, 1)
    )
    assert torch.equal(patches[-1], by_hand.flatten())


def test_half_precision_is_fp32_rounded_once() -> None:
    mean_std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    exact, rounded = (
        Preprocessor(*mean_std, torch.device("cpu"), dtype, patch_size=16)
        for dtype in (torch.float32, torch.bfloat16)
    )
    pixels = torch.arange(16 * 16 * 3).to(torch.uint8)

    patches = rounded(pixels, [(16, 16)], [(16, 16)])

    assert torch.equal(patches, exact(pixels, [(16, 16)], [(16, 16)]).to(torch.bfloat16))
