"""The byte budget: strict order of arrival, and what a caller that leaves gives back."""

import asyncio
import random
from collections.abc import Callable

import pytest

from serve_app.budget import ByteBudget


class Holder:
    """A caller that holds bytes from its turn until `leave` is set."""

    def __init__(self, budget: ByteBudget, num_bytes: int, log: list[int] | None = None) -> None:
        self.num_bytes = num_bytes
        self.holds = asyncio.Event()
        self.leave = asyncio.Event()
        self.log = log
        self.task = asyncio.create_task(self._run(budget))

    async def _run(self, budget: ByteBudget) -> None:
        async with budget.hold(self.num_bytes):
            if self.log is not None:
                self.log.append(self.num_bytes)
            self.holds.set()
            await self.leave.wait()

    async def gone(self) -> None:
        self.leave.set()
        await self.task

    async def cancel(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def settled() -> None:
    """Let every task that can run do so: none of them waits for anything but the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


async def started(make: Callable[[], Holder]) -> Holder:
    holder = make()
    await settled()
    return holder


async def test_bytes_are_held_inside_the_block_and_given_back_on_exit() -> None:
    budget = ByteBudget(10)

    async with budget.hold(10):
        held_inside = budget.held

    assert held_inside == 10
    assert budget.held == 0


async def test_an_exception_inside_the_block_gives_the_bytes_back() -> None:
    budget = ByteBudget(10)

    with pytest.raises(RuntimeError, match="mine"):
        async with budget.hold(10):
            raise RuntimeError("mine")

    assert budget.held == 0


async def test_what_fits_exactly_is_held_at_once_and_one_byte_more_waits() -> None:
    budget = ByteBudget(10)
    first = await started(lambda: Holder(budget, 9))

    exact = await started(lambda: Holder(budget, 1))
    more = await started(lambda: Holder(budget, 1))

    assert first.holds.is_set()
    assert exact.holds.is_set()
    assert not more.holds.is_set()
    for holder in (first, exact, more):
        await holder.gone()


async def test_a_small_one_that_would_fit_does_not_overtake_a_big_one() -> None:
    budget, log = ByteBudget(10), list[int]()
    first = await started(lambda: Holder(budget, 6, log))
    big = await started(lambda: Holder(budget, 10, log))
    small = await started(lambda: Holder(budget, 1, log))
    before = list(log)

    await first.gone()
    await settled()

    assert before == [6]
    assert log == [6, 10]
    await big.gone()
    await small.gone()
    assert log == [6, 10, 1]


async def test_one_release_lets_in_as_many_as_fit_in_their_order() -> None:
    budget, log = ByteBudget(10), list[int]()
    first = await started(lambda: Holder(budget, 10, log))
    rest = [await started(lambda n=n: Holder(budget, n, log)) for n in (3, 4, 2, 5)]

    await first.gone()
    await settled()

    assert log == [10, 3, 4, 2]
    assert budget.held == 9
    for holder in rest:
        await holder.gone()
    assert budget.held == 0


async def test_the_first_in_line_that_is_cancelled_passes_the_turn_on_at_once() -> None:
    budget = ByteBudget(10)
    first = await started(lambda: Holder(budget, 6))
    big = await started(lambda: Holder(budget, 10))
    small = await started(lambda: Holder(budget, 4))

    await big.cancel()
    await settled()

    assert small.holds.is_set()
    assert budget.held == 10
    await first.gone()
    await small.gone()
    assert budget.held == 0


async def test_one_cancelled_in_the_middle_of_the_line_is_passed_over() -> None:
    budget, log = ByteBudget(10), list[int]()
    first = await started(lambda: Holder(budget, 10, log))
    second = await started(lambda: Holder(budget, 5, log))
    middle = await started(lambda: Holder(budget, 9, log))
    last = await started(lambda: Holder(budget, 4, log))

    await middle.cancel()
    await first.gone()
    await settled()

    assert log == [10, 5, 4]
    assert budget.held == 9
    await second.gone()
    await last.gone()
    assert budget.held == 0


async def test_one_cancelled_while_it_holds_frees_its_bytes_for_the_next() -> None:
    budget = ByteBudget(10)
    first = await started(lambda: Holder(budget, 10))
    second = await started(lambda: Holder(budget, 7))

    await first.cancel()
    await settled()

    assert second.holds.is_set()
    assert budget.held == 7
    await second.gone()


async def test_one_cancelled_between_its_turn_and_its_first_step_frees_its_bytes() -> None:
    budget = ByteBudget(10)
    async with budget.hold(10):
        second = await started(lambda: Holder(budget, 10))
        third = await started(lambda: Holder(budget, 10))
    second_has_its_turn = budget.held == 10  # and no task has run since

    second.task.cancel()
    await settled()

    assert second_has_its_turn
    assert not second.holds.is_set()
    assert third.holds.is_set()
    await third.gone()
    assert budget.held == 0


@pytest.mark.parametrize("seed", range(20))
async def test_a_random_walk_never_exceeds_the_limit_and_never_breaks_the_order(seed: int) -> None:
    choose, limit = random.Random(seed), 20
    budget = ByteBudget(limit)
    waiting, holding = list[Holder](), list[Holder]()
    for _ in range(200):
        match choose.choice(("come", "come", "leave", "cancel waiting", "cancel holding")):
            case "come":
                waiting.append(Holder(budget, choose.randint(0, limit)))
            case "leave" if holding:
                await holding.pop(choose.randrange(len(holding))).gone()
            case "cancel waiting" if waiting:
                await waiting.pop(choose.randrange(len(waiting))).cancel()
            case "cancel holding" if holding:
                await holding.pop(choose.randrange(len(holding))).cancel()

        await settled()

        count = next((i for i, x in enumerate(waiting) if not x.holds.is_set()), len(waiting))
        holding += waiting[:count]
        del waiting[:count]
        assert budget.held == sum(holder.num_bytes for holder in holding) <= limit
        assert not any(holder.holds.is_set() for holder in waiting), "someone was overtaken"
        if waiting:
            assert budget.held + waiting[0].num_bytes > limit, "the first waits without need"
    for holder in [*holding, *waiting]:
        await holder.cancel()
    assert budget.held == 0
