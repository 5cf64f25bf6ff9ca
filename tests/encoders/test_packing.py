"""Canonical order, boundaries and the one buffer of a packed batch."""

import pickle
from itertools import permutations

import numpy as np
import pytest

from encoders.packing import GridTHW, PackedBatch, PackedLayout

GRIDS: list[GridTHW] = [(1, 2, 3), (1, 5, 4), (1, 3, 2), (1, 1, 1)]


def test_images_are_packed_longest_first_and_ties_by_arrival() -> None:
    layout = PackedLayout.of(GRIDS, num_prefix=1)

    assert layout.order == (1, 0, 2, 3)
    assert layout.grid_thw == ((1, 5, 4), (1, 2, 3), (1, 3, 2), (1, 1, 1))
    assert layout.cu_seqlens == (0, 21, 28, 35, 37)
    assert layout.seqlens == (21, 7, 7, 2)
    assert layout.max_seqlen == 21
    assert layout.num_rows == 37
    assert layout.num_images == 4


def test_arrival_order_and_transposed_grids_share_their_lengths() -> None:
    keys = {PackedLayout.of(grids, 1).seqlens for grids in permutations(GRIDS)}
    transposed = PackedLayout.of([(t, w, h) for t, h, w in GRIDS], 1).seqlens

    assert keys == {transposed}


def test_other_boundaries_with_an_equal_total_are_other_lengths() -> None:
    one, other = (
        PackedLayout.of([(1, 2, 5), (1, 2, 5)], 1),
        PackedLayout.of([(1, 2, 6), (1, 2, 4)], 1),
    )

    assert one.num_rows == other.num_rows
    assert one.seqlens != other.seqlens


def test_a_layout_without_prefix_counts_patches_alone() -> None:
    assert PackedLayout.of([(2, 3, 4)], num_prefix=0).cu_seqlens == (0, 24)


def test_pixels_lie_in_packed_order_in_one_buffer() -> None:
    small = np.full((2, 3, 3), 1, np.uint8)
    large = np.full((4, 5, 3), 2, np.uint8)

    batch = PackedBatch.of([small, large], [(1, 1, 1), (1, 2, 2)], num_prefix=1)

    assert batch.sizes == ((4, 5), (2, 3))
    np.testing.assert_array_equal(batch.pixels, np.repeat(np.uint8([2, 1]), [60, 18]))


def test_a_batch_crosses_a_process_boundary_with_its_pixels_out_of_band() -> None:
    batch = PackedBatch.of([np.arange(48, dtype=np.uint8).reshape(4, 4, 3)], [(1, 1, 1)], 1)
    buffers: list[pickle.PickleBuffer] = []

    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)

    copy = pickle.loads(data, buffers=buffers)
    assert copy.layout == batch.layout
    np.testing.assert_array_equal(copy.pixels, batch.pixels)
    assert sum(buffer.raw().nbytes for buffer in buffers) == 48


def test_the_packed_pixels_are_a_copy_of_the_callers() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    batch = PackedBatch.of([image], [(1, 1, 1)], 1)

    image[:] = 9

    assert not batch.pixels.any()


@pytest.mark.parametrize("field", ["order", "grid_thw", "cu_seqlens"])
def test_a_layout_is_immutable(field: str) -> None:
    layout = PackedLayout.of(GRIDS, 1)

    with pytest.raises(AttributeError):
        setattr(layout, field, ())
