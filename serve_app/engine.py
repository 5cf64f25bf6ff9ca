"""The one thread that works on a device, the Encoder that lives on it, and who waits for rows."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from encoders.config import EncoderConfig
from encoders.encoder import DTYPES, Encoder
from encoders.forward import Results
from encoders.packing import PackedBatch
from serve_app import metrics
from serve_app.graph_metrics import publish
from serve_app.service import Digest, Dtype, Encoded, GraphStats, Output, Rows

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_SHARE = 0.02
"""Of its time that an engine without a pause spends on idle work, in steps of about two batches."""
RESTS_S = 0.1, 10.0
"""After a step, at least and at most: one may do nothing, and one may wait for a compiler."""


class Engine:
    """Loads an Encoder and starts its batches one behind another; captures graphs in the pauses."""

    def __init__(self, config: EncoderConfig, device: str, *, lends: bool = False) -> None:
        """`lends`: rows may be in pinned memory, for a caller that copies them and lets go."""
        self._lends = lends
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        """Of this process among all of the cluster's."""
        self._thread = ThreadPoolExecutor(1, "engine")
        self._waiter = ThreadPoolExecutor(1, "waiter")
        self._encoder = self._thread.submit(Encoder.load, config, device).result()
        self._published = GraphStats()
        self._told = self._thread.submit(self._encoder.graphs.stats).result()
        self._num_batches = 0
        self._rests_until = 0.0
        self._idle_work: asyncio.Task[None] | None = None

    def encode_now(self, batch: PackedBatch) -> None:
        """Encode a batch while no loop runs yet."""
        self._thread.submit(self._start, batch, "pooled", "float32").result().results.wait()

    async def encode(self, batch: PackedBatch, output: Output, dtypes: Sequence[Dtype]) -> Encoded:
        """Rows for every image, each in its own dtype: float32 if none is given."""
        self._num_batches += 1
        dtypes = dtypes or ["float32"] * batch.layout.num_images
        # Of several, the widest: narrowed from it on the host, a value has the same bits.
        common = dtypes[0] if len(set(dtypes)) == 1 else "float32"
        try:
            started = await self._in(self._thread, self._start, batch, output, common)
            # The next batch is uploaded and launched meanwhile: the device finds it waiting.
            wait = partial(to_rows, started.results, output, dtypes, lends=self._lends)
            rows = await self._in(self._waiter, wait)
        finally:
            self._num_batches -= 1
        metrics.histogram("encoder_forward_ms").observe(started.results.milliseconds)
        publish(started.graphs, self._published)
        self._told = self._published = started.graphs
        self._resume_idle_work()
        return Encoded(rows, self.name, started.graphs, started.digest)

    def graph_stats(self) -> GraphStats:
        """What the Encoder's graph runner had done when the last batch ended, or at the start."""
        return self._told

    def _start(self, batch: PackedBatch, output: Output, dtype: Dtype) -> "Started":
        results = self._encoder.start(batch, output, dtype)
        # On this thread: it alone changes what is told of.
        graphs = self._encoder.graphs
        return Started(results, graphs.stats(), graphs.digest())

    def _resume_idle_work(self) -> None:
        going_on = self._idle_work is not None and not self._idle_work.done()
        if not going_on and self._encoder.graphs.has_work and self._may_idle():
            self._idle_work = asyncio.create_task(self._work_while_idle())
            self._idle_work.add_done_callback(_log_error)

    async def _work_while_idle(self) -> None:
        more = True
        while more and self._may_idle():
            more = await self._in(self._thread, self._step, not self._num_batches)

    def _step(self, may_rebuild: bool) -> bool:
        begin = time.monotonic()
        try:
            return self._encoder.idle(may_rebuild=may_rebuild)
        finally:
            end = time.monotonic()
            least, most = RESTS_S
            self._rests_until = end + min(max((end - begin) / BUSY_SHARE, least), most)

    def _may_idle(self) -> bool:
        return not self._num_batches or time.monotonic() > self._rests_until

    async def _in(self, thread: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, function, *args)


class Started(NamedTuple):
    """A batch on the device, and how its encoder stood behind it."""

    results: Results
    graphs: GraphStats
    digest: Digest | None


def to_rows(
    results: Results, output: Output, dtypes: Sequence[Dtype], *, lends: bool
) -> Sequence[Rows] | Rows:
    """Wait for a batch; each image's rows in its own dtype."""
    tensors = results.wait()
    if output == "pooled" and set(dtypes) == {"float32"}:
        return torch.stack(tensors).numpy()  # travels as one object
    return [as_rows(x, dtype, lends) for x, dtype in zip(tensors, dtypes, strict=True)]


def as_rows(result: Tensor, dtype: Dtype, lends: bool) -> Rows:
    """A host tensor as NumPy's array of that type; of bfloat16, the bits.

    Unless lent not in pinned memory, which torch never gives back: a slow client would hold a whole
    batch's.
    """
    result = result.to(DTYPES[dtype], copy=not lends and result.is_pinned())
    if dtype == "bfloat16":
        return result.view(torch.int16).numpy().view(np.uint16)
    return result.numpy()


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("idle work failed; batches are served nonetheless", exc_info=error)
