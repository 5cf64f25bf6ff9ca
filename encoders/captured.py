"""Captured graphs: how one is made and compared with eager before it may answer anybody."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoders.arena import Arena, Place
from encoders.config import GraphSettings
from encoders.forward import Forward
from encoders.graph_keys import Plan, Planner
from encoders.packing import Call, PackedLayout
from encoders.recorder import CudaRecorder, Graph, Recorder, milliseconds_since
from encoders.transfer import same_bits

TIMINGS = 3
"""Runs of each way, of which the best counts."""
PROBE_SIDES = (1, 2, 4, 8, 16)
"""Merged patches along a side of the images that the start-up probe encodes."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A forward of one key, and the memory whose addresses it has recorded."""

    plan: Plan
    call: Call
    """What it was captured for, to be captured again after a rebuild."""
    graph: Graph
    place: Place
    rows_RD: Tensor
    """Where each replay leaves its result, that of padding last."""
    milliseconds: float
    """Of its recording alone."""
    device_bytes: int
    """Taken by its recording, growth of the graph pool included."""


@dataclass(slots=True)
class Candidate:
    """A graph on trial: what it takes, and the calls that it has still to get right."""

    captured: CapturedGraph
    witnesses: Iterator[Call]
    timings: int = 0
    eager_ms: float = math.inf
    replay_ms: float = math.inf
    """The best so far, with all that the host does for either."""


class TooLittleMemory(Exception):
    """A capture would leave less device memory than the floor."""


