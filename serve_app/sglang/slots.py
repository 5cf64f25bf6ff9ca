"""How many calls of one kind a replica runs, so that others always find room."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from encoders.errors import Overloaded
from serve_app.budget import ByteBudget

MAX_CALLS = 1024
"""Of one kind at once in one replica. Ray lets several times as many in: calls that these wait for,
registrations above all, must not queue up behind them."""


class Slots:
    """At most `MAX_CALLS` at once; further ones wait for a while."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._running = ByteBudget(MAX_CALLS)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a slot. Raises `Overloaded` if none is free in time."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._wait_s):
                    await stack.enter_async_context(self._running.hold(1))
            except TimeoutError as error:
                message = f"{self._running.held} such calls run, and none ended in {self._wait_s} s"
                raise Overloaded(message) from error
            yield
