"""How much may be under way: counted in several units, refused or awaited."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """At most `limit` bytes held at once; who comes first is served first, whatever the size."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._held

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for the bytes, and give them back on exit. More than the limit waits for ever."""
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((num_bytes, turn))
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._held -= num_bytes
            self._grant()

    def _grant(self) -> None:
        while self._queue:
            num_bytes, turn = self._queue[0]
            if not turn.cancelled():  # a caller that left holds nothing and lets the next pass
                if self._held + num_bytes > self._limit:
                    return
                self._held += num_bytes
                turn.set_result(None)
            self._queue.popleft()
