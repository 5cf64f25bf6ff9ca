"""What a graph runner tells of itself: one plain record of what it did, one of what it can do."""

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from encoders.graph_keys import GraphKey, Planner
from encoders.packing import Call

Miss = Literal["off", "backend", "too_large", "unseen", "queued", "no_gain", "failed", "disabled"]
"""Why a batch ran eagerly: graphs are off; the attention backend cannot be captured; the batch is
over `max_patches` or `max_images`; its key has not been admitted yet; its capture is due; a graph
would not be faster; its capture failed or gave other bits; too many captures in a row failed."""


@dataclass(slots=True, kw_only=True)
class GraphStats:
    """Counts since start, sizes now."""

    precision: str = "exact"
    """What is promised of bits: `GraphSettings.precision`."""
    invariant_from: int | None = None
    """With `invariant`, the patches from which on images share batches; smaller ones run alone."""
    hits: int = 0
    """Batches that were replayed."""
    misses: dict[Miss, int] = field(default_factory=dict)
    """Batches that ran eagerly, by reason."""
    captures: int = 0
    capture_ms: float = 0.0
    """Of all captures together; what tries them before and after is not in it."""
    longest_capture_ms: float = 0.0
    failures: int = 0
    """Captures that were killed, or refused by the runtime."""
    failures_in_a_row: int = 0
    short_of_memory: int = 0
    """Captures not begun because of the free-memory floor."""
    mismatches: int = 0
    """Graphs of which a replay on trial was not eager's to the bit; none of them was used."""
    no_gain: int = 0
    """Graphs that were not faster than eager, and not kept."""
    shadow_checks: int = 0
    """Replays that were compared with an eager run."""
    shadow_mismatches: int = 0
    """Of these, such as differed: their graphs are gone, eager's answer was given."""
    evictions: int = 0
    rebuilds: int = 0
    """Times that all graphs and their pool were given up, the hottest to be captured anew."""
    graphs: int = 0
    """Graphs that can be replayed now."""
    on_trial: int = 0
    """Graphs that are recorded, and not yet compared with eager in every way."""
    retired: int = 0
    """Evicted graphs whose memory waits for a rebuild."""
    arena_bytes: int = 0
    graph_pool_bytes: int = 0
    graph_bytes: int = 0
    """Device memory that the graphs took when they were captured, the pool's growth included."""

    def missed(self, reason: Miss) -> None:
        """One more batch that ran eagerly."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    @property
    def batches(self) -> int:
        """Replayed or not."""
        return self.hits + sum(self.misses.values())

    def captured(self, milliseconds: float) -> None:
        """One more graph."""
        self.captures += 1
        self.failures_in_a_row = 0
        self.capture_ms += milliseconds
        self.longest_capture_ms = max(self.longest_capture_ms, milliseconds)

    def failed(self) -> None:
        """A capture came to nothing."""
        self.failures += 1
        self.failures_in_a_row += 1

    def snapshot(self) -> "GraphStats":
        """A copy that does not change."""
        return replace(self, misses=self.misses.copy())


class Digest(NamedTuple):
    """What an encoder can replay, for whoever forms its batches."""

    planner: Planner
    keys: frozenset[GraphKey]
    gains_below: float
    """Patches from which on a graph was found to gain nothing."""

    def replays(self, call: Call) -> bool:
        """Whether the encoder had a graph for this call when it sent the digest."""
        return any(plan.key in self.keys for plan in self.planner.plans(call))
