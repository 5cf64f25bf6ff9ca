"""Which keys have a graph, which are to get one, and which never will."""

from collections import Counter, OrderedDict
from collections.abc import Container
from heapq import nsmallest
from itertools import count
from typing import Literal

from encoders.captured import Candidate, CapturedGraph
from encoders.graph_keys import GraphKey
from encoders.graph_stats import Miss
from encoders.packing import Call

MAX_SIGHTINGS = 4096
"""Keys of which is remembered how often they were seen."""
MAX_TRIES = 2
"""Captures of one key that may fail before it stays eager."""
LEAST_GAIN = 0.05
"""Share of eager's time that a graph has to save to be worth its memory."""
FORGET_LOSSES_AFTER = 1000
"""Batches without a graph for lack of gain, after which what was measured counts no more."""


class GraphCache:
    """At most `capacity` graphs, and the evicted that are not freed. The least recently used goes.

    When a graph was used outlasts the graph: what is captured again is as recent as it was.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._used: OrderedDict[GraphKey, int] = OrderedDict()
        self._uses: Counter[GraphKey] = Counter()
        self._clock = count(1)
        self.retired: list[CapturedGraph] = []

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def use(self, key: GraphKey) -> CapturedGraph:
        """The graph, from now on the most recently used."""
        _remember(self._used, key, next(self._clock))
        self._uses[key] += 1
        return self._graphs[key]

    def uses(self, key: GraphKey) -> int:
        """Times that the present graph of a key was used."""
        return self._uses[key]

    def install(self, captured: CapturedGraph) -> list[CapturedGraph]:
        """Keep a new graph; what comes out is an older one of its key, or the least recently used
        if there are too many.
        """
        key = captured.plan.key
        out = self._graphs.pop(key, None)
        self._graphs[key] = captured
        self._used.setdefault(key, next(self._clock))
        if len(self._graphs) > self._capacity:
            out = self._graphs.pop(min(self._graphs, key=lambda x: self._used.get(x, 0)))
            del self._uses[out.plan.key]
        return [] if out is None else [out]

    def remove(self, captured: CapturedGraph) -> None:
        """Keep a graph no longer."""
        if self._graphs.get(captured.plan.key) is captured:
            del self._graphs[captured.plan.key]
            del self._uses[captured.plan.key]

    def drain(self) -> list[CapturedGraph]:
        """Every graph, most recently used first, then the retired; the cache is empty after."""
        graphs = [*self.graphs(), *self.retired]
        self._graphs.clear()
        self._uses.clear()
        self.retired.clear()
        return graphs

    def keys(self) -> frozenset[GraphKey]:
        """What can be replayed."""
        return frozenset(self._graphs)

    def graphs(self) -> list[CapturedGraph]:
        """Every graph, most recently used first."""
        keys = sorted(self._graphs, key=lambda x: self._used.get(x, 0), reverse=True)
        return [self._graphs[key] for key in keys]


class Admission:
    """Decides what is captured from what was seen and measured; every table has a bound."""

    def __init__(self, policy: Literal["always", "second_sight", "gain"], capacity: int) -> None:
        self._needed = 1 if policy == "always" else 2
        self._by_gain = policy == "gain"
        self._capacity = capacity
        self._seen: OrderedDict[GraphKey, int] = OrderedDict()
        self._tries: OrderedDict[GraphKey, int] = OrderedDict()
        self._losses: OrderedDict[GraphKey, int] = OrderedDict()
        self._largest_gain = 0
        self._refusals = 0
        self.gains_below = float("inf")
        """Patches from which on no graph gained: launching is then hidden behind the device."""
        self.queue: OrderedDict[GraphKey, Call] = OrderedDict()
        """What is to be captured, next first. Never more than graphs can be kept."""

    def refused(self, key: GraphKey, patches: int) -> Literal["failed", "no_gain"] | None:
        """Why a key will have no graph, if so."""
        if self._tries.get(key, 0) >= MAX_TRIES:
            return "failed"
        return "no_gain" if key in self._losses or patches >= self.gains_below else None

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

    def next_due(self, graphs: Container[GraphKey]) -> tuple[GraphKey, Call] | None:
        """Take what is to be captured next: what has a graph by now, or will have none, is not."""
        while self.queue:
            key, call = self.queue.popitem(last=False)
            if key not in graphs and self.refused(key, call.layout.num_patches) is None:
                return key, call
        return None

    def tried(self, key: GraphKey) -> None:
        """Remember that a capture begins: unless `succeeded` follows, it came to nothing."""
        _remember(self._tries, key, self._tries.get(key, 0) + 1)

    def succeeded(self, key: GraphKey) -> None:
        """Forget earlier failures."""
        self._tries.pop(key, None)

    def give_up(self, key: GraphKey) -> None:
        """The key stays eager."""
        _remember(self._tries, key, MAX_TRIES)

    def gains(self, candidate: Candidate) -> bool:
        """Whether a graph is worth keeping, as measured; a loss holds for larger sizes too."""
        is_fast = candidate.replay_ms <= (1 - LEAST_GAIN) * candidate.eager_ms
        if is_fast or not self._by_gain:
            return True
        captured = candidate.captured
        _remember(self._losses, captured.plan.key, captured.call.layout.num_patches)
        self._learn()
        return False

    def gained(self, captured: CapturedGraph) -> None:
        """Remember that a graph is kept, which holds for smaller sizes too."""
        if self._by_gain:
            self._largest_gain = max(self._largest_gain, captured.call.layout.num_patches)
            self._losses.pop(captured.plan.key, None)
            self._learn()

    def refuse(self) -> None:
        """Count a batch that has no graph for lack of gain; measurements do not hold for ever."""
        self._refusals += 1
        if self._refusals % FORGET_LOSSES_AFTER == 0:
            self._losses.clear()
            self._learn()

    def _learn(self) -> None:
        if len(self._losses) < 2:  # one loss may have been a disturbance
            self.gains_below = float("inf")
            return
        _, second = nsmallest(2, self._losses.values())
        self.gains_below = max(second, self._largest_gain + 1)


def _remember(table: OrderedDict[GraphKey, int], key: GraphKey, value: int) -> None:
    table.pop(key, None)
    table[key] = value  # last
    if len(table) > MAX_SIGHTINGS:
        table.popitem(last=False)
