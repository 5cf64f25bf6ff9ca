"""Encoder replicas: one tower on one device behind one engine thread."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import ray
import torch
from ray._private.worker import global_worker
from torch import Tensor

from encoders.config import EncoderConfig
from encoders.encoder import DTYPES, Encoder
from encoders.packing import PackedBatch, num_patches
from serve_app import metrics
from serve_app.canary import canary_batch
from serve_app.logs import speak_up
from serve_app.service import Dtype, Output, Rows, Stats

logger = logging.getLogger(__name__)


class EncoderReplica:
    """Loads an Encoder, shows that it answers, and runs its batches one after another."""

    def __init__(self, config: EncoderConfig, device: str, hang_after_s: float) -> None:
        speak_up("encoders", logging.INFO)
        if device == "cpu":
            # Ray sets OMP_NUM_THREADS from the logical CPUs that it placed us by, at least 1.
            torch.set_num_threads(os.cpu_count() or 1)
        self._hang_after_s = hang_after_s
        self._outstanding: dict[object, tuple[float, int]] = {}
        self._held_since: dict[str, float] = {}
        self._canary = canary_batch(config)
        self._engine = ThreadPoolExecutor(1, "engine")
        self._encoder = self._engine.submit(Encoder.load, config, device).result()
        self._engine.submit(self._encode, self._canary).result()

    async def encode(
        self, batch: PackedBatch, output: Output = "pooled", dtypes: Sequence[Dtype] = ()
    ) -> Sequence[Rows] | Rows:
        """One array per image, in order of arrival, each in its own dtype: float32 if none is."""
        with self._counted(batch):
            # The engine thread alone touches the device; the loop stays free for health checks.
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._engine, self._encode, batch, output, dtypes)

    async def check_health(self) -> None:
        """Raise if a batch has been here too long; when idle, see whether the canary sings.

        A kernel that hangs in its thread leaves this loop alive, so age is what tells.
        """
        now = time.monotonic()
        await self._free_abandoned_slots(now)
        age_s = now - min((since for since, _ in self._outstanding.values()), default=now)
        if age_s > self._hang_after_s:
            raise TimeoutError(f"a batch is {age_s:.0f} s old, the limit is {self._hang_after_s}")
        if not self._outstanding:
            async with asyncio.timeout(self._hang_after_s):
                await self.encode(self._canary)

    def record_autoscaling_stats(self) -> Stats:
        """Patches in this replica's slots."""
        return {"outstanding_patches": sum(n for _, n in self._outstanding.values())}

    async def _free_abandoned_slots(self, now: float) -> None:
        """Ray keeps a slot for ever for a caller that dies before its batch is sent."""
        held = held_slots()
        self._held_since = {token: self._held_since.get(token, now) for token in held}
        for token, since in self._held_since.items():
            if now - since > self._hang_after_s:
                logger.warning("a slot is free again: no batch came for it in %.0f s", now - since)
                await ray.get_runtime_context().current_actor.release_slot.remote(token)

    def _encode(
        self, batch: PackedBatch, output: Output = "pooled", dtypes: Sequence[Dtype] = ()
    ) -> Sequence[Rows] | Rows:
        dtypes = dtypes or ["float32"] * batch.layout.num_images
        # Of several, the widest: narrowed from it on the host, a value has the same bits.
        common = dtypes[0] if len(set(dtypes)) == 1 else "float32"
        with metrics.timed("encoder_forward_ms"):
            results = self._encoder.encode(batch, output, common)
        if output == "pooled" and set(dtypes) == {"float32"}:
            return torch.stack(results).numpy()  # travels as one object
        return [as_rows(x, dtype) for x, dtype in zip(results, dtypes, strict=True)]

    @contextmanager
    def _counted(self, batch: PackedBatch) -> Iterator[None]:
        ticket = object()
        patches = sum(num_patches(grid) for grid in batch.layout.grid_thw)
        self._outstanding[ticket] = time.monotonic(), patches
        gauge = metrics.gauge("encoder_outstanding_patches")
        gauge.set(sum(n for _, n in self._outstanding.values()))
        try:
            yield
        finally:
            del self._outstanding[ticket]
            gauge.set(sum(n for _, n in self._outstanding.values()))


def as_rows(result: Tensor, dtype: Dtype) -> Rows:
    """A host tensor as NumPy's array of that type; of bfloat16, the bits."""
    result = result.to(DTYPES[dtype])
    if dtype == "bfloat16":
        return result.view(torch.int16).numpy().view(np.uint16)
    return result.numpy()


def held_slots() -> frozenset[str]:
    """Tokens of this process's slots that are leased and await their batch; none without Ray."""
    # Ray has no public name for them. A copy, because another thread adds and removes them.
    actors = global_worker.actors.values()
    return frozenset().union(*(frozenset(actor._replica_impl._reserved_slots) for actor in actors))
