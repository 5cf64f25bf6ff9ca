"""Plans: which budget holds a batch, and what it is padded with."""

import random
from itertools import pairwise

import pytest

from encoders.arena import widest_layout
from encoders.graph_keys import LADDER_STEP, SMALLEST_BUDGET, Planner
from encoders.packing import Call, PackedLayout

PLANNERS = [Planner("budget", 2, 16_384, 64), Planner("budget", 1, 1_000, 8)]
each_planner = pytest.mark.parametrize("planner", PLANNERS, ids=["merge 2", "merge 1"])


def calls(planner: Planner, count: int = 500) -> list[Call]:
    """Batches of all admitted sizes."""
    rng, merge, found = random.Random(0), planner.merge_size, list[Call]()
    while len(found) < count:
        images = rng.randint(1, planner.max_images)
        most = max(int((planner.max_patches / images) ** 0.5) // merge, 1)
        grids = [
            (1, merge * rng.randint(1, most), merge * rng.randint(1, most)) for _ in range(images)
        ]
        call = Call(PackedLayout.of(grids, rng.randint(0, 1)), rng.choice(["pooled", "patch"]))
        if planner.admits(call.layout):
            found.append(call)
    return found


@each_planner
def test_the_ladder_rises_by_an_eighth_in_whole_merge_blocks(planner: Planner) -> None:
    ladder, block = planner.ladder(), planner.merge_size**2

    assert all(step % block == 0 for step in ladder)
    assert all(a < b <= a * LADDER_STEP + block for a, b in pairwise(ladder))
    assert ladder[0] == SMALLEST_BUDGET
    assert ladder[-1] == planner.max_patches


@each_planner
def test_padding_is_images_of_its_own_and_every_row_has_a_segment(planner: Planner) -> None:
    for call in calls(planner):
        key, layout, max_seqlen = planner.budget_plan(call)
        patches, segments, longest = key.shape

        assert layout.grid_thw[: call.layout.num_images] == call.layout.grid_thw
        assert (layout.num_patches, layout.num_images, max_seqlen) == (patches, segments, longest)
        assert list(layout.cu_seqlens) == sorted(layout.cu_seqlens)
        assert layout.cu_seqlens[0] == 0
        assert layout.cu_seqlens[-1] == patches + segments * layout.num_prefix
        assert max(layout.seqlens) <= max_seqlen


@each_planner
def test_witnesses_share_the_plans_key_and_differ_in_layout(planner: Planner) -> None:
    for call in calls(planner, 100):
        plan = planner.budget_plan(call)

        witnesses = planner.witnesses(plan, call)

        assert {planner.budget_plan(witness).key for witness in witnesses} == {plan.key}
        assert witnesses[0] == witnesses[-1] == call
        assert len({witness.layout.cu_seqlens for witness in witnesses}) > 1


@each_planner
def test_no_plan_is_wider_than_the_arena(planner: Planner) -> None:
    widest = widest_layout(planner, 1)

    for call in calls(planner):
        layout = planner.budget_plan(call).layout
        assert layout.num_patches <= widest.num_patches
        assert layout.num_images <= widest.num_images


def test_exact_plans_are_the_layout_itself_and_off_plans_nothing() -> None:
    call = Call(PackedLayout.of([(1, 4, 4), (1, 2, 2)], 0), "pooled")

    (plan,) = Planner("exact", 2, 64, 4).plans(call)

    assert plan.layout is call.layout
    assert plan.key.shape == (16, 4)
    assert Planner("off", 2, 64, 4).plans(call) == ()
    assert Planner("exact", 2, 16, 4).plans(call) == ()
    assert Planner("exact", 2, 64, 1).plans(call) == ()
    assert [p.key.kind for p in Planner("budget", 2, 64, 4).plans(call)] == ["budget", "exact"]
