"""Bytes to RGB pixels. Every hazard of an image file ends here, as a `RequestError`.

Bytes are counted before they are parsed, and the header is judged before a pixel is decoded. The
type is read from the bytes, never from what a caller declares. Colour profiles are ignored, as the
reference processors ignore them. Calls share nothing, so any thread may decode.
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from PIL import AvifImagePlugin, ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from encoders.config import ImageLimits
from encoders.errors import InvalidImage, InvalidRequest, RequestTooLarge, UnsupportedImageType

# An allow-list, since Pillow opens 43 formats by default, some of them through other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP", "TIFF")  # "JPEG" opens MPO as well

# Three settings that exist once per process, hence made at import.
Image.MAX_IMAGE_PIXELS = None  # `ImageLimits` decides; Pillow's guard warns or raises by its own
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # callers decode in threads; else each starts one per core
# Pillow warns of broken metadata in words taken from the file, and Python keeps each text it has
# shown: memory that callers fill. `catch_warnings` is no way out, since it is not thread-safe.
warnings.filterwarnings("ignore", module=r"PIL\.")

# What Pillow and its plugins raise on broken bytes. `Warning` stands for processes that turn
# warnings into errors, `MemoryError` for sizes that a decoder will not even try to allocate.
DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    EOFError,
    RuntimeError,
    MemoryError,
    Warning,
    struct.error,
    zlib.error,
)

# Tells another type (415) from a broken file of an accepted one (422), which Pillow reports alike.
# "BM" also begins texts, so a BMP must show its reserved zeros. AVIF has the container of HEIC, and
# names itself among the compatible brands when the major one is general.
_SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|GIF8[79]a|BM....\0{4}|II[*+]\0|MM\0[*+]"
    rb"|....ftyp(?:avi[fs]|m[is]f1.{4}(?:.{4}){0,15}avi[fs])",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the first bytes say of an image, before any pixel is decoded.

    Height and width are as stored, before EXIF orientation (except a TIFF's: Pillow turns those).
    """

    format: str
    height: int
    width: int

    @property
    def num_pixels(self) -> int:
        """Area of the image."""
        return self.height * self.width


def read_header(data: bytes, limits: ImageLimits) -> ImageHeader:
    """The header of an image within the limits, or a `RequestError`; no pixel is decoded."""
    with _decoder_errors_are_invalid_images():
        return _header(_open(data, limits))


def decode_rgb(data: bytes, limits: ImageLimits, jpeg_cut: int = 1) -> np.ndarray:
    """Read-only uint8 [height, width, 3] of the first frame, upright, over `limits.background`.

    `jpeg_cut`: 2, 4 or 8 divides a JPEG's sides while it is decoded, rounded up.
    """
    with _decoder_errors_are_invalid_images():
        image = _open(data, limits)
        if jpeg_cut > 1:
            image.draft(None, (image.width // jpeg_cut, image.height // jpeg_cut))
        header = _header(image)
        _correct_hidden_colour(image)
        image.load()
        _turn_upright(image)
        rgb = _to_rgb(_to_8_bits(image), limits.background)
        # A copy, since Pillow stores RGB in four bytes; `np.array` would make two.
        pixels = np.frombuffer(rgb.tobytes(), np.uint8).reshape(rgb.height, rgb.width, 3)
    if pixels.shape[0] * pixels.shape[1] != header.num_pixels:
        height, width, _ = pixels.shape
        raise InvalidImage(
            f"its header says {header.width}x{header.height}, its pixels are {width}x{height}"
        )
    return pixels


@contextmanager
def _decoder_errors_are_invalid_images() -> Iterator[None]:
    try:
        yield
    except UnidentifiedImageError as error:  # its text is an address in our memory
        raise InvalidImage("the image's header cannot be read") from error
    except DECODER_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise InvalidImage(f"the image cannot be decoded: {reason}") from error


def _open(data: bytes, limits: ImageLimits) -> ImageFile.ImageFile:
    """An image of which nothing but the header has been read, and which the limits allow."""
    if not data:
        raise InvalidRequest("0 bytes where an image belongs")
    if len(data) > limits.max_bytes:
        raise RequestTooLarge(f"{len(data)} bytes of image, the limit is {limits.max_bytes}")
    if not _SIGNATURE.match(data):
        raise UnsupportedImageType(f"not an image of type {', '.join(FORMATS)}")
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.mode in ("I", "F"):
        raise UnsupportedImageType(f"pixels of mode {image.mode}, which have no known range")
    _check_size(_header(image), limits)
    return image


def _header(image: ImageFile.ImageFile) -> ImageHeader:
    assert image.format is not None
    return ImageHeader(image.format, image.height, image.width)


def _check_size(header: ImageHeader, limits: ImageLimits) -> None:
    size = f"{header.width}x{header.height}"
    if header.num_pixels > limits.max_pixels:
        raise RequestTooLarge(
            f"{size} is {header.num_pixels} pixels, the limit is {limits.max_pixels}"
        )
    short, long = sorted((header.height, header.width))
    if long > short * limits.max_aspect_ratio:
        raise InvalidImage(
            f"{size} has aspect ratio {long / short:g}, the limit is {limits.max_aspect_ratio:g}"
        )


def _correct_hidden_colour(image: ImageFile.ImageFile) -> None:
    """Put the colour of a PNG's tRNS chunk on the pixels' scale; Pillow leaves it as stored."""
    hidden = image.info.get("transparency")
    if image.format != "PNG" or hidden is None or not image.tile:
        return
    match image.tile[0].args:
        case "L;2":
            image.info["transparency"] = hidden * 85
        case "L;4":
            image.info["transparency"] = hidden * 17
        case "RGB;16B":
            image.info["transparency"] = tuple(value >> 8 for value in hidden)


def _turn_upright(image: ImageFile.ImageFile) -> None:
    # Orientation is a hint: when its EXIF is broken, the pixels are still worth having as stored.
    with suppress(*DECODER_ERRORS):
        ImageOps.exif_transpose(image, in_place=True)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits scaled to 8; an image of any other mode as it is."""
    if not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    white = 4095 if tags.get(ExifTags.Base.BitsPerSample) == (12,) else 65535
    # Scaled, where Pillow's own conversion would clip at 255.
    grey = np.rint(values * np.float32(255 / white)).astype(np.uint8)
    if tags.get(ExifTags.Base.PhotometricInterpretation) == 0:
        grey = 255 - grey  # white is zero, which Pillow heeds up to 8 bits only
    scaled = Image.fromarray(grey)
    if (hidden := image.info.get("transparency")) is not None:
        scaled.putalpha(Image.fromarray(np.uint8(255) * (values != hidden)))
    return scaled


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")  # the only way that Pillow knows from there to RGBA
    # Never straight to RGB, which would show the colours that transparency hides.
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    canvas = Image.new("RGB", rgba.size, background)
    canvas.paste(rgba, mask=rgba)
    return canvas
