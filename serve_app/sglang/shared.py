"""What the Ingress replicas of one application share: a named actor with every registration."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from encoders.errors import Overloaded, ReplicaLost
from serve_app.handles import unwrapped
from serve_app.sglang.receivers import EXPIRE_S, Known, LocalReceivers, Receivers
from serve_app.sglang.wire import Frames

logger = logging.getLogger(__name__)

NAMESPACE = "serve"
MAX_CALLS = 100_000
"""At once in the actor. Most only wait, and those that register must not wait behind them."""
CALL_TIMEOUT_S = 4.0
"""For an answer of the actor, which may have to be started anew, or of Ray: a failure has to end in
under five seconds."""


class Registry:
    """The actor. It outlives every Ingress replica, and ends when the last that used it has."""

    def __init__(self) -> None:
        self._receivers = LocalReceivers()
        self._num_uses = 0
        self._end: asyncio.Task[None] | None = None

    async def register(self, req_id: str, count: int, receiver: str) -> Frames | None:
        """See `Receivers`."""
        self._num_uses += 1
        return await self._receivers.register(req_id, count, receiver)

    async def registered(self, req_id: str, timeout_s: float) -> Known:
        """See `Receivers`."""
        self._num_uses += 1
        return await self._receivers.registered(req_id, timeout_s)

    async def fail(self, req_id: str, frames: Frames) -> Known:
        """See `Receivers`."""
        self._num_uses += 1
        return await self._receivers.fail(req_id, frames)

    async def answers(self) -> None:
        """Show that the actor lives."""

    async def retire(self) -> None:
        """End as soon as no part is left, unless it is used again; answers at once.

        Parts that nobody asks for are left for as long as they are kept.
        """
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.create_task(self._end_unless_used())

    async def _end_unless_used(self) -> None:
        num_uses, end = self._num_uses, time.monotonic() + EXPIRE_S
        while self._receivers and time.monotonic() < end:  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0.1)
        if self._num_uses == num_uses:  # else whoever used it lets it retire
            ray.kill(ray.get_runtime_context().current_actor)


class SharedReceivers:
    """`Receivers` that live in the actor of an application. Each call ends in time."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._actor = _actor(app)

    async def register(self, req_id: str, count: int, receiver: str) -> Frames | None:
        """See `Receivers`."""
        frames: Frames | None = await self._retried("register", req_id, count, receiver)
        return frames

    async def registered(self, req_id: str, timeout_s: float) -> Known:
        """See `Receivers`. Not tried twice: registrations are lost with the actor."""
        await self._retried("answers")
        known: Known = await self._call(timeout_s + CALL_TIMEOUT_S, "registered", req_id, timeout_s)
        return known

    async def fail(self, req_id: str, frames: Frames) -> Known:
        """See `Receivers`."""
        known: Known = await self._retried("fail", req_id, frames)
        return known

    async def close(self) -> None:
        """Let the actor end if the application does, and nobody else needs it."""
        if await app_ends():
            with suppress(ReplicaLost, Overloaded):  # another replica was quicker
                await self._call(CALL_TIMEOUT_S, "retire")

    async def _retried(self, method: str, *args: Any) -> Any:
        """The actor may have ended, with an application that was deleted or by a fault."""
        loop = asyncio.get_running_loop()
        end = loop.time() + CALL_TIMEOUT_S
        try:
            return await self._call(CALL_TIMEOUT_S, method, *args)
        except ReplicaLost:
            try:
                async with asyncio.timeout_at(end):
                    self._actor = await asyncio.to_thread(_actor, self._app)
            except (TimeoutError, RayError) as error:
                raise Overloaded("the registry of receivers cannot be started") from error
        return await self._call(end - loop.time(), method, *args)

    async def _call(self, timeout_s: float, method: str, *args: Any) -> Any:
        with unwrapped():
            reply = getattr(self._actor, method).remote(*args)
            try:
                async with asyncio.timeout(timeout_s):
                    return await reply
            except TimeoutError as error:
                raise Overloaded("the registry of receivers does not answer") from error
            except asyncio.CancelledError:
                ray.cancel(reply)  # else the part would stay taken by a caller that left
                raise


def receivers() -> Receivers:
    """Those of this replica's application; outside of Ray Serve, this process's own."""
    app = _app_name()
    return LocalReceivers() if app is None else SharedReceivers(app)


async def app_ends() -> bool:
    """Whether with this replica its whole application ends; False if unknown.

    Outside of Ray Serve a process is the application.
    """
    return _app_name() is None or await app_is_deleted()


async def app_is_deleted() -> bool:
    """Whether this replica's whole application is being deleted; False if unknown."""
    if (app := _app_name()) is None:
        return False
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            status = await asyncio.to_thread(serve.status)
    except (TimeoutError, RayError, RayServeException) as error:
        logger.warning("whether the application ends is not known: %s", type(error).__name__)
        return False
    overview = status.applications.get(app)
    return overview is not None and overview.status == ApplicationStatus.DELETING


def _actor(app: str) -> Any:
    """The application's actor, which is made unless it exists."""
    registry = ray.remote(Registry).options(
        name=_actor_name(app),
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
    )
    return registry.remote()


def _app_name() -> str | None:
    try:
        return serve.get_replica_context().app_name
    except RayServeException:
        return None


def _actor_name(app: str) -> str:
    return f"sglang_receivers:{app}"
