"""The app that `serve run serve_config.yaml` starts: the only place that makes deployments."""

from typing import Any, Literal, cast

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from encoders.config import EncoderConfig, Settings
from encoders.errors import ConfigError
from serve_app.api import ApiLimits
from serve_app.batcher import Batcher, BatchLimits, QueueLimits
from serve_app.handles import BatcherHandle, EncoderHandle
from serve_app.ingress import Ingress
from serve_app.replica import EncoderReplica

SLOTS = 2
"""Batches per encoder: one on the device, and one that waits behind it."""
CPUS = 0.1
"""Logical CPUs of a replica. They only place it; a laptop has two for all of them."""
MANY = 1024
"""Requests that Ray lets through: the Batcher's own queue limits refuse, with a reason."""


class AppArgs(Settings):
    """The `args` of `serve_config.yaml`."""

    encoder: str = "dinov2-demo"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    api: ApiLimits = ApiLimits()
    batch: BatchLimits = BatchLimits()
    queue: QueueLimits = QueueLimits()


def build_app(args: AppArgs) -> Application:
    """Three deployments: Ingress -> Batcher -> Encoder. Raises `ConfigError`."""
    config = EncoderConfig.load(args.encoder)
    check_limits(args, config)
    device = resolve_device(args.device)
    encoder = serve.deployment(
        name="Encoder",
        max_ongoing_requests=SLOTS,
        ray_actor_options={"num_cpus": CPUS, "num_gpus": int(device == "cuda")},
    )(EncoderReplica).bind(config, device)
    batcher = serve.deployment(
        name="Batcher", max_ongoing_requests=MANY, ray_actor_options={"num_cpus": CPUS}
    )(Batcher).bind(EncoderHandle(handle(encoder)), config, args.batch, args.queue)
    ingress = serve.deployment(
        name="Ingress", max_ongoing_requests=MANY, ray_actor_options={"num_cpus": CPUS}
    )(serve.ingress()(Ingress))
    return ingress.bind(BatcherHandle(handle(batcher)), config, args.api)


def handle(app: Application) -> DeploymentHandle[Any]:
    """What Serve puts in a bound application's place, wherever it stands, when it deploys."""
    return cast("DeploymentHandle[Any]", app)


def resolve_device(device: str) -> str:
    """`auto` becomes `cuda` (HIP too) where Ray has a GPU to give, else `cpu`."""
    if device != "auto":
        return device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def check_limits(args: AppArgs, config: EncoderConfig) -> None:
    """What one limit admits, the next must have room for, or it would wait for ever."""
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


def max_patches(config: EncoderConfig) -> int:
    """Patches of the largest image that the resize rule makes."""
    return max(1, config.resize.max_pixels // config.patch_size**2)
