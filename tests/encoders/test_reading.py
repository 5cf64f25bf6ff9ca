"""Huge JPEGs decoded at a part of their sides: the same patches, nearly the same pixels."""

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from encoders import EncoderConfig
from encoders.image import read_header
from encoders.packing import Pixels
from encoders.reading import SPARE, jpeg_cut, read
from encoders.sizes import grid_thw

Photo = Callable[..., bytes]


@pytest.fixture(scope="module")
def photo(photos: dict[str, bytes]) -> Photo:
    """A photograph of any size, as a file."""
    whole = Image.open(io.BytesIO(photos["chelsea.png"])).convert("RGB")

    def make(height: int, width: int, kind: str = "JPEG", orientation: int = 1) -> bytes:
        file, exif = io.BytesIO(), Image.Exif()
        exif[0x0112] = orientation
        whole.resize((width, height), Image.Resampling.LANCZOS).save(
            file, kind, exif=exif, **({"save_all": True} if kind == "MPO" else {})
        )
        return file.getvalue()

    return make


def config(name: str, least: int | None) -> EncoderConfig:
    return EncoderConfig.load(name).model_copy(update={"draft_jpegs_from": least})


def resized(pixels: Pixels, settings: EncoderConfig, grid: tuple[int, int, int]) -> Pixels:
    side = settings.patch_size
    size = grid[2] * side, grid[1] * side
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC), np.int16)


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("size", [(3001, 4003), (4003, 3001), (2000, 2000), (1500, 5000)])
def test_a_cut_jpeg_becomes_the_same_grid_and_nearly_the_same_pixels(
    photo: Photo, size: tuple[int, int], orientation: int, kind: str
) -> None:
    data = photo(*size, kind, orientation)
    whole, cut = config("dinov2-demo", None), config("dinov2-demo", 1_000_000)

    pixels, grid = read(data, whole)
    fewer, same = read(data, cut)

    assert same == grid
    assert fewer.size * 4 <= pixels.size * 1.01
    for side, patches in zip(fewer.shape[:2], grid[1:], strict=True):
        assert side >= SPARE * patches * cut.patch_size
    difference = np.abs(resized(pixels, whole, grid) - resized(fewer, cut, grid))
    assert difference.mean() < 1.5


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("size", [(2000, 1999), (1999, 2000), (2048, 2047), (2049, 2047)])
def test_sides_that_nearly_agree_are_not_exchanged(
    photo: Photo, size: tuple[int, int], orientation: int
) -> None:
    data = photo(*size, orientation=orientation)
    for max_pixels in (65_536, 262_144):
        whole, cut = config("qwen3-vl-8b", None), config("qwen3-vl-8b", 1)
        resize = whole.resize.model_copy(update={"max_pixels": max_pixels})
        whole, cut = (x.model_copy(update={"resize": resize}) for x in (whole, cut))

        assert read(data, cut)[1] == read(data, whole)[1]


def test_nothing_is_cut_below_the_threshold_or_twice_the_target_or_unless_asked(
    photo: Photo,
) -> None:
    huge, png = photo(3000, 4000), photo(1200, 1600, "PNG")
    cases = [
        (huge, config("dinov2-demo", None), 1),
        (huge, config("dinov2-demo", 12_000_001), 1),
        (huge, config("dinov2-demo", 12_000_000), 4),
        (png, config("dinov2-demo", 1), 1),
        (huge, config("qwen3-vl-8b", 1), 1),  # whose target is the image's own size
    ]
    for data, settings, expected in cases:
        header = read_header(data, settings.limits)
        assert jpeg_cut(header, settings) == expected
        pixels, grid = read(data, settings)
        assert grid == grid_thw(settings, header.height, header.width)
        assert pixels.shape[:2] == (-(-header.height // expected), -(-header.width // expected))
