"""Which budget a batch is padded to, and that every segment of it fits."""

import random

import pytest

from encoders.graph_keys import Planner
from encoders.packing import Call, PackedLayout

PLANNER = Planner("budget", 2, 16_384, 64)


def shape(*blocks: int) -> tuple[int, ...]:
    """Patches, segments and `max_seqlen` for images of so many merged patches."""
    layout = PackedLayout.of([(1, 2, 2 * count) for count in blocks], 0)
    return PLANNER.budget_plan(Call(layout, "pooled")).key.shape


def test_with_few_slots_or_patches_the_longest_image_makes_no_difference() -> None:
    assert shape(700) == shape(400, 300) == shape(699, 1)
    assert shape(2500) == shape(1250, 1250)
    assert shape(*[30] * 20) == shape(581, *[1] * 19)


def test_with_many_slots_of_a_large_budget_it_does() -> None:
    assert shape(*[100] * 20)[2] == 4096
    assert shape(1500, *[25] * 20)[2] == 8192


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_a_plan_holds_its_batch_and_its_padding(num_prefix: int) -> None:
    chance = random.Random(0)
    for _ in range(500):
        blocks = [chance.randint(1, 400) for _ in range(chance.randint(1, 10))]
        layout = PackedLayout.of([(1, 2, 2 * count) for count in blocks], num_prefix)

        plan = PLANNER.budget_plan(Call(layout, "pooled"))

        patches, segments, max_seqlen = plan.key.shape
        assert plan.layout.num_patches == patches
        assert plan.layout.num_images == segments
        assert max(plan.layout.seqlens) <= max_seqlen == plan.max_seqlen
        assert plan.layout.grid_thw[: layout.num_images] == layout.grid_thw
