"""The size rule of DINOv2: shortest edge, whole patches, bounded area."""

import pytest

from encoders import EncoderConfig
from encoders.config import ShortestEdge
from encoders.sizes import grid_thw, shortest_edge

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
