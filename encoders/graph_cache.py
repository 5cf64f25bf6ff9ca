"""Which keys have a graph, which are to get one, and which never will."""

from collections import OrderedDict
from typing import Literal

from encoders.captured import CapturedGraph
from encoders.graph_keys import GraphKey
from encoders.graph_stats import Miss
from encoders.packing import Call

MAX_SIGHTINGS = 4096
"""Keys of which is remembered how often they were seen."""
MAX_TRIES = 2
"""Captures of one key that may fail before it stays eager."""
LEAST_GAIN = 0.05
"""Share of eager's time that a graph has to save to be worth its memory."""


class GraphCache:
    """At most `capacity` graphs, least recently used first, and the evicted that are not freed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._graphs: OrderedDict[GraphKey, CapturedGraph] = OrderedDict()
        self.retired: list[CapturedGraph] = []

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def use(self, key: GraphKey) -> CapturedGraph:
        """The graph, from now on the most recently used."""
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def install(self, captured: CapturedGraph) -> list[CapturedGraph]:
        """Keep a new graph; what comes out is an older one of its key, and the least recently used
        if there are too many.
        """
        out = self._graphs.pop(captured.plan.key, None)
        self._graphs[captured.plan.key] = captured
        if len(self._graphs) > self._capacity:
            out = self._graphs.popitem(last=False)[1]
        return [] if out is None else [out]

    def remove(self, captured: CapturedGraph) -> list[CapturedGraph]:
        """A graph, and what is kept under its key: neither is kept any more."""
        kept = self._graphs.pop(captured.plan.key, captured)
        return [captured] if kept is captured else [captured, kept]

    def drain(self) -> list[CapturedGraph]:
        """Every graph, most recently used first, then the retired; the cache is empty after."""
        graphs = [*self.graphs(), *self.retired]
        self._graphs.clear()
        self.retired.clear()
        return graphs

    def graphs(self) -> list[CapturedGraph]:
        """Every graph, most recently used first."""
        return list(reversed(self._graphs.values()))


class Admission:
    """Decides what is captured from what was seen and measured; every table has a bound."""

    def __init__(self, policy: Literal["always", "second_sight", "gain"], capacity: int) -> None:
        self._needed = 1 if policy == "always" else 2
        self._by_gain = policy == "gain"
        self._capacity = capacity
        self._seen: OrderedDict[GraphKey, int] = OrderedDict()
        self._tries: OrderedDict[GraphKey, int] = OrderedDict()
        self._useless: OrderedDict[GraphKey, int] = OrderedDict()
        self._largest_gain = 0
        self._smallest_loss: int | None = None
        self.queue: OrderedDict[GraphKey, Call] = OrderedDict()
        """What is to be captured, next first. Never more than graphs can be kept."""

    def refused(self, key: GraphKey, patches: int) -> Literal["failed", "no_gain"] | None:
        """Why a key will have no graph, if so."""
        if self._tries.get(key, 0) >= MAX_TRIES:
            return "failed"
        return "no_gain" if key in self._useless or patches >= self.gains_below else None

    def see(self, key: GraphKey, call: Call) -> Miss:
        """Count a batch without a graph, and queue its key if it is time."""
        if key in self.queue:
            return "queued"
        seen = self._seen.pop(key, 0) + 1
        if seen < self._needed or len(self.queue) >= self._capacity:
            _remember(self._seen, key, seen)
            return "unseen"
        self.queue[key] = call
        return "queued"

    def tried(self, key: GraphKey) -> None:
        """Remember that a capture begins: unless `succeeded` follows, it came to nothing."""
        _remember(self._tries, key, self._tries.get(key, 0) + 1)

    def succeeded(self, key: GraphKey) -> None:
        """Forget earlier failures."""
        self._tries.pop(key, None)

    def give_up(self, key: GraphKey) -> None:
        """The key stays eager."""
        _remember(self._tries, key, MAX_TRIES)

    def gains(self, key: GraphKey, patches: int, eager_ms: float, replay_ms: float) -> bool:
        """Whether a graph is worth keeping, as measured; what is learnt holds for other sizes."""
        if not self._by_gain:
            return True
        if replay_ms <= (1 - LEAST_GAIN) * eager_ms:
            self._largest_gain = max(self._largest_gain, patches)
            return True
        _remember(self._useless, key, 1)
        self._smallest_loss = min(self._smallest_loss or patches, patches)
        return False

    @property
    def gains_below(self) -> float:
        """Patches from which on no graph gained: launching is then hidden behind the device."""
        if self._smallest_loss is None:
            return float("inf")
        # One loss among larger gains was a disturbance.
        return max(self._smallest_loss, self._largest_gain + 1)


def _remember(table: OrderedDict[GraphKey, int], key: GraphKey, count: int) -> None:
    table.pop(key, None)
    table[key] = count  # last
    if len(table) > MAX_SIGHTINGS:
        table.popitem(last=False)
