"""Who waits for which part (`zmq_to_scheduler`): registrations come before, during or after it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from encoders.errors import InvalidRequest, Overloaded
from serve_app.sglang.wire import Frames

EXPIRE_S = 240.0
"""Age at which a part that nobody asked for is forgotten: SGLang waits for 180 s."""
MAX_PARTS = 65_536
"""Past it, the oldest that nobody asked for is forgotten."""


class Known(NamedTuple):
    """Receivers of one part that have registered, in order, and how many there will be."""

    receivers: tuple[str, ...] = ()
    total: int | None = None

    @property
    def complete(self) -> bool:
        """Whether every receiver has registered."""
        return len(self.receivers) == self.total


NOBODY = Known()


class Receivers(Protocol):
    """Parts and their receivers, wherever they are kept."""

    async def register(self, req_id: str, count: int, receiver: str) -> Frames | None:
        """Add one of a part's receivers; the same one twice counts once.

        Answers at once. Of a part that has failed: the message that this receiver is to get, once.
        """
        ...

    async def registered(self, req_id: str, timeout_s: float) -> Known:
        """Take a part's receivers out when all have registered; else those known by then.

        Raises `InvalidRequest` if another call waits for them.
        """
        ...

    async def fail(self, req_id: str, frames: Frames) -> Known:
        """Receivers that are known by now. Those that come later get the message as well.

        Raises `InvalidRequest` if another call waits for them.
        """
        ...

    async def close(self) -> None:
        """Nothing more comes from this process."""
        ...


@dataclass(slots=True)
class _Waiting:
    known: Known = NOBODY
    all_there: asyncio.Event = field(default_factory=asyncio.Event)
    failed: Frames | None = None
    awaited: bool = False
    """By a call that has the part's rows."""
    since: float = field(default_factory=time.monotonic)


class LocalReceivers:
    """The registry itself: plain asyncio, in one loop. It waits without holding up others."""

    def __init__(self) -> None:
        self._parts: dict[str, _Waiting] = {}  # a dict keeps its order: the oldest first

    async def register(self, req_id: str, count: int, receiver: str) -> Frames | None:
        """See `Receivers`. Raises `InvalidRequest` where registrations disagree."""
        self._forget_old()
        part = self._parts.get(req_id) or self._add(req_id)
        receivers = part.known.receivers
        is_new = receiver not in receivers
        if part.known.total not in (None, count):
            raise InvalidRequest(f"receive_count is {count}, it was {part.known.total} before")
        if is_new:
            if len(receivers) == count:
                raise InvalidRequest(f"all {count} receivers of this part have registered already")
            receivers = (*receivers, receiver)
        part.known = Known(receivers, count)
        if part.known.complete:
            part.all_there.set()
            if part.failed is not None:
                del self._parts[req_id]
        return part.failed if is_new else None

    async def registered(self, req_id: str, timeout_s: float) -> Known:
        """See `Receivers`."""
        self._forget_old()
        self._refuse_awaited(req_id)
        part = self._parts.pop(req_id, None) or _Waiting()
        part.since, part.failed = time.monotonic(), None
        self._add(req_id, part)  # as the youngest
        part.awaited = True
        try:
            async with asyncio.timeout(timeout_s):
                await part.all_there.wait()
        except TimeoutError:
            return part.known
        finally:
            part.awaited = False
        if self._parts.get(req_id) is part:
            del self._parts[req_id]
        return part.known

    async def fail(self, req_id: str, frames: Frames) -> Known:
        """See `Receivers`."""
        self._forget_old()
        self._refuse_awaited(req_id)
        part = self._parts.get(req_id) or self._add(req_id)
        part.failed = frames
        if part.known.complete:
            del self._parts[req_id]
        return part.known

    async def close(self) -> None:
        """It ends with its process."""

    def __len__(self) -> int:
        self._forget_old()
        return len(self._parts)

    def _add(self, req_id: str, part: _Waiting | None = None) -> _Waiting:
        if len(self._parts) >= MAX_PARTS:
            oldest = next((x for x, other in self._parts.items() if not other.awaited), None)
            if oldest is None:
                raise Overloaded(f"{len(self._parts)} parts wait, the limit is {MAX_PARTS}")
            del self._parts[oldest]
        return self._parts.setdefault(req_id, part or _Waiting())

    def _refuse_awaited(self, req_id: str) -> None:
        if (part := self._parts.get(req_id)) and part.awaited:
            raise InvalidRequest(f"{req_id[:80]!r} is being encoded already")

    def _forget_old(self) -> None:
        oldest_allowed = time.monotonic() - EXPIRE_S
        while self._parts:
            req_id, part = next(iter(self._parts.items()))
            if part.since > oldest_allowed:
                return
            del self._parts[req_id]
