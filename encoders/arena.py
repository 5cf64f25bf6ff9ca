"""Device memory at fixed addresses, which every captured graph reads its inputs from.

Shapes: P = patches, C = values of a patch, N = images, R = rows of a result.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from encoders.attention import AttentionLayout
from encoders.config import GraphSettings
from encoders.forward import Forward
from encoders.packing import PackedLayout, num_patches
from encoders.towers import Output
from encoders.transfer import refill


class Place(NamedTuple):
    """The start of each slab, cut to one layout's size; `attention` is this layout's own."""

    patches_PC: Tensor
    inputs: Any
    """The tower's own NamedTuple."""
    attention: AttentionLayout


class Arena:
    """One slab for each tensor that a forward takes or gives, sized for the largest layout.

    Layouts lie at the start of the same slabs, so a further graph needs no memory for them, and
    one replay overwrites what the last one left: what is to be kept is copied out before.
    """

    def __init__(self, forward: Forward, settings: GraphSettings, dtype: torch.dtype) -> None:
        self._forward = forward
        self._settings = settings
        tower, device = forward.tower, forward.device
        layout = widest_layout(settings, tower.merge_size, tower.num_prefix)
        width = 3 * tower.frames * tower.patch_size**2
        # Values like those of real patches, since graphs are compared with eager on what is here.
        self._patches = torch.randn(total_patches(layout), width, device=device, dtype=dtype)
        self._inputs = [torch.zeros_like(slab, device=device) for slab in tower.inputs(layout)]
        self._rows: dict[Output, Tensor] = {}
        self._num_rows = {"pooled": layout.num_images, "patch": sum(tower.row_counts(layout))}

    def admits(self, layout: PackedLayout) -> bool:
        """Whether the slabs are large enough for a layout."""
        fits = total_patches(layout) <= self._settings.max_patches
        return fits and layout.num_images <= self._settings.max_images

    def place(self, layout: PackedLayout) -> Place:
        """Where a layout lies; its inputs are filled in, its patches are what was there before."""
        host = self._forward.tower.inputs(layout)
        inputs = host._make(
            slab[: len(values)] for slab, values in zip(self._inputs, host, strict=True)
        )
        # The boundaries are constant for a graph's life, and not in its pool, where other graphs
        # would write.
        attention = self._forward.attention(layout)
        place = Place(self._patches[: total_patches(layout)], inputs, attention)
        self.fill_inputs(place, layout)
        return place

    def fill(self, place: Place, patches_PC: Tensor, layout: PackedLayout) -> None:
        """Put a batch of that place's key where its graph reads it."""
        refill(place.patches_PC, patches_PC)
        self.fill_inputs(place, layout)

    def fill_inputs(self, place: Place, layout: PackedLayout) -> None:
        """Put a layout's taps, rotations and boundaries in its place."""
        for view, values in zip(place.inputs, self._forward.tower.inputs(layout), strict=True):
            refill(view, values)

    def rows(self, output: Output, like_RD: Tensor) -> Tensor:
        """Where a result of this kind and shape goes. The first of a kind brings its slab."""
        if output not in self._rows:
            shape = (self._num_rows[output], like_RD.shape[1])
            self._rows[output] = like_RD.new_empty(shape)
        return self._rows[output][: len(like_RD)]

    def poison(self) -> None:
        """NaN in every slab of floats. Whole numbers stay: as indices they have to be valid."""
        for slab in (self._patches, *self._inputs, *self._rows.values()):
            if slab.is_floating_point():
                slab.fill_(torch.nan)

    @property
    def nbytes(self) -> int:
        """Device memory of all slabs."""
        return sum(slab.nbytes for slab in (self._patches, *self._inputs, *self._rows.values()))


def total_patches(layout: PackedLayout) -> int:
    """Patches of a batch."""
    return sum(num_patches(grid) for grid in layout.grid_thw)


def widest_layout(settings: GraphSettings, merge_size: int, num_prefix: int) -> PackedLayout:
    """As many images and patches as are admitted: no tensor of another layout is longer."""
    block = merge_size**2
    blocks = max(settings.max_patches // block, 1)
    images = min(settings.max_images, blocks)
    grids = [(1, merge_size, merge_size)] * (images - 1)
    last = (1, merge_size, merge_size * (blocks - images + 1))
    return PackedLayout.of([*grids, last], num_prefix)
