"""Batches whose encoder went away are sent again, and only what somebody still waits for."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    OwnerDiedError,
    RayTaskError,
)
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError

from encoders.config import EncoderConfig
from encoders.errors import (
    DeadlineExceeded,
    EncoderError,
    InvalidImage,
    Overloaded,
    ReplicaLost,
)
from encoders.packing import PackedBatch
from serve_app.batcher import MAX_RETRIES, Batcher, QueueLimits
from serve_app.handles import unwrapped
from serve_app.local import LocalSlots
from serve_app.service import Embedding, EncoderGraphs, ImageItem, Rows, Stats
from serve_app.waiting import BatchLimits
from tests.conditions import until

CONFIG = EncoderConfig.load("dinov2-demo")
LOST = ReplicaLost("went away")


class Slots:
    """One slot of encoders that go away when told to; rows are the images' mean values."""

    digest = None

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)
        self.lease_errors = list[Exception]()
        self.encode_errors = list[Exception]()
        self.passes: asyncio.Semaphore | None = None
        """One for each batch that may end; without any, all may."""
        self.num_leases = 0
        self.batches = list[list[int]]()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["Slots"]:
        self.num_leases += 1
        async with self._free:
            if self.lease_errors:
                raise self.lease_errors.pop(0)
            yield self

    async def encode(self, batch: PackedBatch, *_: Any) -> Rows:
        rows = np.zeros((batch.layout.num_images, 1), np.float32)
        sizes = [height * width * 3 for height, width in batch.sizes]
        images = np.split(batch.pixels, np.cumsum(sizes)[:-1])
        rows[list(batch.layout.order), 0] = [image.mean() for image in images]
        self.batches.append([int(row[0]) for row in rows])
        if self.passes is not None:
            await self.passes.acquire()
        if self.encode_errors:
            raise self.encode_errors.pop(0)
        return rows

    async def check_health(self) -> None:
        """Always well."""

    def encoders(self) -> EncoderGraphs:
        return {}

    def record_autoscaling_stats(self) -> Stats:
        return {"outstanding_patches": 7.0}


Submitted = asyncio.Task[list[Embedding]]


def make_batcher(slots: Slots) -> Batcher:
    return Batcher(slots, CONFIG, BatchLimits(), QueueLimits(decode_threads=1))


def image(value: int, *, side: int = 20) -> ImageItem:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (value,) * 3).save(file, "PNG", compress_level=1)
    return ImageItem(f"input[{value}]", file.getvalue())


def values(embeddings: Iterable[Embedding]) -> list[int]:
    return [int(embedding.values[0]) for embedding in embeddings]


def is_idle(batcher: Batcher) -> bool:
    counts = (batcher._num_images, batcher._num_bytes, batcher._decoded.held)
    left = (batcher._waiting, batcher._tasks, batcher._leasing, batcher._undecoded)
    return counts == (0, 0, 0) and not any(left)


@pytest.mark.parametrize("times", range(1, MAX_RETRIES + 1))
@pytest.mark.parametrize("where", ["lease_errors", "encode_errors"])
async def test_an_encoder_that_goes_away_is_not_noticed(where: str, times: int) -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    getattr(slots, where).extend([LOST] * times)

    embeddings = await batcher.submit([image(1)], 60)

    assert values(embeddings) == [1]
    assert slots.num_leases == times + 1
    await until(lambda: is_idle(batcher))


@pytest.mark.parametrize("where", ["lease_errors", "encode_errors"])
async def test_the_last_loss_is_told_to_the_callers_and_the_next_batch_is_served(
    where: str,
) -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    getattr(slots, where).extend([LOST] * (MAX_RETRIES + 1))

    with pytest.raises(ReplicaLost, match="went away"):
        await batcher.submit([image(1)], 60)

    assert slots.num_leases == MAX_RETRIES + 1
    await until(lambda: is_idle(batcher))
    assert values(await batcher.submit([image(3)], 60)) == [3]


async def test_losses_at_the_lease_and_at_the_encoder_count_together() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    slots.lease_errors.extend([LOST] * MAX_RETRIES)
    slots.encode_errors.append(LOST)

    with pytest.raises(ReplicaLost):
        await batcher.submit([image(1)], 60)

    assert slots.num_leases == MAX_RETRIES + 1


@pytest.mark.parametrize("error", [RuntimeError("device lost"), Overloaded("full")], ids=repr)
@pytest.mark.parametrize("where", ["lease_errors", "encode_errors"])
async def test_any_other_error_is_final(where: str, error: Exception) -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    getattr(slots, where).append(error)

    with pytest.raises(type(error), match=str(error)):
        await batcher.submit([image(1)], 60)

    assert slots.num_leases == 1
    await until(lambda: is_idle(batcher))


