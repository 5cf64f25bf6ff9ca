"""Shared fixtures: real photographs, the demo's real weights, small random checkpoints."""

import os
from pathlib import Path

import pytest
import skimage
import torch

from encoders import EncoderConfig
from encoders.encoder import Encoder

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it as it is first imported

PHOTOS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "cell.png",
    "chelsea.png",
    "clock_motion.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "horse.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "logo.png",
    "moon.png",
    "motorcycle_left.png",
    "page.png",
    "retina.jpg",
    "rocket.jpg",
    "text.png",
)


@pytest.fixture(scope="session")
def photo_dir() -> Path:
    """scikit-image's bundled photographs."""
    return Path(skimage.__file__).parent / "data"


@pytest.fixture(scope="session")
def photos(photo_dir: Path) -> dict[str, bytes]:
    """Twenty of them, as files."""
    return {name: (photo_dir / name).read_bytes() for name in PHOTOS}


@pytest.fixture(scope="session")
def demo_config() -> EncoderConfig:
    """The encoder that `serve_config.yaml` serves."""
    return EncoderConfig.load("dinov2-demo")


@pytest.fixture(scope="session")
def demo_encoder(demo_config: EncoderConfig) -> Encoder:
    """The same, loaded; its weights are fetched once per machine."""
    return Encoder.load(demo_config)
