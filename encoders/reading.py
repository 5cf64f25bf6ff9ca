"""One image file for one encoder: its pixels, and the patches that they become."""

from encoders.config import EncoderConfig
from encoders.image import ImageHeader, decode_rgb, read_header
from encoders.packing import GridTHW, Pixels, num_patches
from encoders.sizes import grid_thw

CUTS = (8, 4, 2)
"""Parts of its sides that a JPEG can be decoded at, at less cost."""
SPARE = 2
"""Times the target's sides that have to be left, so that resizing still averages over pixels."""


def read(data: bytes, config: EncoderConfig) -> tuple[Pixels, GridTHW]:
    """One file's pixels, upright, and its grid. Raises a `RequestError`."""
    header = read_header(data, config.limits)
    cut = jpeg_cut(header, config)
    pixels = decode_rgb(data, config.limits, cut)
    height, width, _ = pixels.shape
    if cut > 1:  # the grid is that of the whole image, which may have been stored on its side
        turned = (height, width) != cut_sides(header, cut)
        height, width = header.height, header.width
        height, width = (width, height) if turned else (height, width)
    return pixels, grid_thw(config, height, width)


def patches_by_header(header: ImageHeader, config: EncoderConfig) -> int:
    """Patches that an image will become."""
    return num_patches(grid_thw(config, header.height, header.width))


def jpeg_cut(header: ImageHeader, config: EncoderConfig) -> int:
    """By what the sides of a huge JPEG are divided while it is decoded; 1 for any other image."""
    least = config.draft_jpegs_from
    if header.format not in ("JPEG", "MPO") or least is None or header.num_pixels < least:
        return 1
    _, rows, columns = grid_thw(config, header.height, header.width)
    sides = (header.height, rows), (header.width, columns)
    needed = SPARE * config.patch_size
    for cut in CUTS:
        height, width = cut_sides(header, cut)
        # Of sides that differ and become equal nobody could tell whether they were exchanged.
        told_apart = height != width or header.height == header.width
        if told_apart and all(side // cut >= needed * patches for side, patches in sides):
            return cut
    return 1


def cut_sides(header: ImageHeader, cut: int) -> tuple[int, int]:
    """Height and width as they are stored, divided and rounded up as decoders do."""
    return -(-header.height // cut), -(-header.width // cut)
