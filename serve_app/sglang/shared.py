"""What the Ingress replicas of one application share: a named actor with every registration."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from serve_app.handles import unwrapped
from serve_app.sglang.receivers import Known, LocalReceivers, Receivers
from serve_app.sglang.wire import Frames

NAMESPACE = "serve"
MAX_CALLS = 100_000
"""At once in the actor. Most only wait, and those that register must not wait behind them."""


@dataclass(frozen=True)
class SharedReceivers:
    """`Receivers` that live in an actor, which outlives every Ingress replica."""

    actor: Any

    async def register(self, req_id: str, count: int, receiver: str) -> Frames | None:
        """See `Receivers`."""
        with unwrapped():
            return await self.actor.register.remote(req_id, count, receiver)

    async def registered(self, req_id: str, timeout_s: float) -> Known:
        """See `Receivers`."""
        with unwrapped():
            return await self.actor.registered.remote(req_id, timeout_s)

    async def fail(self, req_id: str, frames: Frames) -> Known:
        """See `Receivers`."""
        with unwrapped():
            return await self.actor.fail.remote(req_id, frames)


def receivers() -> Receivers:
    """Those of this replica's application; outside of Ray Serve, this process's own."""
    if (app := _app_name()) is None:
        return LocalReceivers()
    actor = ray.remote(LocalReceivers).options(
        name=_actor_name(app),
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
    )
    return SharedReceivers(actor.remote())


async def end_with_app() -> bool:
    """Whether this replica's whole application ends, not this replica alone; then the actor goes.

    Outside of Ray Serve a process is the application.
    """
    return await asyncio.to_thread(_end_with_app)


def _end_with_app() -> bool:
    if (app := _app_name()) is None:
        return True
    overview = serve.status().applications.get(app)
    if overview is not None and overview.status != ApplicationStatus.DELETING:
        return False
    with suppress(ValueError):  # another replica was quicker
        ray.kill(ray.get_actor(_actor_name(app), NAMESPACE))
    return True


def _app_name() -> str | None:
    try:
        return serve.get_replica_context().app_name
    except RayServeException:
        return None


def _actor_name(app: str) -> str:
    return f"sglang_receivers:{app}"
