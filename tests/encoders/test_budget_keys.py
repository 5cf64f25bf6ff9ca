"""Which budget a batch is padded to, and that every segment of it fits."""

import random

import pytest

from encoders.graph_keys import Call, Planner
from encoders.packing import PackedLayout

PLANNER = Planner("budget", 2, 16_384, 64)


def shape(*blocks: int) -> tuple[int, ...]:
    """Patches, slots and `max_seqlen` for images of so many merged patches."""
    layout = PackedLayout.of([(1, 2, 2 * count) for count in blocks], 0)
    return PLANNER.budget_plan(Call(layout, "pooled")).key.shape


def test_in_small_budgets_the_longest_image_makes_no_difference() -> None:
    assert shape(700) == shape(400, 300) == shape(699, 1)
    assert shape(700)[2] == 4096
    assert shape(16)[2] == 256


def test_in_large_budgets_a_long_image_has_its_own() -> None:
    assert shape(500, 500, 500, 500, 500)[2] == 4096
    assert shape(2500)[2] == 16_384
    assert shape(2048, 452)[2] == 8192


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_a_plan_holds_its_batch_and_its_padding(num_prefix: int) -> None:
    chance = random.Random(0)
    for _ in range(500):
        blocks = [chance.randint(1, 400) for _ in range(chance.randint(1, 10))]
        layout = PackedLayout.of([(1, 2, 2 * count) for count in blocks], num_prefix)

        plan = PLANNER.budget_plan(Call(layout, "pooled"))

        patches, slots, max_seqlen = plan.key.shape
        assert plan.layout.num_patches == patches
        assert plan.layout.num_images == slots
        assert max(plan.layout.seqlens) <= max_seqlen == plan.max_seqlen
        assert plan.layout.grid_thw[: layout.num_images] == layout.grid_thw
