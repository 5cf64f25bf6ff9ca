"""The graphs of one encoder: captured when there is time, kept while they are used, given up."""

import logging
import time
from collections import OrderedDict

import torch
from torch import Tensor

from encoders.attention_kernels import KERNEL_FAILURES
from encoders.captured import TIMINGS, Candidate, CapturedGraph, GraphMaker, TooLittleMemory
from encoders.config import GraphSettings
from encoders.graph_cache import Admission, GraphCache
from encoders.graph_keys import GraphKey
from encoders.graph_stats import Digest, GraphStats, Miss
from encoders.packing import Call

logger = logging.getLogger(__name__)

WAIT_FOR_MEMORY_S = 60.0
MAX_FAILURES_IN_A_ROW = 8
"""After so many failed captures without a success between, no more is tried: each loses a pool."""


class GraphStore:
    """At most `graph_capacity` graphs in one graph pool. One thread uses it."""

    def __init__(self, maker: GraphMaker, settings: GraphSettings, stats: GraphStats) -> None:
        self._maker = maker
        self._planner = maker.planner
        self._recorder = maker.recorder
        self._settings = settings
        self._stats = stats
        self._cache = GraphCache(settings.graph_capacity)
        self._admission = Admission(settings.admission, settings.graph_capacity)
        self._candidate: Candidate | None = None
        self._rebuild_due = False
        self._disabled = False
        self._short_until = 0.0
        self._resets_are_safe = False
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
                on_trial = any(plan.key == captured.plan.key for captured in self._trial)
                return "queued" if on_trial else self._admission.see(plan.key, call)
            refused = reason
        if refused == "no_gain":
            self._admission.refuse()
        return refused

    @property
    def has_work(self) -> bool:
        """Whether `work` would do something."""
        due = self._candidate is not None or bool(self._admission.queue)
        short = time.monotonic() < self._short_until
        return self._rebuild_due or (due and not self._disabled and not short)

    def work(self, *, may_rebuild: bool = True) -> None:
        """One step: a rebuild, a recording, or one measurement or comparison of it. Waits."""
        if self._rebuild_due:
            if may_rebuild:
                self.rebuild()
        elif self._candidate is not None:
            self._try(self._candidate)
        elif self.has_work and (due := self._admission.next_due(self._cache.keys())) is not None:
            self._record(*due)

    def ask_for(self, call: Call) -> bool:
        """Queue what a call would be replayed with, seen or not; False if nothing is left to."""
        for plan in self._planner.plans(call):
            if plan.key in self._cache:
                return False
            if self._admission.refused(plan.key, call.layout.num_patches) is None:
                self._admission.queue[plan.key] = call
                return True
        return False

    def usual_calls(self, num_prefix: int) -> list[Call]:
        """What any traffic will need, as many as graphs are kept."""
        return self._planner.usual_calls(num_prefix)[: self._settings.graph_capacity]

    def graphs(self) -> list[CapturedGraph]:
        """Every graph that can be replayed, most recently used first."""
        return self._cache.graphs()

    def digest(self) -> Digest:
        """What can be replayed."""
        return Digest(self._planner, self._cache.keys(), self._admission.gains_below)

    def release(self) -> None:
        """Give up every graph and the pool's memory. The same keys may be captured again."""
        self._admission.queue.clear()
        for captured in [*self._cache.drain(), *self._trial]:
            captured.graph.reset()
        self._candidate = None
        try:
            self._recorder.renew()
        except RuntimeError as error:
            self._failed("a new graph pool", error)
        else:
            self._rebuild_due = False

    def rebuild(self) -> None:
        """Give up every graph and the pool; what is due and the hottest are captured anew."""
        due = OrderedDict(self._admission.queue)
        for captured in [*self._trial, *self._cache.graphs()]:
            due.setdefault(captured.plan.key, captured.call)
        while len(due) > self._settings.graph_capacity:
            due.popitem()
        self._stats.rebuilds += 1
        self.release()
        self._admission.queue = due

    def is_due(self, captured: CapturedGraph) -> bool:
        """Whether the graph's last replay is the one in `shadow_every` that is to be checked."""
        return self._cache.uses(captured.plan.key) % self._settings.shadow_every == 0

    def confirms(self, captured: CapturedGraph, rows_RD: Tensor, eager_RD: Tensor) -> bool:
        """Whether a replay gave eager's bits. If not, the graph is not used again. Waits."""
        self._stats.shadow_checks += 1
        if self._maker.confirm(rows_RD, eager_RD):
            return True
        if not self._tolerates(captured.plan.key):
            self._stats.shadow_mismatches += 1
            self._drop(captured, "a replay")
        return False

    def poison(self) -> None:
        """NaN in the arena and in all scratch of all graphs: what survives was not shared."""
        self._maker.poison(self._cache.graphs())

    def measure(self, stats: GraphStats) -> None:
        """Enter the sizes of now."""
        held = [*self._cache.graphs(), *self._cache.retired, *self._trial]
        stats.graphs, stats.retired = len(self._cache), len(self._cache.retired)
        stats.on_trial = len(self._trial)
        stats.graph_bytes = sum(max(captured.device_bytes, 0) for captured in held)
        stats.arena_bytes = self._maker.arena_bytes
        stats.graph_pool_bytes = self._recorder.graph_pool_bytes

    @property
    def _trial(self) -> list[CapturedGraph]:
        return [] if self._candidate is None else [self._candidate.captured]

    def _tolerates(self, key: GraphKey) -> bool:
        return self._settings.precision == "fast" and key.kind == "budget"

    def _record(self, key: GraphKey, call: Call) -> None:
        self._admission.tried(key)
        try:
            captured = self._maker.record(self._planner.plan(key, call), call)
        except TooLittleMemory as error:
            self._admission.succeeded(key)  # it may, when memory is free again
            self._stats.short_of_memory += 1
            self._short_until = time.monotonic() + WAIT_FOR_MEMORY_S
            logger.warning("no captures for %.0f s: %s", WAIT_FOR_MEMORY_S, error)
        except KERNEL_FAILURES as error:
            self._failed(str(key), error)
        else:
            self._admission.succeeded(key)
            self._stats.captured(captured.milliseconds)
            witnesses = self._planner.witnesses(captured.plan, call)
            self._candidate = Candidate(captured, iter(witnesses))

    def _try(self, candidate: Candidate) -> None:
        """One measurement, or one comparison; after the last, the graph is kept."""
        captured, is_timed = candidate.captured, candidate.timings == TIMINGS
        witness = next(candidate.witnesses, None) if is_timed else None
        if is_timed and witness is None:
            self._keep(candidate)
            return
        try:
            if witness is None:  # times first: most large ones end here
                self._maker.time(candidate)
                if candidate.timings == TIMINGS and not self._admission.gains(candidate):
                    self._stats.no_gain += 1
                    self._free(captured)
            elif not (self._maker.agrees(captured, witness) or self._tolerates(captured.plan.key)):
                self._stats.mismatches += 1
                self._drop(captured, "a capture")
        except KERNEL_FAILURES as error:  # out of memory, or worse
            self._free(captured)
            self._failed(f"the trial of {captured.plan.key}", error)

    def _keep(self, candidate: Candidate) -> None:
        times = candidate.eager_ms, candidate.replay_ms
        logger.info("%s: %.1f ms eagerly, %.1f as a graph", candidate.captured.plan.key, *times)
        self._candidate = None
        self._admission.gained(candidate.captured)  # only now: one that does nothing is fast too
        for evicted in self._cache.install(candidate.captured):
            self._stats.evictions += 1
            self._free(evicted)

    def _drop(self, captured: CapturedGraph, what: str) -> None:
        logger.error("%s of %s differs from eager, which goes on", what, captured.plan.key)
        self._admission.give_up(captured.plan.key)
        self._free(captured)

    def _free(self, captured: CapturedGraph) -> None:
        if self._candidate is not None and self._candidate.captured is captured:
            self._candidate = None
        self._cache.remove(captured)
        if self._resets_are_safe:
            captured.graph.reset()
        else:
            self._cache.retired.append(captured)
        if len(self._cache.retired) >= self._settings.graph_capacity:
            self._rebuild_due = True

    def _failed(self, what: str, error: Exception) -> None:
        """Survive it: graphs that there are stay good, but the pool takes no more."""
        self._stats.failed()
        self._rebuild_due = True
        logger.warning("capture of %s failed: %s", what, error)
        if self._stats.failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self._disabled, self._rebuild_due = True, False
            logger.error("%d captures in a row failed: no more", self._stats.failures_in_a_row)

    @torch.inference_mode()
    def _probe(self) -> None:
        try:
            self._resets_are_safe = self._maker.resets_are_safe()
        except TooLittleMemory as error:
            logger.warning("whether graphs can be freed one by one was not tried: %s", error)
        except KERNEL_FAILURES as error:
            self._failed("the start-up probe", error)
        if not self._resets_are_safe:
            logger.warning("graphs are not freed one by one here: all are captured anew at times")
