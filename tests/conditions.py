"""Waiting for what really happens, never for a time."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop and the threads go on until the condition holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (of a thread's work there is no event)
            await asyncio.sleep(0)
