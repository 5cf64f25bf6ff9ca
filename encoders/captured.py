"""Captured graphs: how one is made and compared with eager before it may answer anybody."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from encoders.arena import Arena, Place
from encoders.config import GraphSettings
from encoders.forward import Forward
from encoders.graph_keys import Plan, Planner
from encoders.packing import Call, PackedLayout
from encoders.recorder import CudaRecorder, Graph, Recorder, milliseconds_since
from encoders.transfer import same_bits

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


@dataclass(frozen=True, slots=True)
class Capture:
    """A new graph, how it compares with eager, and what recording it took."""

    captured: CapturedGraph
    verified: bool
    """Whether its replays gave eager's bits."""
    eager_ms: float
    replay_ms: float
    milliseconds: float
    device_bytes: int


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

    def make(self, plan: Plan, call: Call) -> Capture:
        """Capture a key and compare replays with eager: of this call, and of others of its budget.

        Raises `TooLittleMemory`, or `RuntimeError` where `Recorder.capture` does.
        """
        self._keep_free(0)
        place = self._arena.place(plan)

        def forward() -> Tensor:
            return self._arena.forward(place, call.output)

        # At this very shape, on this stream: what loads, compiles or picks an algorithm on first
        # use does it here, where it may allocate.
        warm = self.recorder.measured(forward)
        rows_RD = self._arena.rows(call.output, warm.result)
        before = self._keep_free(max(0, warm.scratch_bytes - self.recorder.pool_bytes))
        start = time.perf_counter()
        graph = self.recorder.capture(lambda: rows_RD.copy_(forward()))
        milliseconds = milliseconds_since(start)
        device_bytes = before - self.recorder.free_bytes()
        captured = CapturedGraph(plan, call, graph, place, rows_RD)
        witnesses = self.planner.witnesses(plan, call)
        verified = all([self.agrees(captured, witness) for witness in witnesses])  # noqa: C419
        eager = self.recorder.measured(lambda: self._eager(captured, call))
        replay = self.recorder.measured(graph.replay)
        return Capture(
            captured, verified, eager.milliseconds, replay.milliseconds, milliseconds, device_bytes
        )

    def agrees(self, captured: CapturedGraph, call: Call) -> bool:
        """Whether a replay gives what eager does on the patches that lie there. Waits for both."""
        plan = self.planner.plan(captured.plan.key, call)
        eager_RD = self._eager(captured, call)
        self._arena.fill_layout(captured.place, plan.layout)
        captured.graph.replay()
        return same_bits(captured.rows_RD[: len(eager_RD)], eager_RD)

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
        the rest still compute what eager does, and write nowhere else. Raises as `make` does.
        """
        first, *rest = [self.make(self.planner.exact_plan(call), call) for call in self._probes()]
        first.captured.graph.reset()
        freed = self.recorder.poison()
        right = [self.agrees(capture.captured, capture.captured.call) for capture in rest]
        untouched = [bool(block.isnan().all()) for block in freed]
        for capture in rest:
            capture.captured.graph.reset()
        return all(right) and all(untouched)

    def _probes(self) -> list[Call]:
        """Some squares of pixels, as many as are admitted: one to go and two to stay."""
        merge, prefix = self.planner.merge_size, self._forward.tower.num_prefix
        grids = [(1, side * merge, side * merge) for side in PROBE_SIDES]
        layouts = [PackedLayout.of([grid], prefix) for grid in grids]
        admitted = [layout for layout in layouts if self.planner.admits(layout)]
        return [Call(layout, "pooled") for layout in admitted[-3:]]
