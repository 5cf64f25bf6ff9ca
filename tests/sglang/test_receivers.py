"""The registry on its own: it forgets what nobody asks for, and keeps what somebody does."""

import asyncio
import time

import pytest

from encoders.errors import Overloaded
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
    assert late == [FAILED] * 3
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


async def test_the_number_of_parts_is_bounded(
    registry: LocalReceivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "MAX_PARTS", 2)
    await registry.register("a", 1, "one")
    await registry.register("b", 1, "one")

    with pytest.raises(Overloaded, match="2 parts wait, the limit is 2"):
        await registry.register("c", 1, "one")

    assert await registry.register("b", 1, "one") is None
