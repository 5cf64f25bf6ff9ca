"""The typed `args` of the application's YAML, and what in them has to agree."""

from typing import Literal

from pydantic import Field, PositiveFloat

from encoders.config import EncoderConfig, Settings
from encoders.errors import ConfigError
from encoders.sizes import max_patches
from serve_app.batcher import QueueLimits
from serve_app.endpoints import ApiLimits
from serve_app.sglang.settings import SGLangSettings
from serve_app.waiting import BatchLimits

SGLANG_TIMEOUT_S = 170.0
"""Ten seconds before SGLang gives a request up: what failed late still has to be said."""


class AppArgs(Settings):
    """The `args` of `serve_config.yaml`."""

    encoder: str = "dinov2-demo"
    topology: Literal["split", "inline", "fused"] = "split"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    encoder_labels: dict[str, str] = Field(default_factory=dict)
    """Ray labels of the nodes that encoders may run on, such as `{gpu: mi355x}`."""
    hang_after_s: PositiveFloat = 60.0
    """Age of a batch at which its encoder counts as hung, and is replaced; and of a leased slot
    at which it is free again, since whoever held it has died."""
    api: ApiLimits = ApiLimits()
    batch: BatchLimits = BatchLimits()
    queue: QueueLimits = QueueLimits()
    sglang: SGLangSettings | None = None
    """None: no endpoint of SGLang's exists."""


def check_limits(args: AppArgs, config: EncoderConfig) -> None:
    """What one limit admits, the next must have room for, or it would wait for ever."""
    if args.sglang and config.family != "qwen3_vl":
        raise ConfigError(f"sglang: SGLang splits no encoder of family {config.family} off")
    if args.sglang and args.api.request_timeout_s >= SGLANG_TIMEOUT_S:
        raise ConfigError(
            f"api.request_timeout_s is {args.api.request_timeout_s:g}, with sglang it has to be "
            f"below {SGLANG_TIMEOUT_S:g}: SGLang itself gives up after 180"
        )
    largest_image = 3 * config.limits.max_pixels
    for name, admitted, limit_name, limit in (
        ("api.max_images", args.api.max_images, "queue.max_images", args.queue.max_images),
        ("api.max_body_bytes", args.api.max_body_bytes, "queue.max_bytes", args.queue.max_bytes),
        ("a decoded image", largest_image, "batch.max_bytes", args.batch.max_bytes),
        ("a decoded image", largest_image, "queue.max_decoded_bytes", args.queue.max_decoded_bytes),
        ("an image's patches", max_patches(config), "batch.max_patches", args.batch.max_patches),
    ):
        if admitted > limit:
            raise ConfigError(f"{name} may be {admitted}, over {limit_name} = {limit}")
