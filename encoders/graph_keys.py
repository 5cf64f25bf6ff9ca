"""Which graph runs a batch: by its exact layout, or by a budget that it is padded to. Host data."""

from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple

from encoders.packing import Call, Output, PackedLayout

GraphMode = Literal["off", "exact", "budget"]

LADDER_STEP = 1.125
"""Budgets rise by this factor: a batch is padded by an eighth at most, by 6 % on average."""
SMALLEST_BUDGET = 64
FEWEST_SEGMENTS = 8
FEW_SEGMENTS, ROOMY_PATCHES = 16, 4096
"""Up to so many segments, or patches, `max_seqlen` is the whole budget: what that launches in vain
is little, and every class of it would be a graph of its own.
"""
USUAL_PATCHES = 4096
"""Above, a graph hardly gains; budgets up to here are captured before anything was seen."""


class GraphKey(NamedTuple):
    """What a graph is recorded for. Not height and width: those are in its inputs."""

    kind: Literal["exact", "budget"]
    output: Output
    shape: tuple[int, ...]
    """`exact`: rows of each image, longest first. `budget`: patches, segments, max_seqlen."""


class Plan(NamedTuple):
    """A graph that could run a call, and the layout that it would run."""

    key: GraphKey
    layout: PackedLayout
    """The call's own, or with padding after it."""
    max_seqlen: int


class Planner(NamedTuple):
    """Chooses keys, alike in every process that has it."""

    mode: GraphMode
    merge_size: int
    max_patches: int
    max_images: int

    def plans(self, call: Call) -> tuple[Plan, ...]:
        """What could run a call, best first; nothing if it is over the limits."""
        if self.mode == "off" or not self.admits(call.layout):
            return ()
        plans = (self.exact_plan(call),)
        return plans if self.mode == "exact" else (self.budget_plan(call), *plans)

    def plan(self, key: GraphKey, call: Call) -> Plan:
        """The plan of that key's kind."""
        return self.exact_plan(call) if key.kind == "exact" else self.budget_plan(call)

    def exact_plan(self, call: Call) -> Plan:
        """The call as it is."""
        key = GraphKey("exact", call.output, call.layout.seqlens)
        return Plan(key, call.layout, call.layout.max_seqlen)

    def admits(self, layout: PackedLayout) -> bool:
        """Whether a batch is within the limits."""
        return layout.num_patches <= self.max_patches and layout.num_images <= self.max_images

    def budget_plan(self, call: Call) -> Plan:
        """The least budget that holds a call.

        Its padding is one image of its own, and empty segments are images without patches, so that
        every row belongs to a segment and no kernel meets memory that nobody wrote.
        """
        layout = call.layout
        key = self.budget_key(
            call.output, layout.num_patches, layout.num_images, layout.max_seqlen, layout.num_prefix
        )
        patches, segments, max_seqlen = key.shape
        padding = patches - layout.num_patches
        return Plan(key, with_padding(layout, padding, segments, self.merge_size), max_seqlen)

    def budget_key(
        self, output: Output, patches: int, images: int, longest: int, num_prefix: int
    ) -> GraphKey:
        """The least budget that holds an admitted batch, of which `longest` counts rows."""
        budget = next(step for step in self.ladder() if step >= patches)
        padding = budget - patches
        segments = next(n for n in self.segments() if n >= images + (padding > 0))
        if segments <= FEW_SEGMENTS or budget <= ROOMY_PATCHES:
            max_seqlen = num_prefix + budget
        else:
            max_seqlen = ROOMY_PATCHES
            while max_seqlen < max(longest, num_prefix + padding):
                max_seqlen *= 2
        return GraphKey("budget", output, (budget, segments, max_seqlen))

    def witnesses(self, plan: Plan, call: Call) -> list[Call]:
        """Calls that the plan's graph has to get right, in the order in which to try them.

        Of a budget: the fullest and the emptiest batch, of one image, of equal ones, few and many,
        and of a large one among small ones, one after another.
        """
        if plan.key.kind == "exact":
            return [call]
        block, (patches, segments, longest) = self.merge_size**2, plan.key.shape
        below = max((step for step in self.ladder() if step < patches), default=0)
        num_prefix, others = call.layout.num_prefix, list[Call]()
        for total in (patches, below + block):
            most = min(total, longest - num_prefix) // block * block
            splits = [(most, 1), *((total // n // block * block, n) for n in (2, segments - 1))]
            splits.append((most - (segments // 2 - 1) * block, segments // 2))
            for first, images in splits:
                layout = split_evenly(total, first, images, self.merge_size, num_prefix)
                if layout is not None and self.admits(layout):
                    others.append(Call(layout, call.output))
        fitting = [other for other in others if self.budget_plan(other).key == plan.key]
        return [call, *fitting, call]

    def usual_calls(self, num_prefix: int) -> list[Call]:
        """Calls for the budgets that any traffic will need; none for exact layouts."""
        steps = [step for step in self.ladder() if step <= USUAL_PATCHES]
        grids = [(1, self.merge_size, step // self.merge_size) for step in steps]
        layouts = [PackedLayout.of([grid], num_prefix) for grid in grids]
        return [Call(layout, "pooled") for layout in layouts] if self.mode == "budget" else []

    def ladder(self) -> tuple[int, ...]:
        """Budgets in patches, rising; the last is the largest batch that is admitted."""
        return tuple(_ladder(self.merge_size**2, self.max_patches))

    def segments(self) -> Iterator[int]:
        """Numbers of images that graphs are recorded for, padding included."""
        segments = FEWEST_SEGMENTS
        while segments <= self.max_images:
            yield segments
            segments *= 2
        yield segments

    @property
    def most_segments(self) -> int:
        """Images of the widest graph, padding included."""
        return max(self.segments()) if self.mode == "budget" else self.max_images


@cache
def _ladder(block: int, max_patches: int) -> list[int]:
    largest = max(max_patches // block, 1) * block
    steps, step = [], max(SMALLEST_BUDGET // block, 1) * block
    while step < largest:
        steps.append(step)
        step = max(round(step * LADDER_STEP / block), step // block + 1) * block
    return [*steps, largest]


def with_padding(
    layout: PackedLayout, padding: int, segments: int, merge_size: int
) -> PackedLayout:
    """A layout with an image of `padding` patches after it, and empty ones up to `segments`."""
    dummy = ((1, merge_size, padding // merge_size),) if padding else ()
    grids = (*layout.grid_thw, *dummy)
    grids += ((1, 0, 0),) * (segments - len(grids))
    lengths = (layout.num_prefix + rows * columns for _, rows, columns in grids)
    boundaries = tuple(accumulate(lengths, initial=0))
    return PackedLayout(tuple(range(segments)), grids, boundaries, layout.num_prefix)


def split_evenly(
    total: int, first: int, images: int, merge_size: int, num_prefix: int
) -> PackedLayout | None:
    """Images of `total` patches, one of `first` and the others alike; None if there are too few."""
    block = merge_size**2
    blocks, others = (total - first) // block, images - 1
    if first <= 0 or blocks < others or (blocks and not others):
        return None
    sizes = [blocks // others + (i < blocks % others) for i in range(others)]
    grids = [(1, merge_size, n * merge_size) for n in (first // block, *sizes)]
    return PackedLayout.of(grids, num_prefix)
