"""The registry's actor: it is replaced, answers in time or not at all, and goes when unused."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from encoders.errors import InvalidRequest, Overloaded, ReplicaLost
from serve_app.sglang.receivers import Known
from serve_app.sglang.shared import SharedReceivers, app_ends
from serve_app.sglang.wire import Frames
from tests.conditions import until

FAILED = Frames(b"failed", None)
NUMBERS = count()


@pytest.fixture
def app(served: str) -> str:
    return f"registry-{next(NUMBERS)}"


@pytest.fixture
def shared(app: str) -> Iterator[SharedReceivers]:
    made = SharedReceivers(app)
    ray.get(made._actor.answers.remote())  # its process has started
    yield made
    ray.kill(made._actor)


def exists(app: str) -> bool:
    actors: list[dict[str, Any]] = ray.util.list_named_actors(all_namespaces=True)
    return f"sglang_receivers:{app}" in {x["name"] for x in actors}


async def pid(shared: SharedReceivers) -> int:
    found: int = await shared._actor.__ray_call__.remote(lambda _: os.getpid())
    return found


async def test_replicas_share_what_was_registered(shared: SharedReceivers, app: str) -> None:
    await shared.register("a", 1, "one")

    known = await SharedReceivers(app).registered("a", 60)

    assert known == Known(("one",), 1)


async def test_an_actor_that_is_gone_is_replaced(shared: SharedReceivers) -> None:
    for call in (
        lambda: shared.register("a", 1, "one"),
        lambda: shared.fail("b", FAILED),
        lambda: shared.registered("c", 0.1),
    ):
        await shared.register("x", 1, "one")
        ray.kill(shared._actor)
        with suppress(RayActorError):  # `kill` returns before it is dead
            while True:
                await shared._actor.answers.remote()

        while True:  # a new process may take longer than a call
            with suppress(Overloaded):
                assert await call() in (None, Known())
                break


async def test_a_part_that_is_waited_for_is_refused_when_the_actor_goes(
    shared: SharedReceivers,
) -> None:
    waiting = asyncio.create_task(shared.registered("a", 60))
    await asyncio.sleep(1)
    with pytest.raises(InvalidRequest, match="'a' is being encoded already"):
        await shared.fail("a", FAILED)
    start = time.monotonic()

    ray.kill(shared._actor)

    with pytest.raises(ReplicaLost):
        await waiting
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("call", "arguments"),
    [("register", (1, "one")), ("registered", (60,)), ("fail", (FAILED,))],
    ids=lambda x: x if isinstance(x, str) else "",
)
async def test_an_actor_that_hangs_is_a_refusal_in_time(
    shared: SharedReceivers, call: str, arguments: tuple[Any, ...]
) -> None:
    process = await pid(shared)
    start = time.monotonic()

    os.kill(process, signal.SIGSTOP)

    try:
        with pytest.raises(Overloaded, match="does not answer"):
            await getattr(shared, call)("a", *arguments)
    finally:
        os.kill(process, signal.SIGCONT)
    assert time.monotonic() - start < 5


async def test_the_actor_stays_while_a_part_is_waited_for_and_then_goes(
    shared: SharedReceivers, app: str
) -> None:
    other = SharedReceivers(app)
    waiting = asyncio.create_task(other.registered("a", 60))
    await shared.register("b", 1, "one")
    await asyncio.sleep(0.3)

    await shared.close()

    await asyncio.sleep(0.5)
    await other.register("a", 1, "one")
    assert await waiting == Known(("one",), 1)
    await other.registered("b", 60)
    assert exists(app)
    await other.close()
    await until(lambda: not exists(app))


async def test_an_application_that_ray_does_not_know_is_not_being_deleted(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.sglang.shared._app_name", lambda: "unknown")

    assert not await app_ends()
