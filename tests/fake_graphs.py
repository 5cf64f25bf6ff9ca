"""A recorder with the rules of torch.cuda.CUDAGraph and of the allocator below it, on the CPU.

A graph keeps the recorded calls and the buffers that they use. Recording writes nothing; what is
written is written by a replay. What the real thing forbids, or gets silently wrong, is refused
here or goes wrong here too.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from encoders.recorder import Measured
from tests.fake_aiter import capturing

GIB = 1 << 30


class Broken(BaseException):  # not an Exception: the runner survives those
    """The runner did what would crash, hang or be silently wrong on a device."""


def must(allowed: bool, what: str) -> None:
    """Raise `Broken` with what the runner did."""
    if not allowed:
        raise Broken(what)


@dataclass(eq=False)
class Pool:
    """Memory that graphs share."""

    graphs: "set[FakeGraph]" = field(default_factory=set)
    used: bool = False
    burnt: bool = False


class FakeGraph:
    """Calls over fixed buffers."""

    def __init__(self, recorder: "FakeRecorder", run: Callable[[], object]) -> None:
        self._recorder = recorder
        self._run = run
        self.pool = recorder.pool
        self.writes: list[Tensor] = []
        self.wrong = False
        """Whether its workspace was taken away, or its recording was bad from the start."""
        self.dead = False
        """Whether it does nothing: HIP may not tell that a capture has failed."""

    def replay(self) -> None:
        self._recorder.check_thread()
        must(self in self.pool.graphs, "replayed a graph that was reset")
        self._recorder.replays += 1
        if self.dead:
            return
        self._run()
        if self.wrong:
            for rows in self.writes:
                rows.add_(1)

    def reset(self) -> None:
        self._recorder.check_thread()
        must(self in self.pool.graphs, "reset a graph twice")
        self.pool.graphs.remove(self)
        if self._recorder.reset_clears_workspace:
            for other in self.pool.graphs:
                other.wrong = True


class Warmth(TorchDispatchMode):
    """Which operators ran on which shapes: the first time of each allocates or loads something."""

    def __init__(self, seen: set[Any], *, recording: bool) -> None:
        super().__init__()
        self._seen = seen
        self._recording = recording
        self.writes: list[Tensor] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = tuple((tuple(x.shape), x.dtype) for x in args if isinstance(x, Tensor))
        if not self._recording:
            self._seen.add((func, shapes))
        elif func is torch.ops.aten.copy_.default:
            self.writes.append(args[0])  # the result's way into the arena, which eager has not
            self._before.append((args[0], args[0].clone()))
        else:
            must((func, shapes) in self._seen, f"a capture met {func} on {shapes}, never warmed")
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        """Recording computes nothing: results are what they were."""
        for rows, before in self._before:
            rows.copy_(before)


class FakeRecorder:
    """A `Recorder` on the CPU. Its switches are what can go wrong."""

    def __init__(self) -> None:
        self.graph_pool_bytes = 0
        self.free = 100 * GIB
        self.scratch = GIB // 8
        self.reset_clears_workspace = False
        self.kill_captures = 0
        """So many captures from now on die, as by another thread's device-wide wait."""
        self.spoil_captures = 0
        """So many graphs from now on compute something else than eager."""
        self.dead_captures = 0
        """So many graphs from now on do nothing."""
        self.eager_ms, self.replay_ms = 20.0, 5.0
        self.captures = self.replays = 0
        self.pool = Pool()
        self._thread = threading.get_ident()
        self._on_stream = 0
        self._seen: set[Any] = set()
        self._cell = torch.zeros(1)
        with self.on_stream():
            self.renew()

    def check_thread(self) -> None:
        must(threading.get_ident() == self._thread, "used from another thread")
        must(self._on_stream > 0, "used off the recorder's stream")

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        self._on_stream += 1
        try:
            yield
        finally:
            self._on_stream -= 1

    def measured(self, run: Callable[[], object]) -> Measured:
        self.check_thread()
        replays = self.replays
        with Warmth(self._seen, recording=False):
            result = run()
        replayed = self.replays > replays
        return Measured(result, self.scratch, self.replay_ms if replayed else self.eager_ms)

    def capture(self, run: Callable[[], object]) -> FakeGraph:
        self.check_thread()
        if self.pool.burnt:
            raise RuntimeError("already recording to mempool_id")
        if self.pool.used and not self.pool.graphs:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pool.used = True
        try:
            writes = self._record(run)
        except BaseException:
            self.pool.burnt = True
            raise
        graph = FakeGraph(self, run)
        graph.writes = writes
        self.pool.graphs.add(graph)
        self.graph_pool_bytes = max(self.graph_pool_bytes, self.scratch)
        self.captures += 1
        if self.spoil_captures:
            self.spoil_captures -= 1
            graph.wrong = True
        if self.dead_captures:
            self.dead_captures -= 1
            graph.dead = True
        return graph

    def _record(self, run: Callable[[], object]) -> list[Tensor]:
        with Warmth(self._seen, recording=True) as warmth, capturing():
            run()
        warmth.undo()
        if self.kill_captures:
            self.kill_captures -= 1
            raise RuntimeError("operation failed due to a previous error during capture")
        return warmth.writes

    def renew(self) -> None:
        self.check_thread()
        anchors = self.pool.graphs
        must(len(anchors) <= 1, f"{len(anchors) - 1} graphs still live in the pool that is left")
        self.pool, self.graph_pool_bytes = Pool(), 0
        with Warmth(self._seen, recording=False):
            self._cell.add_(1)
        self.capture(lambda: self._cell.add_(1))

    def free_bytes(self) -> int:
        return self.free

    def poison(self) -> list[Tensor]:
        return [torch.full((4,), torch.nan)]

    @property
    def live(self) -> int:
        """Graphs in the pool, the anchor apart."""
        return len(self.pool.graphs) - 1
