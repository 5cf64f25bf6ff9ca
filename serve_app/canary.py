"""A real image, small enough to ask an encoder with whether it answers."""

import io

from PIL import Image

from encoders.config import EncoderConfig
from encoders.image import decode_rgb
from encoders.packing import PackedBatch
from encoders.sizes import NUM_PREFIX, grid_thw
from serve_app.service import ImageItem


def _gradient_png() -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((32, 32)).save(file, "PNG")
    return file.getvalue()


CANARY = ImageItem("canary", _gradient_png())


def canary_batch(config: EncoderConfig) -> PackedBatch:
    """The canary alone, packed for an encoder."""
    pixels = decode_rgb(CANARY.data, config.limits)
    grid = grid_thw(config, *pixels.shape[:2])
    return PackedBatch.of([pixels], [grid], NUM_PREFIX[config.family])
