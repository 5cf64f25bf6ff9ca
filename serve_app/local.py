"""Encoder slots in this very process: the `fused` topology."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from encoders.config import EncoderConfig
from encoders.packing import PackedBatch
from serve_app.args import AppArgs
from serve_app.batcher import Batcher
from serve_app.replica import EncoderReplica
from serve_app.service import Digest, Dtype, EncoderGraphs, EncoderSlot, Output, Rows, Stats


class LocalSlots:
    """The slots of one encoder, without Ray between."""

    def __init__(self, replica: EncoderReplica, num_slots: int) -> None:
        self._replica = replica
        self._digest: Digest | None = None
        self._free = asyncio.Semaphore(num_slots)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[EncoderSlot]:
        """Wait until a slot is free, and hold it."""
        async with self._free:
            yield self

    async def encode(
        self, batch: PackedBatch, output: Output, dtypes: Sequence[Dtype]
    ) -> Sequence[Rows] | Rows:
        """One array per image, in order of arrival, each in its own dtype."""
        encoded = await self._replica.encode(batch, output, dtypes)
        self._digest = encoded.digest
        return encoded.rows

    @property
    def digest(self) -> Digest | None:
        """What this process's encoder could replay when its last batch ended."""
        return self._digest

    def encoders(self) -> EncoderGraphs:
        """How this process's own encoder stands."""
        return self._replica.graphs()

    async def check_health(self) -> None:
        """Raise if the encoder is stuck."""
        await self._replica.check_health()

    def record_autoscaling_stats(self) -> Stats:
        """What the encoder has outstanding."""
        return self._replica.record_autoscaling_stats()


def fused_service(args: AppArgs, config: EncoderConfig, num_slots: int) -> Batcher:
    """A Batcher over an encoder, both in this very process."""
    replica = EncoderReplica(config, args.device, args.hang_after_s)
    return Batcher(LocalSlots(replica, num_slots), config, args.batch, args.queue)
