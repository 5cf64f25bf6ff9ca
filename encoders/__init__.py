"""Image encoders in plain PyTorch.

This door imports no torch: Ingress and Batcher pass through it.
"""

from encoders.config import EncoderConfig
from encoders.errors import EncoderError

__all__ = ["EncoderConfig", "EncoderError"]
