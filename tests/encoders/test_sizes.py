"""The families' size rules: whole patches, bounded area, theirs to the last patch."""

import io

import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    smart_resize as qwen_smart_resize,
)

from encoders import EncoderConfig
from encoders.config import ShortestEdge, SmartResize
from encoders.errors import InvalidImage
from encoders.image import read_header
from encoders.packing import num_patches
from encoders.sizes import grid_thw, max_patches, shortest_edge, smart_resize

RULE = ShortestEdge(rule="shortest_edge", shortest_edge=224, max_pixels=518 * 518)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((224, 224), (16, 16)),
        ((512, 512), (16, 16)),
        ((300, 451), (16, 24)),
        ((451, 300), (24, 16)),
        ((1, 1), (16, 16)),
        ((50, 200), (16, 64)),
    ],
)
def test_the_shortest_side_becomes_the_edge_and_the_aspect_is_kept(
    size: tuple[int, int], grid: tuple[int, int]
) -> None:
    assert shortest_edge(RULE, 14, *size) == grid


def test_a_long_strip_shrinks_as_a_whole_to_the_area_limit() -> None:
    rows, columns = shortest_edge(RULE, 14, 100, 20_000)

    assert rows * columns <= 37 * 37
    assert (rows, columns) == (3, 456)


def test_no_size_exceeds_the_area_nor_falls_under_one_patch() -> None:
    sides = [1, 2, 3, 7, 13, 14, 15, 99, 224, 225, 517, 1000, 4001, 10_000]

    for height in sides:
        for width in sides:
            rows, columns = shortest_edge(RULE, 14, height, width)
            assert rows >= 1
            assert columns >= 1
            assert rows * columns <= 37 * 37, (height, width)


def test_an_image_is_one_frame(demo_config: EncoderConfig) -> None:
    assert grid_thw(demo_config, 400, 600) == (1, 16, 24)


QWEN = SmartResize(rule="smart_resize", min_pixels=65_536, max_pixels=16_777_216)
SIDES = [1, 5, 8, 15, 16, 17, 47, 48, 49, 200, 256, 690, 1000, 1093, 4096, 15_420]


@pytest.mark.parametrize("rule", [QWEN, QWEN.model_copy(update={"max_pixels": 90_000})], ids=str)
def test_smart_resize_is_that_of_the_qwen_processors(rule: SmartResize) -> None:
    for height in SIDES:
        for width in SIDES:
            if max(height, width) > 200 * min(height, width):
                continue  # transformers raises; ours is refused by the aspect limit before

            rows, columns = smart_resize(rule, 32, height, width)

            theirs = qwen_smart_resize(
                height, width, factor=32, min_pixels=rule.min_pixels, max_pixels=rule.max_pixels
            )
            assert (rows * 32, columns * 32) == theirs, (height, width)


def test_an_aspect_of_200_is_legal_and_above_it_is_refused() -> None:
    config = EncoderConfig.load("qwen3-vl-8b")
    legal, above = io.BytesIO(), io.BytesIO()
    Image.new("L", (1000, 5)).save(legal, "PNG")
    Image.new("L", (1001, 5)).save(above, "PNG")

    header = read_header(legal.getvalue(), config.limits)

    assert grid_thw(config, header.height, header.width) == (1, 2, 228)
    with pytest.raises(InvalidImage, match="200"):
        read_header(above.getvalue(), config.limits)


def test_tiny_images_are_scaled_up_and_long_strips_clamped() -> None:
    config = EncoderConfig.load("qwen3-vl-8b")

    assert grid_thw(config, 1, 1) == (1, 16, 16)
    assert grid_thw(config, 13, 7) == (1, 22, 12)
    assert grid_thw(config, 690, 15_420) == (1, 44, 964)


@pytest.mark.parametrize("name", ["dinov2-demo", "qwen3-vl-8b"])
@pytest.mark.parametrize("max_pixels", [50_000, 268_324, 16_777_216])
def test_no_accepted_image_exceeds_the_stated_number_of_patches(name: str, max_pixels: int) -> None:
    config = EncoderConfig.load(name)
    resize = config.resize.model_copy(update={"max_pixels": max_pixels})
    config = config.model_copy(update={"resize": resize})

    for height in SIDES:
        for width in SIDES:
            if max(height, width) <= 200 * min(height, width):
                patches = num_patches(grid_thw(config, height, width))
                assert patches <= max_patches(config), (height, width)