class GraphMaker:
    """Captures a tower's forward, key by key, on one arena."""

    def __init__(self, forward: Forward, settings: GraphSettings, recorder: Recorder) -> None:
        limits = settings.max_patches, settings.max_images
        self.planner = Planner(settings.graph_mode, forward.tower.merge_size, *limits)
        self.recorder = recorder
        self._forward = forward
        self._floor_bytes = settings.free_memory_floor
        with recorder.on_stream():
            self._arena = Arena(forward, self.planner)

    @classmethod
    def on(cls, forward: Forward, settings: GraphSettings) -> "GraphMaker | None":
        """For the forward's device; None where nothing is to be, or can be, captured."""
        capturable = forward.device.type == "cuda" and forward.backend.capturable
        if settings.graph_mode == "off" or not capturable:
            return None
        return cls(forward, settings, CudaRecorder(forward.device))

    def record(self, plan: Plan, call: Call) -> CapturedGraph:
        """Capture a key; nothing may be answered by it before it `agrees`.

        Raises `TooLittleMemory`, or whatever `Recorder.capture` and kernel libraries do.
        """
        self._keep_free(0)
        place = self._arena.place(plan)

        def forward() -> Tensor:
            return self._arena.forward(place, call.output)

        # At this very shape, on this stream: what loads, compiles or picks an algorithm on first
        # use does it here, where it may allocate.
        try:
            warm = self.recorder.measured(forward)
        except torch.OutOfMemoryError as error:  # not a failure of the capture
            raise TooLittleMemory(str(error)) from error
        rows_RD = self._arena.rows(call.output, warm.result)
        growth = max(0, warm.scratch_bytes - self.recorder.graph_pool_bytes)
        del warm
        before = self._keep_free(growth)
        start = time.perf_counter()
        graph = self.recorder.capture(lambda: rows_RD.copy_(forward()))
        milliseconds = milliseconds_since(start)
        device_bytes = before - self.recorder.free_bytes()
        return CapturedGraph(plan, call, graph, place, rows_RD, milliseconds, device_bytes)

    def agrees(self, captured: CapturedGraph, call: Call) -> bool:
        """Whether a replay gives eager's bits for a call of its key. Waits for both."""
        plan = self.planner.plan(captured.plan.key, call)
        # Other values each time, and no trace of earlier results: on HIP a capture may have failed
        # in silence, and the graph do nothing.
        self._arena.vary_patches(captured.place)
        captured.rows_RD.fill_(torch.nan)
        eager_RD = self._eager(captured, call)
        self._arena.fill_layout(captured.place, plan.layout)
        captured.graph.replay()
        return same_bits(captured.rows_RD[: len(eager_RD)], eager_RD)

    def time(self, candidate: Candidate) -> None:
        """Measure eager and the graph once more, for the call that it was captured for. Waits."""
        captured, measured = candidate.captured, self.recorder.measured
        call = captured.call
        patches_PC = captured.place.patches_PC[: call.layout.num_patches].clone()
        eager = measured(lambda: self._eager(captured, call)).milliseconds
        replayed = measured(lambda: self.replay(captured, patches_PC, call)).milliseconds
        candidate.eager_ms = min(candidate.eager_ms, eager)
        candidate.replay_ms = min(candidate.replay_ms, replayed)
        candidate.timings += 1

    def replay(self, captured: CapturedGraph, patches_PC: Tensor, call: Call) -> Tensor:
        """A batch's rows, in memory that belongs to the caller. Waits for nothing."""
        plan = self.planner.plan(captured.plan.key, call)
        self._arena.fill(captured.place, patches_PC, plan.layout)
        captured.graph.replay()
        # The next replay overwrites them; those of padding are nobody's.
        return captured.rows_RD[: self._num_rows(call)].clone()

    def poison(self, graphs: Sequence[CapturedGraph]) -> None:
        """NaN in the arena and in all scratch of these graphs."""
        self._arena.poison()
        for captured in graphs:
            # Boundaries of another layout would lead it out of bounds.
            self._arena.fill_layout(captured.place, captured.plan.layout)
            captured.graph.replay()  # NaN in, so NaN in all that follows from the patches
        self._arena.poison()

    @staticmethod
    def confirm(rows_RD: Tensor, eager_RD: Tensor) -> bool:
        """Whether a replay gave eager's bits. Waits for both."""
        return same_bits(rows_RD, eager_RD)

    @property
    def arena_bytes(self) -> int:
        """Device memory of the slabs."""
        return self._arena.nbytes

    def _num_rows(self, call: Call) -> int:
        layout = call.layout
        counts = self._forward.tower.row_counts
        return layout.num_images if call.output == "pooled" else sum(counts(layout))

    def _eager(self, captured: CapturedGraph, call: Call) -> Tensor:
        return self._forward.eager(captured.place.patches_PC[: call.layout.num_patches], call)

    def _keep_free(self, growth: int) -> int:
        free = self.recorder.free_bytes()
        if free - growth < self._floor_bytes:
            floor = self._floor_bytes
            raise TooLittleMemory(f"{free} bytes are free, {growth} needed, {floor} stay free")
        return free

    def resets_are_safe(self) -> bool:
        """Whether graphs of one pool stay right after one of them has been reset.

        On some torch versions a reset takes the BLAS workspace of the capture stream from under
        the others (pytorch#193402). So: reset one, let others have what that freed, see whether
        the rest still compute what eager does, and write nowhere else. Raises as `record` does.
        """
        first, *rest = [self.record(self.planner.exact_plan(x), x) for x in self._probes()]
        first.graph.reset()
        freed = self.recorder.poison()
        right = [self.agrees(captured, captured.call) for captured in rest]
        untouched = [bool(block.isnan().all()) for block in freed]
        for captured in rest:
            captured.graph.reset()
        return all(right) and all(untouched)

    def _probes(self) -> list[Call]:
        """Some squares of pixels, as many as are admitted: one to go and two to stay."""
        merge, prefix = self.planner.merge_size, self._forward.tower.num_prefix
        grids = [(1, side * merge, side * merge) for side in PROBE_SIDES]
        layouts = [PackedLayout.of([grid], prefix) for grid in grids]
        admitted = [layout for layout in layouts if self.planner.admits(layout)]
        return [Call(layout, "pooled") for layout in admitted[-3:]]
