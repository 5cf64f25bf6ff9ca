"""Replays a tower as HIP or CUDA graphs where that is exact and affordable, else runs it eagerly.

One forward serves both: a graph is a recording of it. Shapes: P = patches, C = values of a patch,
R = rows of a result, D = their width.
"""

import logging
import os
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from encoders.arena import Arena
from encoders.captured import Capture, CapturedGraph, GraphMaker, TooLittleMemory
from encoders.config import GraphSettings
from encoders.forward import Call, Forward
from encoders.graph_cache import Admission, GraphCache
from encoders.graph_stats import GraphStats, Miss
from encoders.recorder import CudaRecorder, Recorder

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 8
"""After so many failed captures without a success between, no more is tried: each loses a pool."""


class GraphRunner:
    """Runs a tower's batches. Not thread-safe: the engine thread calls it, and makes it.

    A batch whose key has a graph is replayed. Every other runs eagerly at once; what it lacked
    is captured in `idle`, compared with eager as integers, and used from then on. At most
    `graph_capacity` graphs live in one memory pool; beyond that the least recently used leaves.
    """

    def __init__(
        self,
        forward: Forward,
        settings: GraphSettings,
        dtype: torch.dtype,
        recorder: Recorder | None,
    ) -> None:
        self._forward = forward
        self._recorder = recorder
        self._stats = GraphStats()
        self._cache = GraphCache(settings.graph_capacity)
        self._admission = Admission(settings.admission, settings.graph_capacity)
        self._capacity = settings.graph_capacity
        self._rebuild_due = False
        self._off: Miss | None = None
        self._resets_are_safe = False
        if settings.graph_mode == "off":
            self._off = "off"
        elif recorder is None or not forward.backend.capturable:
            self._off = "backend"
        else:
            self._arena = Arena(forward, settings, dtype)
            self._maker = GraphMaker(forward, self._arena, recorder, settings.free_memory_floor)
            self._probe()

    @classmethod
    def on(cls, forward: Forward, settings: GraphSettings, dtype: torch.dtype) -> "GraphRunner":
        """A runner for the forward's device, as configured and as the environment overrides it."""
        graphs = forward.device.type == "cuda" and forward.backend.capturable
        recorder = CudaRecorder(forward.device) if graphs else None
        return cls(forward, settings.overridden(os.environ), dtype, recorder)

    def on_stream(self) -> AbstractContextManager[None]:
        """The block's device work belongs to the runner's stream: eager and replays share one."""
        return nullcontext() if self._recorder is None else self._recorder.on_stream()

    @torch.inference_mode()
    def run(self, patches_PC: Tensor, call: Call) -> Tensor:
        """A batch's rows [R, D], in memory that belongs to the caller. Waits for nothing."""
        captured = self._cache.get(call.key)
        with self.on_stream():
            if captured is None:
                self._stats.missed(self._miss(call))
                return self._eager(patches_PC, call)
            self._stats.hits += 1
            self._arena.fill(captured.place, patches_PC, call.layout)
            captured.graph.replay()
            return captured.rows_RD.clone()  # the next replay overwrites them

    @torch.inference_mode()
    def idle(self) -> bool:
        """Do one thing that no request should wait for; whether there is another to do.

        A capture takes about as long as two eager runs of its layout. Waits for the device.
        """
        with self.on_stream():
            if self._rebuild_due:
                self.rebuild()
            elif self.has_work:
                self._capture(self._admission.queue.popitem(last=False)[1])
        return self.has_work

    @property
    def has_work(self) -> bool:
        """Whether `idle` would do something. Any thread may ask."""
        return self._rebuild_due or (self._off is None and bool(self._admission.queue))

    def release(self) -> None:
        """Give up every graph and the pool's memory. The same layouts may be captured again."""
        if self._recorder is None:
            return
        self._admission.queue.clear()
        self._stats.graph_bytes = 0
        with self.on_stream():
            for captured in self._cache.drain():
                captured.graph.reset()
            try:
                self._recorder.renew()
            except RuntimeError as error:
                self._failed("a new pool", error)
            else:
                self._rebuild_due = False

    def rebuild(self) -> None:
        """Give up every graph and the pool; the hottest are captured anew in `idle`."""
        hottest = [captured.call for captured in self._cache.graphs()]
        calls = [*self._admission.queue.values(), *hottest][: self._capacity]
        self._stats.rebuilds += 1
        self.release()
        self._admission.queue = OrderedDict((call.key, call) for call in calls)

    def poison(self) -> None:
        """NaN in the arena and in all scratch of all graphs: what survives was not shared.

        For tests and for the search for faults. A replay after it has to be right nonetheless.
        """
        with torch.inference_mode(), self.on_stream():
            self._arena.poison()
            for captured in self._cache.graphs():
                # Boundaries of another layout would lead it out of bounds.
                self._arena.fill_inputs(captured.place, captured.call.layout)
                captured.graph.replay()  # NaN in, so NaN in all that follows from the patches
            self._arena.poison()

    def stats(self) -> GraphStats:
        """What was done so far, as a record that does not change."""
        stats = self._stats
        stats.graphs, stats.retired = len(self._cache), len(self._cache.retired)
        if self._recorder is not None and self._off not in ("off", "backend"):
            stats.arena_bytes, stats.pool_bytes = self._arena.nbytes, self._recorder.pool_bytes
        return stats.snapshot()

    def _miss(self, call: Call) -> Miss:
        if self._off is not None:
            return self._off
        if not self._arena.admits(call.layout):
            return "too_large"
        return self._admission.see(call)

    def _eager(self, patches_PC: Tensor, call: Call) -> Tensor:
        try:
            return self._forward.eager(patches_PC, call)
        except torch.OutOfMemoryError:
            if not len(self._cache) and not self._cache.retired:
                raise
            logger.warning("graphs give up their memory: a batch needs it")
        self.release()
        return self._forward.eager(patches_PC, call)

    def _capture(self, call: Call) -> None:
        self._admission.tried(call.key)  # whatever a kernel library may raise while capturing
        try:
            capture = self._maker.make(call)
        except TooLittleMemory as error:
            self._admission.succeeded(call.key)  # it may, when memory is free again
            self._stats.short_of_memory += 1
            logger.warning("no graph for %s: %s", call.key, error)
        except RuntimeError as error:
            self._failed(str(call.key), error)
        else:
            self._admission.succeeded(call.key)
            self._stats.captured(capture.milliseconds, capture.device_bytes)
            self._admit(capture)

    def _admit(self, capture: Capture) -> None:
        if capture.verified:
            logger.info("captured %s in %.0f ms", capture.captured.call.key, capture.milliseconds)
            evicted = self._cache.install(capture.captured)
            self._stats.evictions += evicted is not None
        else:
            evicted = capture.captured
            self._stats.mismatches += 1
            self._admission.give_up(evicted.call.key)
            logger.error("a graph of %s differs from eager; it stays eager", evicted.call.key)
        if evicted is not None:
            self._free(evicted)

    def _free(self, captured: CapturedGraph) -> None:
        if self._resets_are_safe:
            captured.graph.reset()
            return
        self._cache.retired.append(captured)
        self._rebuild_due = len(self._cache.retired) >= self._capacity

    def _failed(self, what: str, error: RuntimeError) -> None:
        """Survive it: graphs that there are stay good, but the pool takes no more."""
        self._stats.failed()
        self._rebuild_due = True
        logger.warning("capture of %s failed: %s", what, error)
        if self._stats.failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self._off, self._rebuild_due = "disabled", False
            logger.error("%d captures in a row failed: no more", self._stats.failures_in_a_row)

    @torch.inference_mode()
    def _probe(self) -> None:
        with self.on_stream():
            try:
                self._resets_are_safe = self._maker.resets_are_safe()
            except TooLittleMemory as error:
                logger.warning("whether graphs can be freed one by one was not tried: %s", error)
            except RuntimeError as error:
                self._failed("the start-up probe", error)
        if not self._resets_are_safe:
            logger.warning("graphs are not freed one by one here: all are captured anew at times")
