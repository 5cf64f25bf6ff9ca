"""Bodies as SGLang sends them, real images for them, and the rows that are right."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from encoders.encoder import Encoder
from encoders.image import decode_rgb
from encoders.packing import PackedBatch
from encoders.sizes import grid_thw
from tests.sglang.receiver import Receiver

SIZES = [
    (64, 64),
    (200, 90),
    (33, 47),
    (128, 256),
    (31, 500),
    (64, 64),
    (90, 200),
    (640, 480),
    (16, 16),
]
"""Width and height; the largest shrink, the smallest grows."""
HOST = "127.0.0.1"


def png(seed: int, size: tuple[int, int] = (64, 64)) -> bytes:
    """Noise, each seed its own."""
    width, height = size
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def body(
    images: Sequence[bytes | Any], receiver: Receiver | int | None, rid: str = "r", **changes: Any
) -> dict[str, Any]:
    """The body of `/encode`: for a receiver, or for those that register."""
    port = receiver.port if isinstance(receiver, Receiver) else receiver
    return {
        "encoder_idx": 0,
        "encoder_url": "http://encoder:8000",
        "mm_items": [data_uri(x) if isinstance(x, bytes) else x for x in images],
        "num_parts": 1,
        "part_idx": 0,
        "req_id": f"{rid}_local_part_0",
        "modality": "IMAGE",
        "prefill_host": HOST,
        "embedding_port": port,
        "time_stats_json": None,
    } | changes


def registration(receiver: Receiver, rid: str = "r", count: int = 1) -> dict[str, Any]:
    """The body of `/scheduler_receive_url`."""
    return {
        "req_id": f"{rid}_local_part_0",
        "receive_count": count,
        "receive_url": receiver.url,
        "modality": "IMAGE",
    }


def right(encoder: Encoder, image: bytes) -> np.ndarray:
    """What the bare encoder makes of an image alone: float32 [rows, columns]."""
    return encoder.encode(batch_of(encoder, image), "patch")[0].numpy()


def batch_of(encoder: Encoder, image: bytes) -> PackedBatch:
    """The image alone, packed."""
    pixels = decode_rgb(image, encoder.config.limits)
    return PackedBatch.of([pixels], [grid_thw(encoder.config, *pixels.shape[:2])], 0)
