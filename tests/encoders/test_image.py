"""Every hazard of an image file, made in memory with Pillow or by hand."""

import io
import pickle
import random
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image

from encoders.config import ImageLimits
from encoders.errors import (
    InvalidImage,
    InvalidRequest,
    RequestError,
    RequestTooLarge,
    UnsupportedImageType,
)
from encoders.image import ImageHeader, decode_rgb, read_header

# Pytest replaces the filter that `encoders.image` installs; a test below runs without pytest's.
pytestmark = pytest.mark.filterwarnings(r"ignore::UserWarning:PIL\.")

LIMITS = ImageLimits()
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "AVIF", "BMP", "TIFF")
LOSSLESS = ("PNG", "WEBP", "BMP", "TIFF")
ORIENTATION = 274
UPRIGHT = {  # what undoes each orientation, by the EXIF specification
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].transpose(1, 0, 2),
    8: lambda stored: np.rot90(stored),
}
PHOTOGRAPHS = sorted(
    path
    for path in (Path(skimage.__file__).parent / "data").iterdir()
    if path.suffix in {".png", ".jpg", ".tif"} and path.name != "multipage_rgb.tif"  # of doubles
)


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    if format == "WEBP":
        options = {"lossless": True, "exact": True} | options
    image.save(file, format, **options)
    return file.getvalue()


