"""The registry on its own: it forgets what nobody asks for, and keeps what somebody does."""

import asyncio
import time

import pytest

from encoders.errors import InvalidRequest, Overloaded
from serve_app.sglang import receivers
from serve_app.sglang.receivers import Known, LocalReceivers
from serve_app.sglang.wire import Frames

FAILED = Frames(b"failed", None)


@pytest.fixture
def registry() -> LocalReceivers:
    return LocalReceivers()


async def test_what_is_delivered_is_forgotten(registry: LocalReceivers) -> None:
    await registry.register("a", 2, "one")
    await registry.register("a", 2, "two")

    known = await registry.registered("a", 60)

    assert known == Known(("one", "two"), 2)
    assert len(registry) == 0


async def test_a_failure_is_kept_until_every_receiver_has_heard_of_it(
    registry: LocalReceivers,
) -> None:
    await registry.register("a", 3, "one")

    known = await registry.fail("a", FAILED)
    late = [await registry.register("a", 3, name) for name in ("two", "two", "three")]

    assert known.receivers == ("one",)
    assert late == [FAILED, None, FAILED]  # the second call was a repetition
    assert len(registry) == 0


async def test_a_failure_before_any_receiver_is_told_to_those_that_come(
    registry: LocalReceivers,
) -> None:
    known = await registry.fail("a", FAILED)

    assert known == Known()
    assert await registry.register("a", 1, "one") == FAILED
    assert len(registry) == 0


async def test_a_new_attempt_is_not_told_of_the_last_ones_failure(registry: LocalReceivers) -> None:
    await registry.fail("a", FAILED)
    waiting = asyncio.create_task(registry.registered("a", 60))
    await asyncio.sleep(0)

    said = await registry.register("a", 1, "one")

    assert said is None
    assert (await waiting).receivers == ("one",)


async def test_old_parts_are_forgotten_and_awaited_ones_are_not(
    registry: LocalReceivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    await registry.register("old", 1, "one")
    await registry.register("awaited", 2, "one")
    monkeypatch.setattr(time, "monotonic", lambda: now + receivers.EXPIRE_S - 1)
    waiting = asyncio.create_task(registry.registered("awaited", 60))
    await asyncio.sleep(0)

    monkeypatch.setattr(time, "monotonic", lambda: now + receivers.EXPIRE_S + 1)
    await registry.register("new", 1, "one")

    assert len(registry) == 2
    await registry.register("awaited", 2, "two")
    monkeypatch.undo()
    assert (await waiting).complete


async def test_a_receiver_that_was_told_of_a_failure_is_not_told_again(
    registry: LocalReceivers,
) -> None:
    await registry.register("a", 2, "one")
    await registry.fail("a", FAILED)

    assert await registry.register("a", 2, "one") is None
    assert await registry.register("a", 2, "two") == FAILED


async def test_a_part_that_a_call_waits_for_is_no_other_calls(registry: LocalReceivers) -> None:
    waiting = asyncio.create_task(registry.registered("a", 60))
    await asyncio.sleep(0)

    with pytest.raises(InvalidRequest, match="'a' is being encoded already"):
        await registry.registered("a", 60)
    with pytest.raises(InvalidRequest, match="'a' is being encoded already"):
        await registry.fail("a", FAILED)

    assert await registry.register("a", 1, "one") is None
    assert await waiting == Known(("one",), 1)


async def test_a_part_whose_call_has_left_may_be_asked_for_again(registry: LocalReceivers) -> None:
    waiting = asyncio.create_task(registry.registered("a", 60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await registry.register("a", 1, "one")

    known = await registry.registered("a", 60)

    assert known == Known(("one",), 1)


async def test_past_the_limit_the_oldest_part_that_nobody_waits_for_is_forgotten(
    registry: LocalReceivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "MAX_PARTS", 3)
    waiting = asyncio.create_task(registry.registered("awaited", 60))
    await asyncio.sleep(0)
    await registry.register("old", 2, "one")
    await registry.register("young", 2, "one")

    await registry.register("new", 2, "one")

    assert len(registry) == 3
    assert (await registry.fail("old", FAILED)).receivers == ()
    await registry.register("awaited", 1, "one")
    assert (await waiting).complete


async def test_the_number_of_parts_that_calls_wait_for_is_bounded(
    registry: LocalReceivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "MAX_PARTS", 2)
    waiting = [asyncio.create_task(registry.registered(x, 60)) for x in "ab"]
    await asyncio.sleep(0)

    with pytest.raises(Overloaded, match="2 parts wait, the limit is 2"):
        await registry.register("c", 1, "one")

    assert await registry.register("b", 1, "one") is None
    assert (await waiting[1]).complete
    waiting[0].cancel()
