"""Which of the images whose turn it is make a batch that the encoder can replay. Arithmetic alone.

A graph saves launches. Eager takes 12 to 20 ms on an H200 for any batch under some 4 000 patches,
while the device's own time, and so a replay's, grows with the patches: 3 ms for 1 024, 9 for 4 096.
So what comes may be cut short for a graph, but only below `gains_below` patches. There, replaying
the part and the patches of the rest take the device less time than eager takes for all, and the
rest joins what has come meanwhile, or is replayed itself. From there on the device is busy all the
time, a replay saves nothing, and the rest would be launched on top: first come, first served. Under
load, batches are that large. Where the rest does run alone and eagerly, that is one launch more,
after the wait for one replay.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from encoders.graph_keys import GraphKey
from encoders.graph_stats import Digest
from encoders.packing import Output

USUAL_GAIN = 4096
"""Patches below which graphs gain, until an encoder has found it out."""


def choose(
    patches: Sequence[int], num_overdue: int, output: Output, num_prefix: int, digest: Digest
) -> Sequence[int]:
    """Positions, rising, of the images to take, of such as would make a batch as they came.

    `patches` of each image, first come first; the first is always taken, and the first
    `num_overdue`. If not everything can be replayed, what can of it and has the most patches; if
    nothing, everything. As a part of a batch within the limits, it is too. Steps: graphs x images.
    """
    everyone = range(len(patches))
    total, gains_below = sum(patches), digest.gains_below
    if math.isinf(gains_below):
        gains_below = USUAL_GAIN
    needed = max(num_overdue, 1)
    if total >= gains_below or needed >= len(patches):
        return everyone
    best: Sequence[int] = everyone
    most = 0, [0]
    for chosen in _replayable(patches, needed, output, num_prefix, digest):
        if len(chosen) == len(patches):
            return everyone
        # Of equals, the one with the older images.
        rank = sum(patches[i] for i in chosen), [-i for i in chosen]
        if rank > most:
            best, most = chosen, rank
    return best


def _replayable(
    patches: Sequence[int], needed: int, output: Output, num_prefix: int, digest: Digest
) -> Iterator[Sequence[int]]:
    """Compositions that have a graph and hold the first `needed` images."""
    if digest.planner.mode == "budget":
        yield from _prefixes(patches, needed, output, num_prefix, digest)
    lengths = [num_prefix + count for count in patches]
    for key in digest.keys:
        if key.kind == "exact" and key.output == output:
            chosen = _holding(key, lengths)
            if chosen is not None and chosen[needed - 1 : needed] == [needed - 1]:
                yield chosen


def _prefixes(
    patches: Sequence[int], needed: int, output: Output, num_prefix: int, digest: Digest
) -> Iterator[Sequence[int]]:
    """Beginnings that one of the budgets holds."""
    planner = digest.planner
    totals, longest = accumulate(patches), accumulate(patches, max)
    for images, (total, most) in enumerate(zip(totals, longest, strict=True), start=1):
        if total > planner.max_patches or images > planner.max_images:
            return
        key = planner.budget_key(output, total, images, num_prefix + most, num_prefix)
        if images >= needed and key in digest.keys:
            yield range(images)


def _holding(key: GraphKey, lengths: Sequence[int]) -> list[int] | None:
    """The earliest images that have an exact key's lengths, if all of them are there."""
    if len(key.shape) > len(lengths):
        return None
    missing, chosen = Counter(key.shape), []
    for position, length in enumerate(lengths):
        if missing[length] > 0:
            missing[length] -= 1
            chosen.append(position)
    return chosen if len(chosen) == len(key.shape) else None
