"""Captured graphs: how one is made and compared with eager before it may answer anybody."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from encoders.arena import Arena, Place
from encoders.forward import Call, Forward
from encoders.packing import PackedLayout
from encoders.recorder import Graph, Recorder, milliseconds_since
from encoders.transfer import as_integers

PROBE_SIDES = (1, 2, 4, 8, 16)
"""Merged patches along a side of the images that the start-up probe encodes."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A forward of one key, and the memory whose addresses it has recorded."""

    call: Call
    graph: Graph
    place: Place
    rows_RD: Tensor
    """Where each replay leaves its result."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A new graph, what eager computed in its place, and what recording it took."""

    captured: CapturedGraph
    eager_RD: Tensor
    verified: bool
    """Whether its first replay gave eager's bits."""
    milliseconds: float
    device_bytes: int


class TooLittleMemory(Exception):
    """A capture would leave less device memory than the floor."""


class GraphMaker:
    """Captures a tower's forward, key by key, on one arena."""

    def __init__(
        self, forward: Forward, arena: Arena, recorder: Recorder, floor_bytes: int
    ) -> None:
        self._tower = forward.tower
        self._arena = arena
        self._recorder = recorder
        self._floor_bytes = floor_bytes

    def make(self, call: Call) -> Capture:
        """Capture a call's key, replay it once and compare.

        Raises `TooLittleMemory`, or `RuntimeError` where `Recorder.capture` does.
        """
        self._keep_free(0)
        place = self._arena.place(call.layout)
        # At this very shape, on this stream: what loads, compiles or picks an algorithm on first
        # use does it here, where it may allocate.
        eager_RD, scratch = self._recorder.measured(lambda: self._tower(*place, call.output))
        rows_RD = self._arena.rows(call.output, eager_RD)
        before = self._keep_free(max(0, scratch - self._recorder.pool_bytes))
        start = time.perf_counter()
        graph = self._recorder.capture(lambda: rows_RD.copy_(self._tower(*place, call.output)))
        milliseconds = milliseconds_since(start)
        device_bytes = before - self._recorder.free_bytes()
        graph.replay()
        captured = CapturedGraph(call, graph, place, rows_RD)
        verified = same_bits(rows_RD, eager_RD)
        return Capture(captured, eager_RD, verified, milliseconds, device_bytes)

    def _keep_free(self, growth: int) -> int:
        free = self._recorder.free_bytes()
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
        first, *rest = [self.make(call) for call in self._probe_calls()]
        first.captured.graph.reset()
        freed = self._recorder.poison()
        right = [self._still_right(capture) for capture in rest]
        untouched = [bool(block.isnan().all()) for block in freed]
        for capture in rest:
            capture.captured.graph.reset()
        return all(right) and all(untouched)

    def _probe_calls(self) -> list[Call]:
        """Some squares of pixels, as many as the arena admits: one to go and two to stay."""
        merge, prefix = self._tower.merge_size, self._tower.num_prefix
        grids = [(1, side * merge, side * merge) for side in PROBE_SIDES]
        layouts = [PackedLayout.of([grid], prefix) for grid in grids]
        admitted = [layout for layout in layouts if self._arena.admits(layout)]
        return [Call(layout, "pooled") for layout in admitted[-3:]]

    def _still_right(self, capture: Capture) -> bool:
        captured = capture.captured
        self._arena.fill_inputs(captured.place, captured.call.layout)
        captured.graph.replay()
        return capture.verified and same_bits(captured.rows_RD, capture.eager_RD)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal as integers, so that NaN and -0 count. Waits for both."""
    return torch.equal(as_integers(a), as_integers(b))