def smooth(height: int = 24, width: int = 36) -> Image.Image:
    """Three different ramps, which lossy formats keep and no flip maps to themselves."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(
        np.stack([y * 255 // height, x * 255 // width, (x + y) * 3], axis=2).astype(np.uint8)
    )


def sample(format: str) -> bytes:
    """A file of each format, with parts that break: EXIF, a palette, a second frame."""
    image, exif = smooth(), Image.Exif()
    exif[ORIENTATION] = 6
    match format:
        case "MPO":
            return encode(image, "MPO", save_all=True, append_images=[image.rotate(180)])
        case "GIF":
            options = {"save_all": True, "append_images": [image.rotate(180)], "transparency": 0}
            return encode(image.quantize(32), "GIF", **options)
        case "BMP":
            return encode(image, "BMP")
        case "TIFF":
            return encode(image, "TIFF", compression="tiff_lzw", exif=exif)
        case _:
            return encode(image, format, exif=exif)


def png(
    size: tuple[int, int], depth: int, color: int, rows: bytes, trns: bytes | None = None
) -> bytes:
    """A PNG of given height and width, from its scan lines: `color` 0 is grey, 2 is RGB."""
    height, width = size
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    if trns is not None:
        chunks.insert(1, (b"tRNS", trns))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def grey_tiff(width: int, bits: int, photometric: int, row: bytes) -> bytes:
    """A TIFF of one uncompressed grey row. `photometric` 0 says that white is zero."""
    tags = {256: width, 257: 1, 258: bits, 259: 1, 262: photometric, 277: 1, 278: 1, 279: len(row)}
    tags[273] = 8 + 2 + 12 * (len(tags) + 1) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, tags[tag]) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + b"\0\0\0\0" + row


@pytest.mark.parametrize("format", FORMATS)
def test_each_accepted_format_round_trips(format: str) -> None:
    image = smooth()
    data = encode(image, format)

    header, pixels = read_header(data, LIMITS), decode_rgb(data, LIMITS)

    opened_as = "JPEG" if format == "MPO" else format  # of one picture, an MPO is a JPEG
    assert header == ImageHeader(opened_as, height=24, width=36)
    assert header.num_pixels == 864
    tolerance = 0 if format in LOSSLESS else 12
    assert np.abs(pixels.astype(int) - np.asarray(image)).mean() <= tolerance


def test_the_array_is_contiguous_and_nobody_may_write_to_it() -> None:
    pixels = decode_rgb(encode(smooth(), "PNG"), LIMITS)

    assert pixels.dtype == np.uint8
    assert pixels.shape == (24, 36, 3)
    assert pixels.flags.c_contiguous
    assert not pixels.flags.writeable


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.name)
def test_real_photographs_decode_to_the_size_of_their_header(path: Path) -> None:
    data = path.read_bytes()

    header, pixels = read_header(data, LIMITS), decode_rgb(data, LIMITS)

    assert pixels.shape == (header.height, header.width, 3)
    assert pixels.std() > 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_exif_orientation_is_applied_once(format: str, orientation: int) -> None:
    image, exif = smooth(), Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"quality": 95} if format in {"JPEG", "AVIF"} else {}

    pixels = decode_rgb(encode(image, format, exif=exif, **options), LIMITS)

    expected = UPRIGHT[orientation](np.asarray(image))
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).mean() <= (0 if format in LOSSLESS else 6)


def test_orientation_reaches_16_bit_grey_and_palettes() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    stored = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    deep = Image.fromarray(stored.astype(np.uint16) * 257)
    paletted = Image.fromarray(stored).convert("P")

    from_deep = decode_rgb(encode(deep, "PNG", exif=exif), LIMITS)
    from_paletted = decode_rgb(encode(paletted, "PNG", exif=exif), LIMITS)

    np.testing.assert_array_equal(from_deep[..., 0], np.rot90(stored, -1))
    np.testing.assert_array_equal(from_paletted[..., 0], np.rot90(stored, -1))


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0garbage", b"Exif\0\0"]
)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_malformed_exif_leaves_the_image_as_stored(format: str, exif: bytes) -> None:
    plain = decode_rgb(encode(smooth(), format), LIMITS)

    pixels = decode_rgb(encode(smooth(), format, exif=exif), LIMITS)

    np.testing.assert_array_equal(pixels, plain)


def test_pillow_warnings_neither_raise_nor_print_outside_of_pytest() -> None:
    """Run under -W error, which an import-time filter must precede."""
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x0f\x01\x02\0\xff\0\0\0\xff\xff\0\0\0\0\0\0"
    data = encode(smooth(), "JPEG", exif=exif)
    with pytest.warns(UserWarning, match="Tag data larger"), Image.open(io.BytesIO(data)) as image:
        image.getexif()  # the file does make Pillow warn
    script = (
        "import sys; from encoders.config import ImageLimits; from encoders import image;"
        "print(image.decode_rgb(sys.stdin.buffer.read(), ImageLimits()).shape)"
    )

    done = subprocess.run(
        [sys.executable, "-W", "error:::PIL", "-c", script], input=data, capture_output=True
    )

    assert (done.stdout.strip(), done.stderr) == (b"(24, 36, 3)", b"")


@pytest.mark.parametrize("background", [(255, 255, 255), (10, 20, 30)])
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_composited_over_the_background(
    format: str, background: tuple[int, int, int]
) -> None:
    image = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((0, 128, 255)):
        image.putpixel((x, 0), (200, 100, 0, alpha))

    pixels = decode_rgb(encode(image, format), ImageLimits(background=background))

    share = np.array([0, 128, 255])[:, None] / 255
    expected = share * (200, 100, 0) + (1 - share) * background
    np.testing.assert_allclose(pixels[0], expected, atol=0.51)


@pytest.mark.parametrize(
    ("format", "transparency"), [("PNG", 0), ("PNG", bytes([0, 255])), ("GIF", 0)]
)
def test_the_colour_behind_a_transparent_palette_entry_stays_hidden(
    format: str, transparency: int | bytes
) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)

    pixels = decode_rgb(encode(image, format, transparency=transparency), LIMITS)

    np.testing.assert_array_equal(pixels[0], [(255, 255, 255), (0, 0, 255)])


@pytest.mark.parametrize("mode", ["LA", "PA", "La"])
def test_grey_and_palette_with_alpha_are_composited(mode: str) -> None:
    image = Image.new("LA", (2, 1), (90, 255))
    image.putpixel((0, 0), (0, 0))
    data = encode(image.convert("RGBA").convert("PA") if mode == "PA" else image, "TIFF")
    if mode == "La":  # Pillow does not write it: ExtraSamples 1, in place of 2, is premultiplied
        data = data.replace(struct.pack("<HHII", 338, 3, 1, 2), struct.pack("<HHII", 338, 3, 1, 1))
    assert Image.open(io.BytesIO(data)).mode == mode

    pixels = decode_rgb(data, LIMITS)

    np.testing.assert_array_equal(pixels[0], [(255, 255, 255), (90, 90, 90)])


@pytest.mark.parametrize(
    ("depth", "color", "row", "hidden", "shown"),
    [
        (1, 0, b"\x40", [0], 255),
        (2, 0, b"\x60", [1], 170),
        (4, 0, b"\x5f", [5], 255),
        (8, 0, b"\x05\x50", [5], 80),
        (16, 0, b"\x12\x34\xff\xff", [0x1234], 255),
        (8, 2, b"\x05\x05\x05\x50\x50\x50", [5, 5, 5], 80),
        (16, 2, b"\x12\x34" * 3 + b"\x50\x50" * 3, [0x1234] * 3, 80),
    ],
)
def test_one_transparent_colour_is_hidden_at_every_bit_depth(
    depth: int, color: int, row: bytes, hidden: list[int], shown: int
) -> None:
    data = png((1, 2), depth, color, b"\0" + row, struct.pack(f">{len(hidden)}H", *hidden))

    pixels = decode_rgb(data, ImageLimits(background=(1, 2, 3)))

    np.testing.assert_array_equal(pixels[0], [(1, 2, 3), (shown, shown, shown)])


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_and_not_clipped(format: str) -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)

    pixels = decode_rgb(encode(Image.fromarray(values), format), LIMITS)

    assert pixels.mean() == pytest.approx(127.5)
    np.testing.assert_array_equal(pixels[..., 0], (values.astype(int) + 128) // 257)


def test_big_endian_16_bit_grey_is_scaled() -> None:
    image = Image.frombytes("I;16B", (2, 1), bytes([0x80, 0x00, 0xFF, 0xFF]))

    pixels = decode_rgb(encode(image, "TIFF"), LIMITS)

    assert pixels[0, :, 0].tolist() == [128, 255]


def test_12_bit_grey_reaches_white() -> None:
    pixels = decode_rgb(grey_tiff(2, 12, photometric=1, row=b"\x80\x0f\xff"), LIMITS)

    assert pixels[0, :, 0].tolist() == [128, 255]


@pytest.mark.parametrize(("bits", "row"), [(8, b"\x00\xff"), (16, b"\x00\x00\xff\xff")])
def test_white_may_be_zero(bits: int, row: bytes) -> None:
    pixels = decode_rgb(grey_tiff(2, bits, photometric=0, row=row), LIMITS)

    assert pixels[0, :, 0].tolist() == [255, 0]


@pytest.mark.parametrize(
    ("mode", "color", "format", "expected"),
    [
        ("1", 255, "PNG", (255, 255, 255)),
        ("L", 77, "PNG", (77, 77, 77)),
        ("CMYK", (0, 255, 255, 0), "JPEG", (255, 0, 0)),
        ("CMYK", (0, 255, 255, 0), "TIFF", (255, 0, 0)),
        ("YCbCr", (76, 85, 255), "TIFF", (254, 0, 0)),
        ("LAB", (255, 128, 128), "TIFF", (255, 255, 255)),
    ],
)
def test_other_colour_models_become_rgb(
    mode: str, color: int | tuple[int, ...], format: str, expected: tuple[int, int, int]
) -> None:
    data = encode(Image.new(mode, (16, 16), color), format)
    assert Image.open(io.BytesIO(data)).mode == mode

    pixels = decode_rgb(data, LIMITS)

    np.testing.assert_allclose(pixels[8, 8], expected, atol=2)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "AVIF", "TIFF", "MPO"])
def test_the_first_of_many_frames_is_decoded(format: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue", "lime")]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 3

    header, pixels = read_header(data, LIMITS), decode_rgb(data, LIMITS)

    assert header.format == format
    np.testing.assert_allclose(pixels.mean((0, 1)), (255, 0, 0), atol=5)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_32_bit_pixels_are_unsupported(mode: str) -> None:
    data = encode(Image.new(mode, (4, 4)), "TIFF")

    with pytest.raises(UnsupportedImageType, match=f"mode {mode}"):
        read_header(data, LIMITS)
    with pytest.raises(UnsupportedImageType, match=f"mode {mode}"):
        decode_rgb(data, LIMITS)


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("format", FORMATS)
def test_truncated_files_are_invalid(format: str, part: float) -> None:
    photograph = smooth(200, 300).effect_spread(20)  # noise fills the file with pixels, not headers
    data = encode(photograph.quantize(64) if format == "GIF" else photograph, format)
    kept = data[: max(12, int(len(data) * part))]

    with pytest.raises(InvalidImage):
        decode_rgb(kept, LIMITS)


def test_a_small_file_of_169_megapixels_is_refused_before_it_is_decoded() -> None:
    data = png((13000, 13000), 1, 0, bytes((1 + 1625) * 13000))
    assert len(data) < 30_000
    start = time.perf_counter()

    for read in (read_header, decode_rgb):
        with pytest.raises(RequestTooLarge, match=r"13000x13000 is 169000000 .* 50000000"):
            read(data, LIMITS)

    assert time.perf_counter() - start < 0.2


@pytest.mark.parametrize("size", [(10000, 1), (1, 10000), (201, 1)])
def test_a_strip_is_invalid(size: tuple[int, int]) -> None:
    data = encode(Image.new("RGB", size), "PNG")

    with pytest.raises(InvalidImage, match=rf"aspect ratio {max(size)}, the limit is 200"):
        read_header(data, LIMITS)


@pytest.mark.parametrize("size", [(200, 1), (3, 600), (1, 1)])
def test_the_largest_aspect_ratio_is_legal(size: tuple[int, int]) -> None:
    pixels = decode_rgb(encode(Image.new("RGB", size), "PNG"), LIMITS)

    assert pixels.shape == (size[1], size[0], 3)


def test_limits_on_pixels_and_bytes_are_inclusive() -> None:
    data = encode(smooth(), "PNG")

    decode_rgb(data, ImageLimits(max_pixels=864, max_bytes=len(data)))

    with pytest.raises(RequestTooLarge, match="864 pixels, the limit is 863"):
        read_header(data, ImageLimits(max_pixels=863))
    with pytest.raises(RequestTooLarge, match=f"{len(data)} bytes .* {len(data) - 1}"):
        read_header(data, ImageLimits(max_bytes=len(data) - 1))


def test_bytes_are_counted_before_they_are_parsed() -> None:
    with pytest.raises(RequestTooLarge, match="100 bytes of image, the limit is 99"):
        read_header(b"?" * 100, ImageLimits(max_bytes=99))


def test_no_bytes_are_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="0 bytes"):
        decode_rgb(b"", LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        b"<!doctype html><title>404</title>",
        b"hello, world",
        b"BMW is not a bitmap",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"8BPS\0\1" + bytes(40),
        b"\0\0\0\x18ftypheic" + bytes(40),
        b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(40),
        b"\0",
        encode(smooth(), "ICO"),
        encode(smooth(), "PPM"),
        encode(smooth(), "JPEG2000"),
    ],
    ids=lambda data: repr(data[:10]),
)
def test_other_types_are_unsupported_and_the_accepted_ones_listed(data: bytes) -> None:
    with pytest.raises(UnsupportedImageType, match="JPEG, PNG, WEBP, GIF, AVIF, BMP, TIFF"):
        read_header(data, LIMITS)


@pytest.mark.parametrize("format", FORMATS)
def test_a_broken_header_behind_an_accepted_signature_is_invalid(format: str) -> None:
    data = sample(format)[:14] + b"\xff" * 50

    with pytest.raises(InvalidImage):
        read_header(data, LIMITS)


def test_an_avif_may_have_a_general_brand() -> None:
    data = encode(smooth(), "AVIF")
    assert data[8:12] == b"avif"
    assert b"avif" in data[16:32]

    header = read_header(data[:8] + b"mif1" + data[12:], LIMITS)

    assert header.format == "AVIF"


def test_a_kind_of_tiff_that_pillow_cannot_read_is_invalid() -> None:
    doubles = Path(skimage.__file__).parent / "data" / "multipage_rgb.tif"

    with pytest.raises(InvalidImage, match="header cannot be read"):
        read_header(doubles.read_bytes(), LIMITS)


def test_a_broken_metadata_chunk_is_invalid() -> None:
    data = png((1, 2), 8, 0, b"\0\0\0", trns=b"?")

    with pytest.raises(InvalidImage, match="tRNS"):
        read_header(data, LIMITS)


def test_an_error_pickles_with_its_message_and_the_item_it_was_named_after() -> None:
    with pytest.raises(InvalidImage) as caught:
        decode_rgb(sample("PNG")[:-60], LIMITS)
    error = caught.value

    copy = pickle.loads(pickle.dumps(error.named("image 3")))

    assert error.item is None
    assert (type(copy), copy.item, str(copy)) == (InvalidImage, "image 3", f"image 3: {error}")


def mutations(data: bytes, seed: int, count: int) -> Iterable[bytes]:
    """Flips, cuts and insertions, half of them where the header is."""
    rng = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(min(len(mutant), rng.choice((150, len(data)))))
            match rng.randrange(6):
                case 0:
                    mutant = mutant[: at + 1]
                case 1:
                    mutant[at:at] = rng.randbytes(rng.randint(1, 8))
                case 2:
                    del mutant[at + 1 : at + 9]
                case _:
                    mutant[at] = rng.randrange(256)
        yield bytes(mutant)


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_but_request_errors_leaves_mutated_files(format: str) -> None:
    limits = ImageLimits(max_pixels=100_000)
    decoded = refused = 0

    for data in mutations(sample(format), seed=FORMATS.index(format), count=400):
        try:
            header, pixels = read_header(data, limits), decode_rgb(data, limits)
        except RequestError:
            refused += 1
            continue
        decoded += 1
        assert pixels.dtype == np.uint8
        assert pixels.shape[2] == 3
        assert pixels.size == 3 * header.num_pixels <= 300_000

    assert decoded
    assert refused


def test_threads_decode_the_same_pixels() -> None:
    files = [sample(format) for format in FORMATS] * 8
    alone = [decode_rgb(data, LIMITS) for data in files]

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda data: decode_rgb(data, LIMITS), files))

    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
