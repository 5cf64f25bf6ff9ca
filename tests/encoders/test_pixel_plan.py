"""The table of a batch's resizing: what is in it once, what is counted, in how many bits."""

import numpy as np

from encoders.pixel_plan import TILE, Record, plan_pixels
from encoders.resampling import taps


def records(table: np.ndarray, images: int) -> list[Record]:
    """Those of the first kernel, then those of the second."""
    rows = table.view(np.int64)[: 2 * images * len(Record._fields)].reshape(2 * images, -1)
    return [Record(*(int(value) for value in row)) for row in rows]


def test_taps_of_equal_lengths_stand_in_the_table_once() -> None:
    one = plan_pixels([(50, 50)], [(32, 32)], 16, 1)

    many = plan_pixels([(50, 50)] * 9, [(32, 32)] * 9, 16, 1)

    record = 2 * 2 * len(Record._fields)  # int32 of an image's two
    assert len(many.table) - len(one.table) == 8 * record
    _, second = records(one.table, 1)
    found = one.table[second.taps : second.taps + second.length]
    assert (found == taps(50, 32).starts).all()


def test_only_images_that_need_two_passes_have_programs_of_the_first_kernel() -> None:
    sizes, targets = [(32, 32), (32, 50), (50, 50), (50, 32)], [(32, 32)] * 4

    plan = plan_pixels(sizes, targets, 16, 1)

    assert plan.scratch == 50 * 32 * 3
    assert plan.tiles == -(-plan.scratch // TILE)
    assert plan.patches == 16
    firsts = [record.first_program for record in records(plan.table, 4)]
    assert firsts == [0, 0, 0, plan.tiles, 0, 4, 8, 12]


def test_places_beyond_32_bits_are_whole() -> None:
    sizes, targets = [(20_000, 40_000)] * 2, [(16, 16)] * 2

    plan = plan_pixels(sizes, targets, 16, 1)

    assert records(plan.table, 2)[1].source == 2_400_000_000


def test_a_table_is_made_of_whole_records_whatever_the_taps() -> None:
    lengths = {len(plan_pixels([(9, n)], [(16, 16)], 16, 1).table) % 2 for n in range(1, 30)}

    assert lengths == {0}
