"""The app that `serve run serve_config.yaml` starts: the only place that makes deployments.

The same three classes in every topology; what differs is which of them share a process.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from encoders.config import EncoderConfig
from serve_app.args import AppArgs, check_limits
from serve_app.batcher import Batcher
from serve_app.handles import BatcherHandle, EncoderHandle
from serve_app.ingress import Ingress, MakeService
from serve_app.local import fused_service
from serve_app.replica import EncoderReplica

SLOTS = 2
"""Batches per encoder: one on the device, and one that waits behind it."""
CPUS = 0.1
"""Logical CPUs of a replica. They only place it; a laptop has two for all of them."""
MANY = 1024
"""Requests that Ray lets through: the Batcher's own queue limits refuse, with a reason."""
SPARE = 4
"""SGLang's calls wait for one another, so Ingress limits each kind and Ray lets all of them in."""
LEASES = {"initial_backoff_s": 0.01, "max_backoff_s": 0.02}
"""How often who waits for a slot asks again. By Ray's own backoff, to 0.5 s, those who have waited
longest are the last to hear of a free one. Each asking costs the encoder some 0.3 ms of a core."""
NO_GPU = {"env_vars": {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}}
"""Ray does not hide the GPUs of a node from replicas that asked for none."""
PATIENT = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""On a CPU: OpenMP's threads would spin while they wait for one another, on cores that HTTP and
decoding need. Beside one busy process on two cores an image took four times as long."""


def build_app(args: AppArgs) -> Application:
    """The configured topology. Raises `ConfigError`."""
    config = EncoderConfig.load(args.encoder)
    check_limits(args, config)
    args = args.model_copy(update={"device": resolve_device(args.device)})
    return {"split": split, "inline": inline, "fused": fused}[args.topology](args, config)


def split(args: AppArgs, config: EncoderConfig) -> Application:
    """Three deployments, Ingress -> Batcher -> Encoder: each tier scales by itself."""
    batcher = deployment("Batcher", args, {"num_cpus": CPUS, "runtime_env": NO_GPU})(Batcher).bind(
        EncoderHandle(handle(encoder(args, config))), config, args.batch, args.queue
    )
    return ingress(args, config, partial(BatcherHandle, handle(batcher)))


def inline(args: AppArgs, config: EncoderConfig) -> Application:
    """Two deployments: each Ingress replica holds a Batcher, which saves a hop."""
    slots = EncoderHandle(handle(encoder(args, config)))
    return ingress(args, config, partial(Batcher, slots, config, args.batch, args.queue))


def fused(args: AppArgs, config: EncoderConfig) -> Application:
    """One deployment that holds all three: least latency, but a replica's death loses requests."""
    options = encoder_options(args)
    make_service = partial(fused_service, args, config, SLOTS)
    return ingress(args, config, make_service, options)


def encoder(args: AppArgs, config: EncoderConfig) -> Application:
    """The Encoder deployment: one device each, as many requests as it has slots."""
    return serve.deployment(
        name="Encoder",
        max_ongoing_requests=SLOTS,
        request_router_config=LEASES,
        ray_actor_options=encoder_options(args),
    )(EncoderReplica).bind(config, args.device, args.hang_after_s, lends=True)


def encoder_options(args: AppArgs) -> dict[str, Any]:
    """Where a replica with an encoder may run, and what it is given."""
    options: dict[str, Any] = {"num_cpus": CPUS, "num_gpus": int(args.device == "cuda")}
    if args.device == "cpu":
        options["runtime_env"] = PATIENT
    if args.encoder_labels:
        options["label_selector"] = args.encoder_labels
    return options


def ingress(
    args: AppArgs,
    config: EncoderConfig,
    make_service: MakeService,
    options: dict[str, Any] | None = None,
) -> Application:
    """The Ingress deployment over a service that each replica makes for itself."""
    options = options or {"num_cpus": CPUS, "runtime_env": NO_GPU}
    bare = deployment("Ingress", args, options, MANY * SPARE if args.sglang else MANY)
    return bare(serve.ingress()(Ingress)).bind(make_service, config, args.api, args.sglang)


def deployment(
    name: str, args: AppArgs, options: dict[str, Any], max_requests: int = MANY
) -> Callable[..., Any]:
    """A tier in front of the encoders: it admits many requests, and has time to finish them."""
    return serve.deployment(
        name=name,
        max_ongoing_requests=max_requests,
        graceful_shutdown_timeout_s=args.api.request_timeout_s + 5,
        ray_actor_options=options,
    )


def handle(app: Application) -> DeploymentHandle[Any]:
    """What Serve puts in a bound application's place, wherever it stands, when it deploys."""
    return cast("DeploymentHandle[Any]", app)


def resolve_device(device: str) -> str:
    """`auto` becomes `cuda` (HIP too) where Ray has a GPU to give, else `cpu`."""
    if device != "auto":
        return device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
