"""uint8 images to normalised patches, against Pillow and by hand."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from encoders.preprocess import Preprocessor, patchify, resize


@pytest.mark.parametrize("target", [(224, 336), (98, 56), (700, 700), (14, 1400)], ids=str)
@pytest.mark.parametrize("name", ["chelsea.png", "rocket.jpg", "text.png"])
def test_resizing_is_pillows_bicubic_within_one_level(
    photos: dict[str, bytes], name: str, target: tuple[int, int]
) -> None:
    with Image.open(io.BytesIO(photos[name])) as file:
        image = file.convert("RGB")
    expected = np.asarray(image.resize(target[::-1], Image.Resampling.BICUBIC))

    resized = resize(torch.from_numpy(np.array(image)), *target)

    difference = np.abs(resized.permute(1, 2, 0).numpy() - expected)
    # Pillow's taps are fixed-point numbers, so a value on the edge of rounding may tip over.
    assert difference.max() <= 2
    assert difference.mean() < 0.01


def test_an_image_of_the_target_size_keeps_its_values() -> None:
    image = torch.arange(28 * 14 * 3, dtype=torch.uint8).reshape(28, 14, 3)

    torch.testing.assert_close(resize(image, 28, 14), image.permute(2, 0, 1).float())


def test_patches_run_row_by_row_and_channel_first() -> None:
    image = torch.arange(3 * 4 * 6).reshape(3, 4, 6).float()

    patches = patchify(image, 2)

    assert patches.shape == (6, 12)
    torch.testing.assert_close(patches[4], image[:, 2:4, 2:4].flatten())


def test_each_image_of_a_batch_is_normalised_as_if_alone() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    preprocess = Preprocessor(14, mean, std, torch.device("cpu"))
    sizes, targets = [(20, 33), (14, 14)], [(28, 42), (14, 14)]
    images = [torch.randint(0, 256, (*size, 3), dtype=torch.uint8) for size in sizes]

    patches = preprocess(torch.cat([x.flatten() for x in images]), sizes, targets)

    alone = [preprocess(images[i].flatten(), [sizes[i]], [targets[i]]) for i in range(2)]
    torch.testing.assert_close(patches, torch.cat(alone), atol=0, rtol=0)
    by_hand = (images[1].permute(2, 0, 1) / 255 - torch.tensor(mean).reshape(3, 1, 1)) / (
        torch.tensor(std).reshape(3, 1, 1)
    )
    torch.testing.assert_close(patches[-1], by_hand.flatten())
