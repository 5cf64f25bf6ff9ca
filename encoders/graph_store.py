"""The graphs of one encoder: captured when there is time, kept while they are used, given up."""

import logging
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from encoders.captured import Capture, CapturedGraph, GraphMaker, TooLittleMemory
from encoders.config import GraphSettings
from encoders.graph_cache import Admission, GraphCache
from encoders.graph_keys import GraphKey
from encoders.graph_stats import Digest, GraphStats, Miss
from encoders.packing import Call

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 8
"""After so many failed captures without a success between, no more is tried: each loses a pool."""


class GraphStore:
    """At most `graph_capacity` graphs in one memory pool. One thread uses it."""

    def __init__(
        self,
        maker: GraphMaker,
        settings: GraphSettings,
        stats: GraphStats,
    ) -> None:
        self._maker = maker
        self._planner = maker.planner
        self._recorder = maker.recorder
        self._settings = settings
        self._stats = stats
        self._cache = GraphCache(settings.graph_capacity)
        self._admission = Admission(settings.admission, settings.graph_capacity)
        self._rebuild_due = False
        self._disabled = False
        self._probe()

    def __len__(self) -> int:
        return len(self._cache) + len(self._cache.retired)

    def find(self, call: Call) -> CapturedGraph | None:
        """A graph for a call, from now on the most recently used."""
        for plan in self._planner.plans(call):
            if plan.key in self._cache:
                return self._cache.use(plan.key)
        return None

    def replay(self, captured: CapturedGraph, patches_PC: Tensor, call: Call) -> Tensor:
        """A batch's rows, in memory that belongs to the caller. Waits for nothing."""
        return self._maker.replay(captured, patches_PC, call)

    def miss(self, call: Call) -> Miss:
        """Why there is no graph for a call; it is queued if it is time."""
        if self._disabled:
            return "disabled"
        refused: Miss = "too_large"
        for plan in self._planner.plans(call):
            reason = self._admission.refused(plan.key, call.layout.num_patches)
            if reason is None:
                return self._admission.see(plan.key, call)
            refused = reason
        return refused

    @property
    def has_work(self) -> bool:
        """Whether `work` would do something."""
        return self._rebuild_due or (not self._disabled and bool(self._admission.queue))

    def work(self) -> None:
        """One rebuild, or one capture. Waits for the device."""
        if self._rebuild_due:
            self.rebuild()
        elif self.has_work:
            self._capture(*self._admission.queue.popitem(last=False))

    def ask_for(self, call: Call) -> None:
        """Queue what a call would be replayed with, whether or not it was seen."""
        for plan in self._planner.plans(call)[:1]:
            if plan.key not in self._cache:
                self._admission.queue[plan.key] = call

    def graphs(self) -> list[CapturedGraph]:
        """Every graph that can be replayed, most recently used first."""
        return self._cache.graphs()

    def digest(self) -> Digest:
        """What can be replayed."""
        keys = frozenset(captured.plan.key for captured in self._cache.graphs())
        return Digest(self._planner, keys, self._admission.gains_below)

    def release(self) -> None:
        """Give up every graph and the pool's memory. The same keys may be captured again."""
        self._admission.queue.clear()
        self._stats.graph_bytes = 0
        for captured in self._cache.drain():
            captured.graph.reset()
        try:
            self._recorder.renew()
        except RuntimeError as error:
            self._failed("a new pool", error)
        else:
            self._rebuild_due = False

    def rebuild(self) -> None:
        """Give up every graph and the pool; what is due and the hottest are captured anew."""
        due = OrderedDict(self._admission.queue)
        for captured in self._cache.graphs():
            due.setdefault(captured.plan.key, captured.call)
        while len(due) > self._settings.graph_capacity:
            due.popitem()
        self._stats.rebuilds += 1
        self.release()
        self._admission.queue = due

    def confirms(self, captured: CapturedGraph, rows_RD: Tensor, eager_RD: Tensor) -> bool:
        """Whether a replay gave eager's bits. If not, the graph is not used again. Waits."""
        self._stats.shadow_checks += 1
        if self._maker.confirm(rows_RD, eager_RD):
            return True
        if not self._tolerates(captured.plan.key):
            self._stats.shadow_mismatches += 1
            self._drop(captured, "a replay")
        return False

    def _drop(self, captured: CapturedGraph, what: str) -> None:
        key = captured.plan.key
        logger.error("%s of %s differs from eager; it stays eager", what, key)
        self._admission.give_up(key)
        self._free(self._cache.remove(captured))

    def _tolerates(self, key: GraphKey) -> bool:
        return self._settings.precision == "fast" and key.kind == "budget"

    def poison(self) -> None:
        """NaN in the arena and in all scratch of all graphs: what survives was not shared."""
        self._maker.poison(self._cache.graphs())

    def measure(self, stats: GraphStats) -> None:
        """Enter the sizes of now."""
        stats.graphs, stats.retired = len(self._cache), len(self._cache.retired)
        stats.arena_bytes, stats.pool_bytes = self._maker.arena_bytes, self._recorder.pool_bytes

    def _capture(self, key: GraphKey, call: Call) -> None:
        self._admission.tried(key)  # whatever a kernel library may raise while capturing
        try:
            capture = self._maker.make(self._planner.plan(key, call), call)
        except TooLittleMemory as error:
            self._admission.succeeded(key)  # it may, when memory is free again
            self._stats.short_of_memory += 1
            logger.warning("no graph for %s: %s", key, error)
        except RuntimeError as error:
            self._failed(str(key), error)
        else:
            self._admission.succeeded(key)
            self._stats.captured(capture.milliseconds, capture.device_bytes)
            self._admit(capture)

    def _admit(self, capture: Capture) -> None:
        captured, key = capture.captured, capture.captured.plan.key
        patches = captured.call.layout.num_patches
        if not capture.verified and not self._tolerates(key):
            self._stats.mismatches += 1
            self._drop(captured, "a capture")
        elif not self._admission.gains(key, patches, capture.eager_ms, capture.replay_ms):
            self._stats.no_gain += 1
            self._free([captured])
        else:
            logger.info("captured %s in %.0f ms", key, capture.milliseconds)
            evicted = self._cache.install(captured)
            self._stats.evictions += len(evicted)
            self._free(evicted)

    def _free(self, graphs: Sequence[CapturedGraph]) -> None:
        for captured in graphs:
            if self._resets_are_safe:
                captured.graph.reset()
            else:
                self._cache.retired.append(captured)
        if len(self._cache.retired) >= self._settings.graph_capacity:
            self._rebuild_due = True

    def _failed(self, what: str, error: RuntimeError) -> None:
        """Survive it: graphs that there are stay good, but the pool takes no more."""
        self._stats.failed()
        self._rebuild_due = True
        logger.warning("capture of %s failed: %s", what, error)
        if self._stats.failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self._disabled, self._rebuild_due = True, False
            logger.error("%d captures in a row failed: no more", self._stats.failures_in_a_row)

    @torch.inference_mode()
    def _probe(self) -> None:
        self._resets_are_safe = False
        try:
            self._resets_are_safe = self._maker.resets_are_safe()
        except TooLittleMemory as error:
            logger.warning("whether graphs can be freed one by one was not tried: %s", error)
        except RuntimeError as error:
            self._failed("the start-up probe", error)
        if not self._resets_are_safe:
            logger.warning("graphs are not freed one by one here: all are captured anew at times")