async def in_one_batch(slots: Slots, batcher: Batcher, *indices: int) -> list[Submitted]:
    """Requests of an image each, together in a batch that is on the encoder and may not end."""
    slots.passes = asyncio.Semaphore(0)
    plug = asyncio.create_task(batcher.submit([image(9)], 60))
    await until(lambda: slots.batches == [[9]])
    requests = [asyncio.create_task(batcher.submit([image(i)], 60)) for i in indices]
    await until(lambda: len(batcher._waiting) == len(indices))
    slots.passes.release()
    await plug
    await until(lambda: len(slots.batches) == 2)
    assert sorted(slots.batches[1]) == list(indices)
    return requests


async def test_only_images_that_are_still_wanted_are_sent_again() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    requests = await in_one_batch(slots, batcher, 0, 1, 2)
    slots.encode_errors.append(LOST)

    requests[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await requests[1]
    for _ in range(2):
        slots.passes.release()

    assert values(await requests[0]) + values(await requests[2]) == [0, 2]
    assert sorted(slots.batches[2]) == [0, 2]
    await until(lambda: is_idle(batcher))


async def test_nothing_is_sent_again_when_everybody_left() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    requests = await in_one_batch(slots, batcher, 0, 1)
    slots.encode_errors.append(LOST)

    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    for _ in range(2):
        slots.passes.release()

    await until(lambda: is_idle(batcher))
    assert len(slots.batches) == 2
    assert values(await batcher.submit([image(3)], 60)) == [3]


async def test_a_caller_whose_time_is_up_is_told_so_and_its_images_are_not_encoded_later() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    slots.passes = asyncio.Semaphore(0)
    plug = asyncio.create_task(batcher.submit([image(9)], 60))
    await until(lambda: slots.batches == [[9]])

    with pytest.raises(DeadlineExceeded, match=r"^2 images were not encoded within 0\.05 s$"):
        await batcher.submit([image(1), image(2)], 0.05)

    for _ in range(2):
        slots.passes.release()
    assert values(await plug) == [9]
    await until(lambda: is_idle(batcher))
    assert slots.batches == [[9]]


async def test_a_batch_is_packed_at_once_however_many_images_are_still_to_be_decoded() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    large = image(5, side=2000)
    first = asyncio.create_task(batcher.submit([image(1)], 60))
    later = [asyncio.create_task(batcher.submit([large], 60)) for _ in range(20)]

    await first

    assert len(batcher._undecoded) > 10, "the first waited for the decoding of those behind it"
    assert [values(x) for x in await asyncio.gather(*later)] == [[5]] * 20


async def test_the_age_of_the_queue_is_that_of_the_oldest_image_not_yet_decoded() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    idle = batcher.record_autoscaling_stats()
    large = image(5, side=2000)
    requests = [asyncio.create_task(batcher.submit([large], 60)) for _ in range(5)]
    await until(lambda: len(batcher._undecoded) == 5)

    first = batcher.record_autoscaling_stats()
    await until(lambda: batcher.record_autoscaling_stats()["queue_age_s"] > first["queue_age_s"])
    await asyncio.gather(*requests)

    assert idle == {"queue_age_s": 0.0, "outstanding_patches": 7.0}
    assert batcher.record_autoscaling_stats()["queue_age_s"] == 0.0


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("encode", "the far side's traceback", cause)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ActorDiedError(), ReplicaLost),
        (ActorUnavailableError("gone", b"\0" * 16), ReplicaLost),
        (ReplicaUnavailableError("gone"), ReplicaLost),
        (ObjectLostError("0" * 56, None, ""), ReplicaLost),
        (OwnerDiedError("0" * 56, None, ""), ReplicaLost),
        (BackPressureError(1, 1), Overloaded),
        (task_error(InvalidImage("broken")), InvalidImage),
        (task_error(ReplicaLost("gone")), ReplicaLost),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_ray_raises_becomes_an_error_of_ours_without_its_traceback(
    raised: Exception, kind: type[EncoderError]
) -> None:
    with pytest.raises(EncoderError) as caught, unwrapped():
        raise raised

    assert type(caught.value) is kind
    assert "traceback" not in str(caught.value)


def test_a_fault_of_the_far_side_stays_what_it_is() -> None:
    with pytest.raises(RayTaskError), unwrapped():
        raise task_error(KeyError("a"))


class Replica:
    """An encoder of this very process, as far as `LocalSlots` knows."""

    async def check_health(self) -> None:
        raise TimeoutError("stuck")

    def record_autoscaling_stats(self) -> Stats:
        return {"outstanding_patches": 3.0}


async def test_local_slots_are_as_many_as_said_and_come_back_after_an_error() -> None:
    slots = LocalSlots(Replica(), 2)  # type: ignore[arg-type]

    async with slots.lease() as first, slots.lease() as second:
        third = asyncio.create_task(slots.lease().__aenter__())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not third.done()
    await third
    for _ in range(3):
        with pytest.raises(KeyError):
            async with slots.lease():
                raise KeyError

    assert first is second
    with pytest.raises(TimeoutError, match="stuck"):
        await slots.check_health()
    assert slots.record_autoscaling_stats() == {"outstanding_patches": 3.0}
