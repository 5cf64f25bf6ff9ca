"""The families' size rules: (height, width) of an image -> whole patches. Host arithmetic only."""

from math import sqrt

from encoders.config import EncoderConfig, ShortestEdge
from encoders.packing import GridTHW

NUM_PREFIX = {"dinov2": 1}
"""Rows that a family's tower puts before each image's patches (class token, registers)."""


def grid_thw(config: EncoderConfig, height: int, width: int) -> GridTHW:
    """Frames, rows and columns of patches that an image of this size becomes."""
    rows, columns = shortest_edge(config.resize, config.patch_size, height, width)
    return 1, rows, columns


def shortest_edge(rule: ShortestEdge, patch_size: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches; aspect kept to the nearest patch, at least one patch a side.

    One factor scales both sides, so a long strip that meets `max_pixels` shrinks as a whole.
    Rounding to whole patches alone may then exceed the limit; the longer side gives way.
    """
    scale = rule.shortest_edge / min(height, width)
    scale = min(scale, sqrt(rule.max_pixels / (height * width)))
    rows = max(1, round(height * scale / patch_size))
    columns = max(1, round(width * scale / patch_size))
    max_patches = max(1, rule.max_pixels // patch_size**2)
    if rows * columns > max_patches:
        if rows >= columns:
            rows = max(1, max_patches // columns)
        else:
            columns = max(1, max_patches // rows)
    return rows, columns
