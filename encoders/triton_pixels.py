"""A batch's images to patches in two kernels, in Triton, and their launcher.

Their plain twin, whose bits they give, is in `encoders.preprocess`. Portable as
`encoders.triton_kernels` is, and here too the variants that are compiled follow from the model
alone: sizes, places and numbers of taps are read from the batch's table (`encoders.pixel_plan`), in
which a program finds its image's record by its own number.

Not to be captured in a graph: on ROCm, replayed kernels may read single numbers, as most of a
record's are read, from a stale cache (ROCm/hip#3902).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoders.pixel_plan import TILE, Record, Size, plan_pixels
from encoders.resampling import PRECISION_BITS
from encoders.transfer import upload
from encoders.triton_kernels import aligned, launch

SEARCHED = tl.constexpr(128)  # records that a step of the search looks at
BITS = tl.constexpr(PRECISION_BITS)
HALF = tl.constexpr(1 << PRECISION_BITS - 1)
FIELDS = tl.constexpr(len(Record._fields))
(
    FIRST_PROGRAM, SOURCE, ROW_STEP, COLUMN_STEP, TAP_STEP, BY_ROW, BY_COLUMN,
    TAPS, LENGTH, MOST_TAPS, PITCH, TARGET, VALUES, AFTER_FIRST,
) = (tl.constexpr(place) for place in range(len(Record._fields)))  # fmt: skip


@triton.jit
def _own_record(table, images, program):
    """The record of the image that this program works on: the last that begins by then."""
    begun = tl.full((), 0, tl.int32)
    for start in range(0, images, SEARCHED):
        image = start + tl.arange(0, SEARCHED)
        first = tl.load(
            table + image * FIELDS + FIRST_PROGRAM, mask=image < images, other=program + 1
        )
        begun += tl.sum((first <= program).to(tl.int32), axis=0)
    return table + (begun - 1) * FIELDS


@triton.jit
def _resized(source, numbers, record, row, column, channel, inside):
    """Pillow's value of one pass, as int32."""
    index = row * tl.load(record + BY_ROW) + column * tl.load(record + BY_COLUMN)
    length = tl.load(record + LENGTH)
    start = numbers + tl.load(record + TAPS) + index
    weight = start + 2 * length
    count = tl.load(start + length, mask=inside, other=0)
    tap_step = tl.load(record + TAP_STEP)
    place = source + tl.load(record + SOURCE) + channel
    place += row * tl.load(record + ROW_STEP) + column * tl.load(record + COLUMN_STEP)
    place += tl.load(start, mask=inside, other=0) * tap_step
    total = tl.zeros_like(count) + HALF
    for tap in range(tl.load(record + MOST_TAPS).to(tl.int32)):
        wanted = tap < count
        level = tl.load(place, mask=wanted, other=0).to(tl.int32)
        total += level * tl.load(weight, mask=wanted, other=0)
        place += tap_step
        weight += length
    return tl.minimum(tl.maximum(total >> BITS, 0), 255)


@triton.jit(do_not_specialize=["images"])
def _first_pass(pixels, scratch, table, numbers, images, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    record = _own_record(table, images, program)
    begin = (program - tl.load(record + FIRST_PROGRAM)) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    pitch = tl.load(record + PITCH).to(tl.int32)
    # One division in 64 bits for the program, and one in 32, which is cheap, for each value.
    top = begin // pitch
    value = (begin - top * pitch).to(tl.int32) + tl.arange(0, BLOCK)
    column = value % pitch
    inside = place < tl.load(record + VALUES)
    row = top + value // pitch
    level = _resized(pixels, numbers, record, row, column // 3, column % 3, inside)
    tl.store(scratch + tl.load(record + TARGET) + place, level.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["images"])
def _last_pass(
    pixels, scratch, table, numbers, images, levels, patches,
    SIDE: tl.constexpr, MERGE: tl.constexpr, FRAMES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    record = _own_record(table + images * FIELDS, images, program)
    patch = (program - tl.load(record + FIRST_PROGRAM)).to(tl.int32)
    blocks = tl.load(record + PITCH).to(tl.int32)
    block = patch // (MERGE * MERGE)
    inner = patch % (MERGE * MERGE)
    top = (block // blocks * MERGE + inner // MERGE) * SIDE
    left = (block % blocks * MERGE + inner % MERGE) * SIDE
    value = tl.arange(0, BLOCK)
    area = value % (SIDE * SIDE)
    channel = value // (SIDE * SIDE)
    inside = channel < 3
    row = top + area // SIDE
    column = left + area % SIDE
    if tl.load(record + AFTER_FIRST) != 0:
        level = _resized(scratch, numbers, record, row, column, channel, inside)
    else:
        level = _resized(pixels, numbers, record, row, column, channel, inside)
    normalised = tl.load(levels + channel * 256 + level, mask=inside)
    place = patches + program.to(tl.int64) * (3 * FRAMES * SIDE * SIDE)
    place += channel * (FRAMES * SIDE * SIDE) + area
    for frame in tl.static_range(FRAMES):
        tl.store(place + frame * (SIDE * SIDE), normalised, mask=inside)


def patches_of(
    pixels: Tensor, sizes: Sequence[Size], targets: Sequence[Size], levels_3V: Tensor,
    *, patch_size: int, merge_size: int, frames: int,
) -> Tensor:  # fmt: skip
    """Launch: flat pixels of images of `sizes`, resized to `targets` -> patches [P, C]."""
    pixels = aligned(pixels)
    plan = plan_pixels(sizes, targets, patch_size, merge_size)
    numbers = upload(torch.from_numpy(plan.table), pixels.device)
    scratch = torch.empty(max(plan.scratch, 1), dtype=torch.uint8, device=pixels.device)
    patches_PC = levels_3V.new_empty(plan.patches, 3 * frames * patch_size**2)
    # The same memory as two types: records are of 64 bits, taps of 32.
    read = (pixels, scratch, numbers.view(torch.int64), numbers, len(sizes))
    if plan.tiles:
        launch(_first_pass, plan.tiles, *read, BLOCK=TILE, num_warps=4)
    constants: dict[str, Any] = {"SIDE": patch_size, "MERGE": merge_size, "FRAMES": frames}
    constants |= {"BLOCK": triton.next_power_of_2(3 * patch_size**2), "num_warps": 4}
    launch(_last_pass, plan.patches, *read, levels_3V, patches_PC, **constants)
    return patches_PC
