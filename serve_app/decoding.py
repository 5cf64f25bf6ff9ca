"""What the Batcher's threads do: check headers and decode, with errors that name the item."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from encoders.config import EncoderConfig, ImageLimits
from encoders.errors import EncoderError
from encoders.image import ImageHeader, read_header
from encoders.packing import GridTHW, Pixels
from encoders.reading import patches_by_header, read
from serve_app.metrics import timed
from serve_app.service import ImageItem


def read_headers(images: Sequence[ImageItem], limits: ImageLimits) -> list[ImageHeader]:
    """The header of every image, before any pixel is decoded. Raises a named `RequestError`."""
    headers = []
    for item in images:
        with naming(item.name):
            headers.append(read_header(item.data, limits))
    return headers


def count_patches(images: Sequence[ImageItem], config: EncoderConfig) -> int:
    """Patches that they will become, by their headers. Raises a named `RequestError`."""
    headers = read_headers(images, config.limits)
    return sum(patches_by_header(header, config) for header in headers)


def decode(item: ImageItem, config: EncoderConfig) -> tuple[Pixels, GridTHW]:
    """One image's pixels, and the patches they will become. Raises a named `RequestError`."""
    with naming(item.name), timed("encoder_decode_ms"):
        return read(item.data, config)


@contextmanager
def naming(item: str) -> Iterator[None]:
    """Errors that leave this block begin with the item's name."""
    try:
        yield
    except EncoderError as error:
        raise error.named(item) from error
