"""Encoder replicas: one tower on one device behind one engine thread."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
import torch
from ray._private.worker import global_worker

from encoders.config import EncoderConfig
from encoders.packing import PackedBatch, num_patches
from serve_app import metrics
from serve_app.canary import canary_batch
from serve_app.engine import Engine
from serve_app.logs import speak_up
from serve_app.service import Dtype, Encoded, EncoderGraphs, Output, Stats

logger = logging.getLogger(__name__)


class EncoderReplica:
    """Loads an Encoder, shows that it answers, and runs its batches one after another."""

    def __init__(
        self, config: EncoderConfig, device: str, hang_after_s: float, *, lends: bool = False
    ) -> None:
        """`lends`: rows are copied before any caller sees them, as Ray does between processes."""
        speak_up("encoders", logging.INFO)
        if device == "cpu":
            # Ray sets OMP_NUM_THREADS from the logical CPUs that it placed us by, at least 1.
            torch.set_num_threads(os.cpu_count() or 1)
        self._hang_after_s = hang_after_s
        self._outstanding: dict[object, tuple[float, int]] = {}
        self._held_since: dict[str, float] = {}
        self._canary = canary_batch(config)
        self._engine = Engine(config, device, lends=lends)
        self._engine.encode_now(self._canary)

    async def encode(
        self, batch: PackedBatch, output: Output = "pooled", dtypes: Sequence[Dtype] = ()
    ) -> Encoded:
        """Rows for every image, each in its own dtype: float32 if none is given."""
        with self._counted(batch):
            # The engine thread launches, another waits; the loop stays free for health checks.
            return await self._engine.encode(batch, output, dtypes)

    def graphs(self) -> EncoderGraphs:
        """How its graphs stand, under its name."""
        return {self._engine.name: self._engine.graph_stats()}

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


def held_slots() -> frozenset[str]:
    """Tokens of this process's slots that are leased and await their batch; none without Ray."""
    # Ray has no public name for them. A copy, because another thread adds and removes them.
    actors = global_worker.actors.values()
    return frozenset().union(*(frozenset(actor._replica_impl._reserved_slots) for actor in actors))
