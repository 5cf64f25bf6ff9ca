"""Replays a tower as HIP or CUDA graphs where that is exact and affordable, else runs it eagerly.

One forward serves both: a graph is a recording of it. Shapes: P = patches, C = values of a patch,
R = rows of a result, D = their width.
"""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from encoders.captured import GraphMaker
from encoders.config import GraphSettings
from encoders.forward import Forward
from encoders.graph_stats import Digest, GraphStats, Miss
from encoders.graph_store import GraphStore
from encoders.invariance import parts, verified_floor
from encoders.packing import Call, PackedLayout

logger = logging.getLogger(__name__)


class GraphRunner:
    """Runs a tower's batches. Not thread-safe: the engine thread calls it, and makes it.

    A batch whose key has a graph is replayed. Every other runs eagerly at once; what it lacked
    is captured in `idle`, compared with eager as integers, and used from then on.
    """

    def __init__(self, forward: Forward, settings: GraphSettings, maker: GraphMaker | None) -> None:
        self._forward = forward
        self._settings = settings
        self._stats = GraphStats(precision=settings.precision)
        self._off: Miss = "off" if settings.graph_mode == "off" else "backend"
        self._on_stream = nullcontext if maker is None else maker.recorder.on_stream
        self._store: GraphStore | None = None
        with self.on_stream():
            if maker is not None:
                self._store = GraphStore(maker, settings, self._stats)
            if settings.precision == "invariant":
                self._stats.invariant_from = verified_floor(
                    forward, settings.max_patches, settings.max_images
                )

    @classmethod
    def on(cls, forward: Forward, settings: GraphSettings) -> "GraphRunner":
        """A runner for the forward's device.

        Raises `ConfigError` if what is promised of bits cannot be kept there.
        """
        return cls(forward, settings, GraphMaker.on(forward, settings))

    def on_stream(self) -> AbstractContextManager[None]:
        """The block's device work belongs to the runner's stream: eager and replays share one."""
        return self._on_stream()

    @torch.inference_mode()
    def run(self, patches_PC: Tensor, call: Call) -> Tensor:
        """A batch's rows [R, D], in memory that belongs to the caller.

        Waits for nothing, but one replay in `shadow_every`, which is compared with eager.
        """
        with self.on_stream():
            floor = self._stats.invariant_from
            if floor is None:
                return self._run(patches_PC, call)
            calls = [Call(layout, call.output) for layout in self._parts(call.layout, floor)]
            own = torch.split(patches_PC, [part.layout.num_patches for part in calls])
            return torch.cat([self._run(x_PC, x) for x_PC, x in zip(own, calls, strict=True)])

    def _parts(self, layout: PackedLayout, floor: int) -> list[PackedLayout]:
        limits = self._settings.max_patches, self._settings.max_images
        return parts(layout, floor, *limits)

    def _run(self, patches_PC: Tensor, call: Call) -> Tensor:
        if self._store is None:
            self._stats.missed(self._off)
            return self._forward.eager(patches_PC, call)
        captured = self._store.find(call)
        if captured is None:
            self._stats.missed(self._store.miss(call))
            return self._eager(self._store, patches_PC, call)
        self._stats.hits += 1
        rows_RD = self._store.replay(captured, patches_PC, call)
        if not self._store.is_due(captured):
            return rows_RD
        try:
            eager_RD = self._forward.eager(patches_PC, call)
        except torch.OutOfMemoryError:
            return rows_RD  # there is an answer: the check has to wait
        return rows_RD if self._store.confirms(captured, rows_RD, eager_RD) else eager_RD

    @torch.inference_mode()
    def idle(self, *, may_rebuild: bool = True) -> bool:
        """Take one step of what no request should wait for; whether there is another to take.

        A step takes about as long as two batches: a recording, one measurement beside eager, or one
        comparison with it, of which a graph has to pass several. Giving up all graphs for new ones
        is another. Waits for the device.
        """
        if self._store is not None:
            with self.on_stream():
                self._store.work(may_rebuild=may_rebuild)
        return self.has_work

    @property
    def has_work(self) -> bool:
        """Whether `idle` would do something. Any thread may ask."""
        return self._store is not None and self._store.has_work

    def capture_now(self, calls: list[Call]) -> None:
        """Capture what these would lack, before anybody waits; the first stays the hottest."""
        if self._store is None:
            return
        for call in reversed(calls[: self._settings.graph_capacity]):
            # Where its budget turns out to change bits, its exact layout is next.
            while self._store.ask_for(call) and self.has_work:
                while self.idle():
                    pass

    def release(self) -> None:
        """Give up every graph and the pool's memory. The same keys may be captured again."""
        if self._store is not None:
            with self.on_stream():
                self._store.release()

    def rebuild(self) -> None:
        """Give up every graph and the pool; the hottest are captured anew in `idle`."""
        if self._store is not None:
            with self.on_stream():
                self._store.rebuild()

    def poison(self) -> None:
        """NaN in the arena and in all scratch of all graphs: what survives was not shared.

        For tests and for the search for faults. A replay after it has to be right nonetheless.
        """
        if self._store is not None:
            with torch.inference_mode(), self.on_stream():
                self._store.poison()

    def stats(self) -> GraphStats:
        """What was done so far, as a record that does not change."""
        if self._store is not None:
            self._store.measure(self._stats)
        return self._stats.snapshot()

    def digest(self) -> Digest | None:
        """What can be replayed now; None if nothing ever will.

        None for `invariant` too: which images share a batch is then decided here.
        """
        if self._store is None or self._stats.invariant_from is not None:
            return None
        return self._store.digest()

    def usual_calls(self) -> list[Call]:
        """What to capture before anything was seen."""
        num_prefix = self._forward.tower.num_prefix
        return [] if self._store is None else self._store.usual_calls(num_prefix)

    def hottest(self) -> list[Call]:
        """What has a graph, most recently used first."""
        graphs = [] if self._store is None else self._store.graphs()
        return [captured.call for captured in graphs]

    def _eager(self, store: GraphStore, patches_PC: Tensor, call: Call) -> Tensor:
        try:
            return self._forward.eager(patches_PC, call)
        except torch.OutOfMemoryError:
            if not len(store):
                raise
            logger.warning("graphs give up their memory: a batch needs it")
        store.release()
        return self._forward.eager(patches_PC, call)
