"""Which layouts have a graph, which are to get one, and which never will."""

from collections import OrderedDict
from typing import Literal

from encoders.captured import CapturedGraph
from encoders.forward import Call, GraphKey

MAX_SIGHTINGS = 4096
"""Layouts of which is remembered how often they were seen."""
MAX_TRIES = 2
"""Captures of one layout that may fail before it stays eager."""


class GraphCache:
    """At most `capacity` graphs, least recently used first, and the evicted that are not freed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._graphs: OrderedDict[GraphKey, CapturedGraph] = OrderedDict()
        self.retired: list[CapturedGraph] = []

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: GraphKey) -> CapturedGraph | None:
        """The graph, from now on the most recently used; None if there is none."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def install(self, captured: CapturedGraph) -> CapturedGraph | None:
        """Keep a new graph; the least recently used one comes out if there are too many."""
        self._graphs[captured.call.key] = captured
        if len(self._graphs) <= self._capacity:
            return None
        return self._graphs.popitem(last=False)[1]

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
    """Decides from what was seen; every table has a bound."""

    def __init__(self, policy: Literal["always", "second_sight"], capacity: int) -> None:
        self._needed = {"always": 1, "second_sight": 2}[policy]
        self._capacity = capacity
        self._seen: OrderedDict[GraphKey, int] = OrderedDict()
        self._tries: OrderedDict[GraphKey, int] = OrderedDict()
        self.queue: OrderedDict[GraphKey, Call] = OrderedDict()
        """Layouts to be captured, next first. Never more than graphs can be kept."""

    def see(self, call: Call) -> Literal["unseen", "queued", "failed"]:
        """Count a batch without a graph, and queue its layout if it is time."""
        key = call.key
        if self._tries.get(key, 0) >= MAX_TRIES:
            return "failed"
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
        """The layout stays eager."""
        _remember(self._tries, key, MAX_TRIES)


def _remember(table: OrderedDict[GraphKey, int], key: GraphKey, count: int) -> None:
    table.pop(key, None)
    table[key] = count  # last
    if len(table) > MAX_SIGHTINGS:
        table.popitem(last=False)
