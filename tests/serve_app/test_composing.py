"""Which images make a batch: whoever waits longest does not starve, limits hold, graphs are met."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from encoders.config import EncoderConfig
from encoders.graph_keys import GraphMode, Planner
from encoders.graph_stats import Digest
from encoders.packing import Call, Output, PackedLayout, num_patches
from serve_app.composing import USUAL_GAIN, choose
from serve_app.service import Wanted
from serve_app.waiting import BatchLimits, Waiting, WaitingImages

CONFIG = EncoderConfig.load("dinov2-demo")
PREFIX = 1
NEVER = float("inf")
SIZES = [4, 6, 9, 16, 25, 100]


@pytest.fixture(autouse=True)
async def loop() -> asyncio.AbstractEventLoop:
    """What the futures of waiting images need."""
    return asyncio.get_running_loop()


def call(*patches: int, output: Output = "pooled") -> Call:
    return Call(PackedLayout.of([(1, 1, count) for count in patches], PREFIX), output)


def digest_of(
    *calls: Call, mode: GraphMode = "exact", max_images: int = 64, gains_below: float = NEVER
) -> Digest:
    """What an encoder says that was asked for these, and captured the best for each."""
    planner = Planner(mode, 1, 4096, max_images)
    keys = frozenset(planner.plans(asked)[0].key for asked in calls)
    return Digest(planner, keys, gains_below)


def chosen(patches: list[int], digest: Digest, num_overdue: int = 0) -> list[int]:
    return [*choose(patches, num_overdue, "pooled", PREFIX, digest)]


def test_lengths_that_are_there_make_the_batch_and_the_first_of_each_is_taken() -> None:
    assert chosen([4, 9, 6, 9, 4], digest_of(call(4, 9))) == [0, 1]
    assert chosen([4, 9, 6, 9, 4], digest_of(call(6, 4, 4))) == [0, 2, 4]


def test_of_several_graphs_the_one_with_the_most_patches_runs() -> None:
    digest = digest_of(call(4), call(4, 9), call(4, 6), call(4, 9, 9, 9))

    assert chosen([4, 6, 9, 25], digest) == [0, 2]


def test_what_can_be_replayed_as_it_came_is_taken_as_it_came() -> None:
    assert chosen([4, 6, 9], digest_of(call(4, 6), call(9, 6, 4))) == [0, 1, 2]


@pytest.mark.parametrize(
    "digest",
    [
        digest_of(),
        digest_of(call(6), call(6, 9)),  # without the image that waits longest
        digest_of(call(4, 4)),  # of which there is only one
        digest_of(call(4, output="patch")),
        digest_of(call(4), gains_below=19),
        Digest(Planner("off", 1, 64, 8), frozenset(), 0),
    ],
    ids=["no graph", "not the first", "too many", "another output", "no gain", "off"],
)
def test_without_a_graph_that_helps_images_go_as_they_came(digest: Digest) -> None:
    assert chosen([4, 6, 9], digest) == [0, 1, 2]


def test_until_an_encoder_knows_where_graphs_cease_to_gain_a_usual_figure_stands_in() -> None:
    digest = digest_of(call(4))

    assert chosen([4, USUAL_GAIN - 5], digest) == [0]
    assert chosen([4, USUAL_GAIN - 4], digest) == [0, 1]


def test_for_budgets_the_longest_beginning_that_one_holds_is_taken() -> None:
    digest = digest_of(call(100, 25), call(100), mode="budget")

    assert chosen([100, 25, 4, 100], digest) == [0, 1, 2]  # 129 patches are in 125's budget
    assert chosen([100, 100, 4, 100], digest) == [0]


def test_beginnings_that_no_graph_may_have_are_passed_over() -> None:
    digest = digest_of(call(4, 4), mode="budget", max_images=3)

    assert chosen([4] * 9, digest) == [0, 1, 2]


@pytest.mark.parametrize("mode", ["exact", "budget"])
@pytest.mark.parametrize("seed", range(100))
def test_whatever_waits_the_choice_is_the_best_that_holds_what_must_be_in(
    seed: int, mode: GraphMode
) -> None:
    chance = random.Random(seed)
    patches = chance.choices(SIZES, k=chance.randint(1, 9))
    calls = [call(*chance.choices(SIZES, k=chance.randint(1, 4))) for _ in range(9)]
    digest = digest_of(*calls, mode=mode, gains_below=chance.choice([NEVER, 120]))
    overdue = chance.randint(0, len(patches))

    positions = chosen(patches, digest, overdue)

    assert positions == sorted(set(positions))
    assert positions[: max(overdue, 1)] == [*range(max(overdue, 1))]
    taken = [patches[i] for i in positions]
    if len(positions) < len(patches):
        assert digest.replays(call(*taken))
        assert not digest.replays(call(*patches))
        assert sum(patches) < digest.gains_below
    if sum(patches) < digest.gains_below and not digest.replays(call(*patches)):
        best = max(alternatives(patches, max(overdue, 1), digest), default=sum(patches))
        assert sum(taken) == best


def alternatives(patches: list[int], needed: int, digest: Digest) -> Iterator[int]:
    """Patches of every composition that could have been replayed, by trying them all."""
    if digest.planner.mode == "budget":
        subsets = [[*range(count)] for count in range(needed, len(patches))]
    else:
        everyone = range(2 ** len(patches))
        subsets = [[i for i in range(len(patches)) if bits >> i & 1] for bits in everyone]
    for subset in subsets:
        if subset[:needed] == [*range(needed)] and len(subset) < len(patches):
            taken = [patches[i] for i in subset]
            if digest.replays(call(*taken)):
                yield sum(taken)


def waiting(patches: int, since: float, output: Output = "pooled") -> Waiting:
    pixels = np.empty((1, patches, 3), np.uint8)
    return Waiting(f"{since}", pixels, (1, 1, patches), Wanted(output), since=since)


def queue(*images: Waiting, **limits: float) -> WaitingImages:
    queued = WaitingImages(BatchLimits.model_validate(limits), CONFIG)
    for image in images:
        queued.append(image)
    return queued


def sizes(batch: list[Waiting]) -> list[int]:
    return [num_patches(image.grid) for image in batch]


async def test_without_a_digest_images_go_as_they_came() -> None:
    queued = queue(*(waiting(n, 0.1 * n) for n in (4, 6, 9)), max_images=2)

    assert sizes(queued.take(None, 1.0)) == [4, 6]
    assert sizes(queued.take(None, 1.0)) == [9]


async def test_what_is_left_behind_comes_next_and_in_its_order() -> None:
    queued = queue(*(waiting(n, 1.0 + 0.001 * i) for i, n in enumerate([4, 6, 9, 16, 9])))

    batch = queued.take(digest_of(call(4, 9)), 1.01)

    assert sizes(batch) == [4, 9]
    assert sizes(queued.take(None, 1.01)) == [6, 16, 9]


async def test_an_image_that_has_waited_for_the_bound_is_not_left_behind() -> None:
    digest, images = digest_of(call(4)), (waiting(4, 1.0), waiting(6, 1.02))

    assert sizes(queue(*images).take(digest, 1.0699)) == [4]
    assert sizes(queue(*images).take(digest, 1.0701)) == [4, 6]
    assert sizes(queue(*images, prefer_within_ms=0).take(digest, 1.02)) == [4, 6]


async def test_the_kinds_of_output_stay_apart_and_who_left_is_passed_over() -> None:
    gone = waiting(9, 1.001)
    images = [waiting(4, 1.0), gone, waiting(9, 1.002, "patch"), waiting(6, 1.003)]
    queued = queue(*images)
    gone.future.cancel()

    assert sizes(queued.take(digest_of(call(4, 9), call(4)), 1.01)) == [4]
    assert sizes(queued.take(digest_of(call(6, 9)), 1.01)) == [9]
    assert sizes(queued.take(digest_of(call(6, 9)), 1.01)) == [6]


@pytest.mark.parametrize("mode", ["exact", "budget"])
async def test_in_a_long_run_limits_hold_and_nobody_waits_for_more_than_its_turn(
    mode: GraphMode,
) -> None:
    chance, now, number = random.Random(0), 0.0, 0
    limits = {"max_patches": 150, "max_images": 6, "max_bytes": 360}
    queued, answered, cut = queue(**limits), Counter[str](), 0
    hostile = digest_of(*(call(n) for n in SIZES), *(call(n, n) for n in SIZES), mode=mode)
    for _ in range(3000):
        now += 0.02
        for _ in range(chance.choice([0, 1, 2, 3, 5])):
            number += 1
            now += 1e-6
            queued.append(waiting(chance.choice(SIZES), now))
        due = [*queued._queues["pooled"]]
        first_come = queue(*due, **limits).take(None, now)

        batch = queued.take(hostile, now)

        cut += len(batch) < len(first_come)
        answered.update(image.name for image in batch)
        assert batch[:1] == due[:1]
        assert [image for image in first_come if image in batch] == batch
        assert all(image in batch for image in first_come if now - image.since >= 0.05)
        assert sum(sizes(batch)) <= 150
        assert len(batch) <= 6
        assert sum(image.pixels.nbytes for image in batch) <= 360
    while batch := queued.take(hostile, now):
        answered.update(image.name for image in batch)
    assert cut > 300
    assert len(answered) == number
    assert set(answered.values()) == {1}


def test_thousands_of_graphs_for_many_images_need_no_search() -> None:
    chance = random.Random(0)
    patches = [4, *(chance.choices(SIZES, k=62))]
    calls = [call(4, *chance.choices(SIZES, k=chance.randint(30, 60))) for _ in range(3000)]
    digest = digest_of(*calls, gains_below=NEVER)
    start = time.perf_counter()

    choose(patches, 0, "pooled", PREFIX, digest)

    assert time.perf_counter() - start < 1.0, "some 20 ms; to try every subset takes 2 ** 62 steps"
