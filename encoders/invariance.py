"""From which size on an image's bits are its own, whoever shares its batch: found by trying."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from encoders.errors import ConfigError
from encoders.forward import Forward
from encoders.packing import Call, GridTHW, Output, PackedLayout, num_patches
from encoders.transfer import same_bits

logger = logging.getLogger(__name__)

SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""Merged patches along a side of the images that are tried."""
OUTPUTS: tuple[Output, ...] = ("pooled", "patch")


@torch.inference_mode()
def verified_floor(forward: Forward, max_patches: int, max_images: int) -> int:
    """Least patches from which on no tried image's bits depended on its company.

    A matrix product may be computed in another order for another number of rows. So each image is
    run alone and in company, small and large, before it and after it; from the largest down, to the
    first that differs. Waits for the device. Raises `ConfigError` if there is no such size.
    """
    tower, floor = forward.tower, None
    width = 3 * tower.frames * tower.patch_size**2
    patches_PC = torch.randn(max_patches, width, device=forward.device, dtype=forward.dtype)
    for grid in reversed([(1, s * tower.merge_size, s * tower.merge_size) for s in SIDES]):
        if num_patches(grid) > largest_shared(max_patches):
            continue
        if not _own(forward, patches_PC, grid, max_images):
            break
        floor = num_patches(grid)
    if floor is None:
        raise ConfigError(
            "precision: invariant is not offered here: the bits of the largest image that was "
            "tried depend on its company in the batch"
        )
    logger.info("from %d patches on, an image's bits do not depend on its company", floor)
    return floor


def largest_shared(max_patches: int) -> int:
    """Patches of the largest image that shares batches: what exceeds it was never tried."""
    return max_patches // 2


def _own(forward: Forward, patches_PC: Tensor, grid: GridTHW, max_images: int) -> bool:
    for company in companies(grid, forward.tower.merge_size, len(patches_PC), max_images):
        if not all(_alike(forward, patches_PC, grid, company, kind) for kind in OUTPUTS):
            logger.info("%s differs in the company of %s", grid, company)
            return False
    return True


def companies(
    grid: GridTHW, merge_size: int, max_patches: int, max_images: int
) -> Iterator[list[GridTHW]]:
    """Images to share a batch with: none of one's size, one, many; up to the largest batch."""
    smallest = (1, merge_size, merge_size)
    yield [smallest]
    yield [grid]
    room = (max_patches - num_patches(grid)) // num_patches(smallest)
    for images in (min(7, room), min(max_images - 1, room)):
        yield [smallest] * images
    for blocks in (room // 16, room // 4, room):
        if blocks:
            yield [(1, merge_size, merge_size * blocks)]
            yield [(1, merge_size, merge_size * (blocks - blocks // 2)), smallest]


def _alike(
    forward: Forward, patches_PC: Tensor, grid: GridTHW, company: list[GridTHW], output: Output
) -> bool:
    prefix = forward.tower.num_prefix
    alone = Call(PackedLayout.of([grid], prefix), output)
    together = Call(PackedLayout.of([grid, *company], prefix), output)
    place = together.layout.order.index(0)
    before = sum(map(num_patches, together.layout.grid_thw[:place]))
    own_PC = patches_PC[before : before + num_patches(grid)]
    alone_RD = forward.eager(own_PC, alone)
    together_RD = forward.eager(patches_PC[: together.layout.num_patches], together)
    counts = [1] * together.layout.num_images
    if output == "patch":
        counts = list(forward.tower.row_counts(together.layout))
    return same_bits(alone_RD, torch.split(together_RD, counts)[place])


def parts(
    layout: PackedLayout, floor: int, max_patches: int, max_images: int
) -> list[PackedLayout]:
    """A batch cut so that no image's bits depend on another.

    Images from the floor up to `largest_shared` share batches as large as were tried; all others
    run alone.
    """
    groups, room = list[list[GridTHW]](), 0
    for grid in layout.grid_thw:
        patches = num_patches(grid)
        shares = floor <= patches <= largest_shared(max_patches)
        if shares and patches <= room and len(groups[-1]) < max_images:
            groups[-1].append(grid)
            room -= patches
        else:
            groups.append([grid])
            room = max_patches - patches if shares else 0
    return [PackedLayout.of(group, layout.num_prefix) for group in groups]
