"""Calls of one kind are limited, so that those which they wait for always find room."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from encoders.errors import Overloaded
from serve_app.sglang import slots
from serve_app.sglang.slots import Slots


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_CALLS", 2)


async def test_a_call_waits_for_a_slot_and_gets_the_first_that_is_free() -> None:
    calls = Slots(wait_s=60)
    async with AsyncExitStack() as first, calls.one():
        await first.enter_async_context(calls.one())
        third = asyncio.create_task(first_in(calls))
        await asyncio.sleep(0)
        assert not third.done()

        await first.aclose()

        assert await third


async def test_a_call_that_finds_none_in_time_is_refused_and_holds_none() -> None:
    calls = Slots(wait_s=0.01)
    async with calls.one(), calls.one():
        with pytest.raises(Overloaded, match=r"2 such calls run, and none ended in 0.01 s"):
            await first_in(calls)

    async with calls.one(), calls.one():
        pass


async def first_in(calls: Slots) -> bool:
    async with calls.one():
        return True
