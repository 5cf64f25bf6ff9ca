"""Files that must never reach an encoder, and what a client is told of each."""

import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class BadImage:
    """A body, the status it gets, and what its message must hold."""

    data: bytes
    status: int
    said: tuple[str, ...]


def jpeg(height: int = 64, width: int = 96, seed: int = 0) -> bytes:
    """A photograph-like JPEG."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def flat_png(height: int, width: int) -> bytes:
    """A one-bit PNG of any size: deflate leaves nearly nothing of it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    rows = zlib.compress((b"\0" + bytes(-(-width // 8))) * height, 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'

BAD_IMAGES = {
    "empty body": BadImage(b"", 400, ("0 bytes",)),
    "text": BadImage(b"hello, this is no image at all", 415, ("JPEG", "WEBP")),
    "SVG": BadImage(SVG, 415, ("JPEG", "WEBP")),
    "truncated JPEG": BadImage(jpeg()[:900], 422, ("truncated",)),
    "bomb": BadImage(flat_png(13_000, 13_000), 413, ("169000000", "50000000")),
    "strip": BadImage(flat_png(1, 10_000), 422, ("10000", "200")),
}
