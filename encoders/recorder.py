"""The runtime below captured graphs: one stream, one memory pool, capture and its failures."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

POISON_MIB = (1, 2, 4, 8, 16, 32, 64, 128)
"""Blocks to take back from the allocator: a BLAS workspace is 32 MiB, on gfx94x and gfx95x 128."""


class Graph(Protocol):
    """Recorded kernels with every address that they use."""

    def replay(self) -> None:
        """Run them on the current stream. Waits for nothing."""
        ...

    def reset(self) -> None:
        """Free it. On ROCm this waits for the whole device."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """A call's result and what it took."""

    result: Any
    scratch_bytes: int
    """Device memory that it had taken at its peak."""
    milliseconds: float
    """From its start to the end of all that it launched: what a caller would have waited."""


class Recorder(Protocol):
    """What records graphs into one shared pool. One thread uses it: the one that runs the tower."""

    graph_pool_bytes: int
    """Device memory that the present pool has taken."""

    def on_stream(self) -> AbstractContextManager[None]:
        """The block runs on the recorder's stream, after what the caller's stream had to do."""
        ...

    def measured(self, run: Callable[[], object]) -> "Measured":
        """Run it and wait for it."""
        ...

    def capture(self, run: Callable[[], object]) -> Graph:
        """Record `run` without running it. Raises `RuntimeError`, and the pool is then lost.

        Graphs that were captured before stay good; `renew` has to come before the next capture.
        """
        ...

    def renew(self) -> None:
        """Take a fresh pool, after every graph of the old one has been reset.

        Raises `RuntimeError` if the pool's anchor cannot be captured.
        """
        ...

    def free_bytes(self) -> int:
        """Device memory that nobody has taken."""
        ...

    def poison(self) -> list[Tensor]:
        """NaN in as much recently freed memory as can be had, held by the list."""
        ...


class CudaRecorder:
    """A `Recorder` of CUDA or HIP graphs."""

    def __init__(self, device: torch.device) -> None:
        self.graph_pool_bytes = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._cell = torch.zeros(1, device=device)
        self._anchor: Graph | None = None
        with self.on_stream():
            self._cell.add_(1)  # its kernel is loaded now: inside a capture it could not be
            self.renew()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """The block runs on the recorder's stream, after what the caller's stream had to do."""
        outer = torch.cuda.current_stream(self._device)
        if outer == self._stream:
            yield
            return
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        # Also why results may be freed at any time: whoever reuses their memory came after.
        outer.wait_stream(self._stream)

    def measured(self, run: Callable[[], object]) -> "Measured":
        """Run it and wait for it."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._stream.synchronize()  # else the time of what came before would count
        start = time.perf_counter()
        result = run()
        self._stream.synchronize()
        milliseconds = milliseconds_since(start)
        scratch = torch.cuda.max_memory_allocated(self._device) - before
        return Measured(result, scratch, milliseconds)

    def capture(self, run: Callable[[], object]) -> Graph:
        """Record `run` without running it. Raises `RuntimeError`, and the pool is then lost.

        Not `torch.cuda.graph`, which waits for the device and empties the allocator's caches.
        """
        reserved = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on allocating and asking events; in the default mode each would kill
        # the capture. A wait for the whole device still does.
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        try:
            run()
        finally:  # raises in its turn if the capture is dead
            graph.capture_end()
        self.graph_pool_bytes += torch.cuda.memory_reserved(self._device) - reserved
        return graph

    def renew(self) -> None:
        """Take a fresh pool, after every graph of the old one has been reset."""
        if self._anchor is not None:
            self._anchor.reset()
            self._anchor = None
        torch.cuda.empty_cache()  # the old pool's memory goes back before the new one grows
        self.graph_pool_bytes = 0
        self._graph_pool = torch.cuda.graph_pool_handle()
        # A pool whose last graph is gone cannot be captured into again: this one never goes.
        self._anchor = self.capture(lambda: self._cell.add_(1))

    def free_bytes(self) -> int:
        """Device memory that nobody has taken."""
        return torch.cuda.mem_get_info(self._device)[0]

    def poison(self) -> list[Tensor]:
        """NaN in as much recently freed memory as can be had, held by the list."""
        sizes = (mib << 18 for mib in POISON_MIB)  # of 4 bytes each
        return [torch.full((size,), torch.nan, device=self._device) for size in sizes]


def milliseconds_since(start: float) -> float:
    """Since a moment of `time.perf_counter`."""
    return (time.perf_counter() - start) * 1e3
