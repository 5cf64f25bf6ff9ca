"""The families' size rules: (height, width) of an image -> whole patches. Host arithmetic only."""

from math import ceil, floor, sqrt

from encoders.config import EncoderConfig, ShortestEdge, SmartResize
from encoders.packing import GridTHW

NUM_PREFIX = {"dinov2": 1, "qwen3_vl": 0}
"""Rows that a family's tower puts before each image's patches (class token, registers)."""


def grid_thw(config: EncoderConfig, height: int, width: int) -> GridTHW:
    """Frames, rows and columns of patches that an image of this size becomes."""
    # Both rules count in blocks that the tower keeps whole: one patch, or those it merges.
    block = config.patch_size * config.merge_size
    if isinstance(config.resize, ShortestEdge):
        rows, columns = shortest_edge(config.resize, block, height, width)
    else:
        rows, columns = smart_resize(config.resize, block, height, width)
    return 1, rows * config.merge_size, columns * config.merge_size


def max_patches(config: EncoderConfig) -> int:
    """No accepted image becomes more patches than this."""
    rule, block = config.resize, config.patch_size * config.merge_size
    blocks = max(1.0, rule.max_pixels / block**2)
    if isinstance(rule, SmartResize):
        # A strip one block high may pass the area limit, and growing rounds both sides up.
        aspect = sqrt(config.limits.max_aspect_ratio)
        strip = sqrt(rule.max_pixels) / block * aspect
        side = sqrt(rule.min_pixels) / block
        blocks = max(blocks, strip, (side * aspect + 1) * (side / aspect + 1))
    return int(blocks) * config.merge_size**2


def shortest_edge(rule: ShortestEdge, block: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of blocks; aspect kept to the nearest block, at least one block a side.

    One factor scales both sides, so a long strip that meets `max_pixels` shrinks as a whole.
    Rounding to whole blocks alone may then exceed the limit; the longer side gives way.
    """
    scale = rule.shortest_edge / min(height, width)
    scale = min(scale, sqrt(rule.max_pixels / (height * width)))
    rows = max(1, round(height * scale / block))
    columns = max(1, round(width * scale / block))
    max_blocks = max(1, rule.max_pixels // block**2)
    if rows * columns > max_blocks:
        if rows >= columns:
            rows = max(1, max_blocks // columns)
        else:
            columns = max(1, max_blocks // rows)
    return rows, columns


def smart_resize(rule: SmartResize, block: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of blocks as the Qwen-VL processors choose them.

    Sides round to the nearest block; over `max_pixels` both shrink by one factor and round down,
    a long strip's short side to one block at least; under `min_pixels` both grow and round up.
    Python's `round` (to even) is theirs too.
    """
    rows, columns = round(height / block), round(width / block)
    area = rows * columns * block**2
    if area > rule.max_pixels:
        shrink = sqrt(height * width / rule.max_pixels)
        rows = max(1, floor(height / shrink / block))
        columns = max(1, floor(width / shrink / block))
    elif area < rule.min_pixels:
        grow = sqrt(rule.min_pixels / (height * width))
        rows, columns = ceil(height * grow / block), ceil(width * grow / block)
    return rows, columns
