"""Messages to their receivers: one that the call names, or those that register themselves."""

import asyncio
import logging
from collections.abc import Collection
from contextvars import Context

from encoders.errors import EncoderError, PeerTimeout
from serve_app import metrics
from serve_app.sglang.push import Pusher, endpoint, split_address
from serve_app.sglang.receivers import Receivers
from serve_app.sglang.settings import SGLangSettings
from serve_app.sglang.shared import receivers
from serve_app.sglang.wire import Frames, Part, Registration

logger = logging.getLogger(__name__)


class Delivery:
    """Knows who gets what, and sends it once."""

    def __init__(self, settings: SGLangSettings) -> None:
        self._allowed = settings.receivers
        self._pusher = Pusher(settings.push_timeout_s)
        self._receivers: Receivers = receivers()
        self._late = set[asyncio.Task[None]]()
        self._num_waiting = 0

    def named(self, part: Part) -> str | None:
        """The receiver that a part names, if any. Raises `InvalidRequest` unless it is allowed."""
        if part.embedding_port is None or part.prefill_host is None:
            return None
        return endpoint(part.prefill_host, part.embedding_port, self._allowed)

    async def deliver(
        self, part: Part, named: str | None, frames: Frames, failed: Frames, timeout_s: float
    ) -> None:
        """A full copy to each receiver. Raises `PeerTimeout`, `PeerUnreachable`.

        If not all register in time, those that did are sent `failed`.
        """
        if named is not None:
            await self._pusher.push(named, frames)
            return
        self._count_waiting(1)
        try:
            known = await self._receivers.registered(part.req_id, timeout_s)
        finally:
            self._count_waiting(-1)
        if not known.complete:
            known = await self._receivers.fail(part.req_id, failed)  # later ones hear of it too
            await self._push_all(known.receivers, failed)
            found = f"{len(known.receivers)} of {known.total or 'unknown'} receivers"
            raise PeerTimeout(f"{found} registered for {part.req_id[:80]!r} in {timeout_s:g} s")
        await self._push_all(known.receivers, frames)

    async def tell(self, part: Part, named: str | None, failed: Frames) -> None:
        """Tell every receiver that a part has failed, also those that register later."""
        try:
            if named is None:
                known = await self._receivers.fail(part.req_id, failed)
                await self._push_all(known.receivers, failed)
            else:
                await self._pusher.push(named, failed)
        except EncoderError as error:  # the reply over HTTP still says it
            logger.warning("%s", error)

    async def register(self, registration: Registration) -> None:
        """Note a receiver, at once. Raises `InvalidRequest` unless it is allowed."""
        address = split_address(registration.receive_url)
        receiver = endpoint(*address, self._allowed)
        failed = await self._receivers.register(
            registration.req_id, registration.receive_count, receiver
        )
        if failed is not None:
            # In a context of its own: in the call's, Ray would cancel it when the caller leaves.
            task = asyncio.create_task(self._push_late(receiver, failed), context=Context())
            self._late.add(task)  # the loop itself keeps only weak references
            task.add_done_callback(self._late.discard)

    async def close(self) -> None:
        """Finish what is being sent."""
        try:
            if self._late:
                await asyncio.wait(self._late)
            await asyncio.to_thread(self._pusher.close)
        finally:
            await self._receivers.close()

    async def _push_all(self, receivers: Collection[str], frames: Frames) -> None:
        """To all at once; one that cannot be reached keeps it from no other."""
        pushes = (self._pusher.push(receiver, frames) for receiver in receivers)
        results = await asyncio.gather(*pushes, return_exceptions=True)
        for result in results:
            if result is not None:
                raise result

    async def _push_late(self, receiver: str, failed: Frames) -> None:
        try:
            await self._pusher.push(receiver, failed)
        except EncoderError as error:
            logger.warning("%s", error)

    def _count_waiting(self, change: int) -> None:
        self._num_waiting += change
        metrics.gauge("encoder_parts_without_receivers").set(self._num_waiting)
