"""Device memory at fixed addresses, which every captured graph reads its inputs from.

Shapes: P = patches, C = values of a patch, N = images, R = rows of a result.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from encoders.attention import AttentionLayout
from encoders.forward import Forward
from encoders.graph_keys import Plan, Planner
from encoders.packing import Output, PackedLayout
from encoders.transfer import refill, write


class Place(NamedTuple):
    """The start of each slab, cut to one key's size."""

    patches_PC: Tensor
    inputs: Any
    """The tower's own NamedTuple."""
    attention: AttentionLayout
    staged_N: Tensor | None
    """int32 [N + 1]: where the boundaries of a budget's next batch are put."""


class Arena:
    """One slab for each tensor that a forward takes or gives, sized for the largest key.

    Layouts lie at the start of the same slabs, so a further graph needs no memory for them, and
    one replay overwrites what the last one left: what is to be kept is copied out before.
    """

    def __init__(self, forward: Forward, planner: Planner) -> None:
        self._forward = forward
        tower, device = forward.tower, forward.device
        layout = widest_layout(planner, tower.num_prefix)
        width = 3 * tower.frames * tower.patch_size**2
        # Values like those of real patches, since graphs are compared with eager on what is here.
        self._patches = torch.randn(layout.num_patches, width, device=device, dtype=forward.dtype)
        self._inputs = [torch.zeros_like(slab, device=device) for slab in tower.inputs(layout)]
        self._boundaries = torch.zeros(layout.num_images + 1, dtype=torch.int32, device=device)
        self._staged = torch.zeros_like(self._boundaries)
        self._rows: dict[Output, Tensor] = {}
        self._num_rows = {"pooled": layout.num_images, "patch": sum(tower.row_counts(layout))}

    def place(self, plan: Plan) -> Place:
        """Where a key's batches lie; the layout is filled in, patches are what was there before."""
        layout = plan.layout
        host = self._forward.tower.inputs(layout)
        inputs = host._make(
            slab[: len(values)] for slab, values in zip(self._inputs, host, strict=True)
        )
        patches_PC = self._patches[: layout.num_patches]
        if plan.key.kind == "exact":
            # Constant for a graph's life, and not in its pool, where other graphs would write.
            place = Place(patches_PC, inputs, self._forward.attention(layout), None)
        else:
            boundaries, staged = (
                slab[: layout.num_images + 1] for slab in (self._boundaries, self._staged)
            )
            place = Place(patches_PC, inputs, [boundaries, plan.max_seqlen], staged)
        self.fill_layout(place, layout)
        return place

    def vary_patches(self, place: Place) -> None:
        """Other values where patches lie: none that are not finite, nor a padding's zeros."""
        place.patches_PC.normal_()

    def fill(self, place: Place, patches_PC: Tensor, layout: PackedLayout) -> None:
        """Put a batch of that place's key where its graph reads it, and zeros in its padding."""
        refill(place.patches_PC[: len(patches_PC)], patches_PC)
        # Some attention kernels load rows past an image's end, and weigh them by zero: a NaN that
        # an earlier batch left there would become the image's.
        place.patches_PC[len(patches_PC) :].zero_()
        self.fill_layout(place, layout)

    def fill_layout(self, place: Place, layout: PackedLayout) -> None:
        """Put a layout's taps, rotations and boundaries in its place."""
        for view, values in zip(place.inputs, self._forward.tower.inputs(layout), strict=True):
            refill(view, values)
        if place.staged_N is not None:
            refill(place.staged_N, torch.tensor(layout.cu_seqlens, dtype=torch.int32))

    def forward(self, place: Place, output: Output) -> Tensor:
        """The tower on a place, eagerly or under capture."""
        boundaries, _ = place.attention
        if place.staged_N is not None and isinstance(boundaries, Tensor):
            # By a kernel of the graph itself: the attention kernels read them as scalars.
            write(boundaries, place.staged_N)
        return self._forward.tower(place.patches_PC, place.inputs, place.attention, output)

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
        slabs = (self._patches, *self._inputs, self._boundaries, self._staged)
        return sum(slab.nbytes for slab in (*slabs, *self._rows.values()))


def widest_layout(planner: Planner, num_prefix: int) -> PackedLayout:
    """As many images and patches as a graph may have: no tensor of another layout is longer."""
    merge = planner.merge_size
    blocks = planner.ladder()[-1] // merge**2
    images = min(planner.most_segments, blocks)
    grids = [(1, merge, merge)] * (images - 1)
    last = (1, merge, merge * (blocks - images + 1))
    empty = [(1, 0, 0)] * (planner.most_segments - images)
    return PackedLayout.of([*grids, last, *empty], num_prefix)
