"""Batches grow, split and fail as promised, and nothing that happens leaves a caller waiting."""

import asyncio
import io
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
from PIL import Image

from encoders.config import EncoderConfig, ShortestEdge
from encoders.errors import (
    BackendUnavailable,
    EncoderError,
    InvalidImage,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    UnsupportedImageType,
)
from encoders.graph_keys import Planner
from encoders.graph_stats import Digest
from encoders.packing import Call, PackedBatch, PackedLayout
from serve_app import batcher as batcher_module
from serve_app import waiting as waiting_module
from serve_app.batcher import Batcher, QueueLimits
from serve_app.canary import CANARY
from serve_app.service import Embedding, EncoderGraphs, ImageItem, Rows
from serve_app.waiting import BatchLimits
from tests.conditions import until

SIDE = 14
CONFIG = EncoderConfig.load("dinov2-demo").model_copy(
    # An image of one patch's height has as many patches as its width has sides.
    update={
        "resize": ShortestEdge(rule="shortest_edge", shortest_edge=SIDE, max_pixels=SIDE**2 * 9)
    }
)
IMAGE_BYTES = SIDE * SIDE * 3
Colour = tuple[int, int, int]
CALLER = ContextVar[str]("CALLER", default="nobody")

TIMEOUT_S = 60.0


class Slots:
    """Real slots whose encoder answers with each image's mean colour, when `go` is set."""

    def __init__(self, num_slots: int = 1) -> None:
        self._free = asyncio.Semaphore(num_slots)
        self.go = asyncio.Event()
        self.go.set()
        self.batches = list[list[Colour]]()
        """The colours of each batch, in order of arrival."""
        self.num_leases = 0
        self.callers = list[str]()
        self.lease_error: BaseException | None = None
        self.change: Callable[[Rows], Rows] = lambda rows: rows
        self.digest: Digest | None = None

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["Slots"]:
        self.num_leases += 1
        self.callers.append(CALLER.get())
        async with self._free:
            if self.lease_error is not None:
                raise self.lease_error
            yield self

    async def encode(self, batch: PackedBatch, *_: Any) -> Rows:
        rows = mean_colours(batch)
        self.batches.append([tuple(int(value) for value in row) for row in rows])
        await self.go.wait()
        return self.change(rows)

    def encoders(self) -> EncoderGraphs:
        return {}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {}

    @property
    def batch_sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


def mean_colours(batch: PackedBatch) -> Rows:
    rows = np.zeros((batch.layout.num_images, 3), np.float32)
    sizes = [height * width * 3 for height, width in batch.sizes]
    images = np.split(batch.pixels, np.cumsum(sizes)[:-1])
    for arrival, image in zip(batch.layout.order, images, strict=True):
        rows[arrival] = image.reshape(-1, 3).mean(0).round()
    return rows


def make_batcher(
    slots: Slots, batch: BatchLimits | None = None, queue: QueueLimits | None = None
) -> Batcher:
    # With one thread, images wait in the order in which they came.
    return Batcher(slots, CONFIG, batch or BatchLimits(), queue or QueueLimits(decode_threads=1))


def colour(index: int) -> Colour:
    return (index % 251, index * 7 % 251, 255 - index % 251)


def image(index: int, *, num_patches: int = 1, format: str = "PNG") -> ImageItem:
    file = io.BytesIO()
    Image.new("RGB", (SIDE * num_patches, SIDE), colour(index)).save(file, format)
    return ImageItem(f"input[{index}]", file.getvalue())


def truncated(index: int) -> ImageItem:
    """A file whose header is whole, so that only decoding finds it broken."""
    file = io.BytesIO()
    noise = np.random.default_rng(index).integers(0, 256, (40, 40, 3), np.uint8)
    Image.fromarray(noise).save(file, "JPEG")
    return ImageItem(f"input[{index}]", file.getvalue()[:-400])


def colours(embeddings: Iterable[Embedding]) -> list[Colour]:
    return [tuple(int(value) for value in embedding.values) for embedding in embeddings]


def is_idle(batcher: Batcher) -> bool:
    counts = (batcher._num_images, batcher._num_bytes, batcher._decoded.held)
    left = (batcher._waiting, batcher._tasks, batcher._leasing)
    return counts == (0, 0, 0) and not any(left)


Submitted = asyncio.Task[list[Embedding]]


async def waiting(batcher: Batcher, *items: ImageItem) -> Submitted:
    """A request whose images are all decoded and wait for a slot, behind those before it."""
    goal = len(batcher._waiting) + len(items)
    task = asyncio.create_task(batcher.submit(items, TIMEOUT_S))
    await until(lambda: len(batcher._waiting) == goal)
    return task


async def plugged(slots: Slots, batcher: Batcher) -> Submitted:
    """A request that keeps the only slot busy until `go`; its batch is the first."""
    slots.go.clear()
    task = asyncio.create_task(batcher.submit([image(200)], TIMEOUT_S))
    await until(lambda: len(slots.batches) == 1)
    return task


async def test_each_image_gets_its_own_row_in_the_order_of_the_request() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    sizes = [1, 5, 2, 9, 1, 3, 9, 1]  # the packed order is another

    embeddings = await batcher.submit(
        [image(i, num_patches=n) for i, n in enumerate(sizes)], TIMEOUT_S
    )

    assert colours(embeddings) == [colour(i) for i in range(len(sizes))]
    assert [embedding.num_patches for embedding in embeddings] == sizes
    assert all(embedding.values.dtype == np.float32 for embedding in embeddings)
    await until(lambda: is_idle(batcher))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP"])
async def test_real_files_are_decoded_before_they_reach_the_encoder(format: str) -> None:
    batcher = make_batcher(Slots())

    (embedding,) = await batcher.submit([image(100, format=format)], TIMEOUT_S)

    np.testing.assert_allclose(embedding.values, colour(100), atol=3)


async def test_the_canary_is_an_image_like_any_other() -> None:
    batcher = make_batcher(Slots())

    (embedding,) = await batcher.submit([CANARY], TIMEOUT_S)

    assert np.isfinite(embedding.values).all()


async def test_no_images_are_answered_without_a_slot() -> None:
    slots = Slots()
    batcher = make_batcher(slots)

    embeddings = await batcher.submit([], TIMEOUT_S)

    assert embeddings == []
    assert slots.num_leases == 0


async def test_a_batch_grows_while_the_slot_is_busy() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    requests = [await waiting(batcher, image(i), image(i + 100)) for i in range(3)]

    slots.go.set()
    await asyncio.gather(plug, *requests)

    assert slots.batches[1] == [colour(i) for i in (0, 100, 1, 101, 2, 102)]
    assert slots.batch_sizes == [1, 6]


async def test_what_comes_while_a_batch_runs_asks_for_one_more_slot_and_no_more() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)

    requests = [await waiting(batcher, image(i)) for i in range(5)]

    assert slots.num_leases == 2
    slots.go.set()
    await asyncio.gather(plug, *requests)


async def test_a_second_slot_runs_a_second_batch_at_the_same_time() -> None:
    slots = Slots(2)
    batcher = make_batcher(slots)
    first = await plugged(slots, batcher)

    second = asyncio.create_task(batcher.submit([image(1)], TIMEOUT_S))
    await until(lambda: len(slots.batches) == 2)

    assert not first.done()
    slots.go.set()
    assert colours(await first) + colours(await second) == [colour(200), colour(1)]


@pytest.mark.parametrize(
    "limits",
    [
        BatchLimits(max_images=2),
        BatchLimits(max_patches=2),
        BatchLimits(max_bytes=2 * IMAGE_BYTES),
        BatchLimits(max_patches=2, max_bytes=3 * IMAGE_BYTES - 1),
    ],
    ids=repr,
)
async def test_each_budget_splits_a_batch(limits: BatchLimits) -> None:
    slots = Slots()
    batcher = make_batcher(slots, limits)
    plug = await plugged(slots, batcher)
    request = await waiting(batcher, *(image(i) for i in range(5)))

    slots.go.set()
    await plug
    embeddings = await request

    assert slots.batch_sizes == [1, 2, 2, 1]
    assert colours(embeddings) == [colour(i) for i in range(5)]


async def test_while_rows_are_read_through_the_next_batch_has_the_slot_and_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    count = waiting_module.count_not_finite

    def slow_count(batch: Sequence[waiting_module.Waiting], rows: Rows) -> list[int]:
        begun.set()
        assert go_on.wait(30)
        return count(batch, rows)

    monkeypatch.setattr(waiting_module, "count_not_finite", slow_count)
    monkeypatch.setattr(batcher_module, "LITTLE", 0)
    slots = Slots(num_slots=1)
    batcher = make_batcher(slots)
    first = asyncio.create_task(batcher.submit([image(1)], 60))
    await until(begun.is_set)

    second = asyncio.create_task(batcher.submit([image(2)], 60))
    await until(lambda: len(slots.batches) == 2)

    assert not first.done()
    go_on.set()
    assert colours(await first) + colours(await second) == [colour(1), colour(2)]


@pytest.mark.parametrize(
    "limits", [BatchLimits(max_patches=4), BatchLimits(max_bytes=4 * IMAGE_BYTES)], ids=repr
)
async def test_a_big_image_is_not_overtaken_by_small_ones_behind_it(limits: BatchLimits) -> None:
    slots = Slots()
    batcher = make_batcher(slots, limits)
    plug = await plugged(slots, batcher)
    sizes = [3, 4, 1, 1, 2, 1]
    requests = [await waiting(batcher, image(i, num_patches=n)) for i, n in enumerate(sizes)]

    slots.go.set()
    await asyncio.gather(plug, *requests)

    assert slots.batches[1:] == [
        [colour(0)],
        [colour(1)],
        [colour(2), colour(3), colour(4)],
        [colour(5)],
    ]


@pytest.mark.parametrize("limits", [BatchLimits(max_patches=4), BatchLimits(max_bytes=9)], ids=repr)
async def test_an_image_over_a_budget_gets_a_batch_of_its_own(limits: BatchLimits) -> None:
    slots = Slots()
    batcher = make_batcher(slots, limits)
    plug = await plugged(slots, batcher)
    requests = [await waiting(batcher, image(i, num_patches=9)) for i in range(2)]

    slots.go.set()
    await asyncio.gather(plug, *requests)

    assert slots.batch_sizes == [1, 1, 1]


async def test_images_past_the_queue_are_refused_with_the_numbers_until_there_is_room() -> None:
    slots = Slots()
    batcher = make_batcher(slots, queue=QueueLimits(max_images=3))
    plug = await plugged(slots, batcher)
    request = await waiting(batcher, image(0))

    with pytest.raises(Overloaded, match=r"^2 images wait and 2 came, the limit is 3$"):
        await batcher.submit([image(1), image(2)], TIMEOUT_S)

    last = await waiting(batcher, image(3))  # exactly full
    slots.go.set()
    await asyncio.gather(plug, request, last)
    assert len(await batcher.submit([image(i) for i in range(3)], TIMEOUT_S)) == 3


async def test_bytes_past_the_queue_are_refused_with_the_numbers_until_there_is_room() -> None:
    slots = Slots()
    size = len(image(200).data)
    batcher = make_batcher(slots, queue=QueueLimits(max_bytes=2 * size))
    plug = await plugged(slots, batcher)
    more = ImageItem("image", b"x" * (size + 1))
    message = f"^{size} bytes wait and {size + 1} came, the limit is {2 * size}$"

    with pytest.raises(Overloaded, match=message):
        await batcher.submit([more], TIMEOUT_S)

    last = await waiting(batcher, image(200))  # exactly full
    slots.go.set()
    await asyncio.gather(plug, last)
    assert len(await batcher.submit([image(200)], TIMEOUT_S)) == 1


async def test_a_request_that_is_refused_leaves_no_trace_in_the_counters() -> None:
    batcher = make_batcher(Slots(), queue=QueueLimits(max_images=1))

    with pytest.raises(Overloaded):
        await batcher.submit([image(0), image(1)], TIMEOUT_S)

    assert is_idle(batcher)


async def test_no_more_is_decoded_than_the_budget_holds() -> None:
    slots, held = Slots(), list[int]()
    limit = 3 * IMAGE_BYTES
    batcher = make_batcher(slots, queue=QueueLimits(max_decoded_bytes=limit, decode_threads=1))

    def note(rows: Rows) -> Rows:
        held.append(batcher._decoded.held)
        return rows

    slots.change = note
    plug = await plugged(slots, batcher)
    request = asyncio.create_task(batcher.submit([image(i) for i in range(7)], TIMEOUT_S))
    await until(lambda: len(batcher._waiting) == 2)

    slots.go.set()
    await plug
    embeddings = await request

    assert slots.batch_sizes[:2] == [1, 2]
    assert max(held) <= limit
    assert colours(embeddings) == [colour(i) for i in range(7)]


async def test_images_that_wait_for_an_encoder_do_not_age_the_decoding_queue() -> None:
    slots, limit = Slots(), 3 * IMAGE_BYTES
    batcher = make_batcher(slots, queue=QueueLimits(max_decoded_bytes=limit, decode_threads=1))
    batcher._slots.record_autoscaling_stats = dict
    plug = await plugged(slots, batcher)
    request = asyncio.create_task(batcher.submit([image(i) for i in range(7)], TIMEOUT_S))
    await until(lambda: len(batcher._waiting) == 2)  # the budget is full, and five images wait

    stats = batcher.record_autoscaling_stats()

    assert stats["queue_age_s"] == 0
    slots.go.set()
    await plug
    await request


BAD = {
    "empty": (ImageItem("input[7]", b""), InvalidRequest),
    "text": (ImageItem("input[7]", b"no image at all"), UnsupportedImageType),
    "no header": (ImageItem("input[7]", b"\x89PNG\r\n\x1a\nxxxx"), InvalidImage),
    "truncated": (truncated(7), InvalidImage),
    "huge": (image(7, num_patches=300), InvalidImage),
    "too large": (ImageItem("input[7]", b"x" * (CONFIG.limits.max_bytes + 1)), RequestTooLarge),
}


@pytest.mark.parametrize(("bad", "kind"), BAD.values(), ids=BAD)
async def test_a_bad_item_fails_its_own_request_by_name_and_no_neighbour(
    bad: ImageItem, kind: type[EncoderError]
) -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    before = await waiting(batcher, image(0))

    with pytest.raises(kind, match=r"^input\[7\]: ") as caught:
        await batcher.submit([image(1), bad, image(2)], TIMEOUT_S)

    after = await waiting(batcher, image(3))
    slots.go.set()
    await plug
    assert caught.value.item == "input[7]"
    assert colours(await before) + colours(await after) == [colour(0), colour(3)]
    assert slots.batches[1:] == [[colour(0), colour(3)]], "the bad request cost encoder time"
    await until(lambda: is_idle(batcher))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_a_row_that_is_not_finite_is_the_error_of_its_image_alone(value: float) -> None:
    slots = Slots()
    batcher = make_batcher(slots)

    def spoil(rows: Rows) -> Rows:
        rows[(rows == colour(7)).all(1), 1] = value
        return rows

    slots.change = spoil
    plug = await plugged(slots, batcher)
    neighbour = await waiting(batcher, image(0), image(1))
    spoilt = await waiting(batcher, image(2), image(7), image(3))
    last = await waiting(batcher, image(4))

    slots.go.set()
    with pytest.raises(InvalidImage) as caught:
        await spoilt

    assert str(caught.value) == "input[7]: 1 of 3 values of the embedding are not finite"
    assert caught.value.item == "input[7]"
    assert colours(await neighbour) == [colour(0), colour(1)]
    assert colours(await last) == [colour(4)]
    assert slots.batch_sizes == [1, 6]
    await plug
    await until(lambda: is_idle(batcher))


def raising(error: Exception) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        if len(rows) > 1:  # the plug's batch passes
            raise error
        return rows

    return change


FAULTS: dict[str, tuple[Callable[[Rows], Rows], type[Exception]]] = {
    "the encoder raises": (raising(RuntimeError("device lost")), RuntimeError),
    "the encoder is busy": (raising(Overloaded("away")), Overloaded),
    "a TimeoutError": (raising(TimeoutError("late")), TimeoutError),
    "too few rows": (lambda rows: rows[:1], Exception),
    "no rows": (lambda rows: rows[:0] if len(rows) > 1 else rows, Exception),
    "no array": (lambda rows: None if len(rows) > 1 else rows, Exception),
}


@pytest.mark.parametrize(("change", "kind"), FAULTS.values(), ids=FAULTS)
async def test_an_encoder_that_fails_fails_its_batch_and_not_the_next(
    change: Callable[[Rows], Rows], kind: type[Exception]
) -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    requests = [await waiting(batcher, image(i), image(i + 100)) for i in range(3)]
    slots.change = change

    slots.go.set()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)

    assert all(isinstance(outcome, kind) for outcome in outcomes)
    assert colours(await plug) == [colour(200)]
    await until(lambda: is_idle(batcher))
    slots.change = lambda rows: rows
    assert colours(await batcher.submit([image(5), image(6)], TIMEOUT_S)) == [colour(5), colour(6)]


@pytest.mark.parametrize("error", [RuntimeError("no replica"), Overloaded("away")], ids=repr)
async def test_a_lease_that_fails_settles_all_that_wait_and_later_ones_are_served(
    error: Exception,
) -> None:
    slots = Slots()
    batcher = make_batcher(slots, BatchLimits(max_images=2))
    plug = await plugged(slots, batcher)
    requests = [await waiting(batcher, image(i)) for i in range(5)]
    slots.lease_error = error

    slots.go.set()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)

    assert outcomes == [error] * 5
    assert colours(await plug) == [colour(200)]
    assert slots.batch_sizes == [1]
    await until(lambda: is_idle(batcher))
    slots.lease_error = None
    assert colours(await batcher.submit([image(5)], TIMEOUT_S)) == [colour(5)]


def able_to_replay(*rows: int) -> Digest:
    """What an encoder says that has one graph, for images of so many rows."""
    planner = Planner("exact", 1, 1024, 64)
    layout = PackedLayout.of([(1, 1, count - 1) for count in rows], 1)
    return Digest(planner, frozenset({planner.exact_plan(Call(layout, "pooled")).key}), 1000)


async def test_a_batch_is_what_the_encoder_of_its_slot_can_replay_and_the_rest_comes_next() -> None:
    slots = Slots()
    batcher = make_batcher(slots, BatchLimits(prefer_within_ms=60_000))
    plug = await plugged(slots, batcher)
    request = await waiting(batcher, *(image(i, num_patches=n) for i, n in enumerate([2, 5, 3, 5])))
    slots.digest = able_to_replay(6, 4, 3)

    slots.go.set()

    assert colours(await request) == [colour(i) for i in range(4)]
    assert slots.batches[1:] == [[colour(0), colour(1), colour(2)], [colour(3)]]
    await plug
    await until(lambda: is_idle(batcher))


async def test_what_has_waited_too_long_is_not_left_behind_for_a_graph() -> None:
    slots = Slots()
    batcher = make_batcher(slots, BatchLimits(prefer_within_ms=0))
    plug = await plugged(slots, batcher)
    request = await waiting(batcher, image(0), image(1, num_patches=5))
    slots.digest = able_to_replay(2)

    slots.go.set()
    await asyncio.gather(plug, request)

    assert slots.batch_sizes == [1, 2]


async def test_a_caller_that_left_before_the_lease_costs_no_encoder_time() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    leaver = await waiting(batcher, image(0), image(1))
    stayer = await waiting(batcher, image(2))

    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    slots.go.set()

    assert colours(await stayer) == [colour(2)]
    assert slots.batches[1:] == [[colour(2)]]
    await plug
    await until(lambda: is_idle(batcher))


async def test_no_batch_is_made_when_every_caller_left() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    leavers = [await waiting(batcher, image(i)) for i in range(3)]

    for leaver in leavers:
        leaver.cancel()
    await asyncio.gather(*leavers, return_exceptions=True)
    slots.go.set()
    await plug

    await until(lambda: is_idle(batcher))
    assert slots.batch_sizes == [1]
    assert colours(await batcher.submit([image(5)], TIMEOUT_S)) == [colour(5)]


async def test_of_a_batch_that_everyone_left_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled = list[int]()
    settle = waiting_module.settle

    def noted(batch: Sequence[waiting_module.Waiting], *more: Any) -> None:
        settled.append(len(batch))
        settle(batch, *more)

    monkeypatch.setattr(waiting_module, "settle", noted)
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    request = await waiting(batcher, image(1))
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request

    slots.go.set()
    await plug
    await until(lambda: is_idle(batcher))

    assert settled == [1]  # Ray's counters raise when nothing is added


async def test_a_caller_that_leaves_while_its_batch_runs_does_not_disturb_the_others() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    requests = [await waiting(batcher, image(i)) for i in range(3)]

    def stop_the_next(rows: Rows) -> Rows:
        slots.go.clear()
        return rows

    slots.change = stop_the_next
    slots.go.set()
    await plug
    await until(lambda: len(slots.batches) == 2)

    requests[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await requests[0]
    slots.go.set()

    assert colours(await requests[1]) + colours(await requests[2]) == [colour(1), colour(2)]
    assert slots.batch_sizes == [1, 3]
    await until(lambda: is_idle(batcher))


async def test_a_caller_that_leaves_before_its_image_is_decoded_gives_everything_back() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    request = asyncio.create_task(batcher.submit([image(0)], TIMEOUT_S))
    await until(lambda: batcher._num_images == 1)

    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request

    await until(lambda: is_idle(batcher))
    assert colours(await batcher.submit([image(5)], TIMEOUT_S)) == [colour(5)]


async def test_cancelling_the_batch_itself_settles_its_futures_and_frees_the_slot() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    request = await plugged(slots, batcher)

    for task in list(batcher._tasks):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request

    await until(lambda: is_idle(batcher))
    slots.go.set()
    assert colours(await batcher.submit([image(5)], TIMEOUT_S)) == [colour(5)]


async def test_cancelling_a_task_that_waits_for_a_slot_settles_what_waits_with_it() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    running = set(batcher._tasks)
    request = await waiting(batcher, image(1))
    (leasing,) = batcher._tasks - running

    await until(lambda: slots.num_leases == 2)
    leasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request

    slots.go.set()
    assert colours(await plug) == [colour(200)]
    assert colours(await batcher.submit([image(5)], TIMEOUT_S)) == [colour(5)]
    await until(lambda: is_idle(batcher))


async def test_a_lease_that_raises_a_cancellation_leaves_nobody_waiting() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    slots.lease_error = asyncio.CancelledError()

    with pytest.raises(asyncio.CancelledError):
        await batcher.submit([image(1)], TIMEOUT_S)

    slots.lease_error = None
    assert colours(await batcher.submit([image(2)], TIMEOUT_S)) == [colour(2)]
    await until(lambda: is_idle(batcher))


class FailingRelease(Slots):
    """The second lease fails when it is given back, once `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.is_exiting = False

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["Slots"]:
        is_second = self.num_leases == 1
        async with super().lease() as slot:
            yield slot
            if is_second:
                self.is_exiting = True
                await self.gate.wait()
                raise RuntimeError("release")


async def test_a_release_that_fails_after_everyone_left_fails_no_one_else() -> None:
    slots = FailingRelease()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    leaver = await waiting(batcher, image(1))
    leaver.cancel()
    slots.go.set()
    await plug
    await until(lambda: slots.is_exiting)
    other = await waiting(batcher, image(2))

    slots.gate.set()

    assert colours(await other) == [colour(2)]


@pytest.mark.parametrize(
    "change", [lambda rows: rows[1:], lambda rows: rows.repeat(2, 0)], ids=["fewer", "more"]
)
async def test_a_wrong_number_of_rows_gives_no_row_to_anyone(
    change: Callable[[Rows], Rows],
) -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    plug = await plugged(slots, batcher)
    requests = [await waiting(batcher, image(i)) for i in range(2)]
    slots.change = lambda rows: change(rows) if len(rows) > 1 else rows

    slots.go.set()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [ValueError] * 2
    assert colours(await plug) == [colour(200)]


async def test_for_another_process_refusals_are_values_and_faults_are_raised() -> None:
    slots = Slots()
    batcher = make_batcher(slots, queue=QueueLimits(max_images=1))

    answered = await batcher.answer([image(1)], TIMEOUT_S)
    refused = await batcher.answer([image(1), image(2)], TIMEOUT_S)
    slots.lease_error = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        await batcher.answer([image(1)], TIMEOUT_S)

    assert not isinstance(answered, EncoderError)
    assert colours(answered) == [colour(1)]
    assert isinstance(refused, Overloaded)


async def test_a_batch_does_not_run_in_the_context_of_the_caller_that_came_first() -> None:
    slots = Slots()
    batcher = make_batcher(slots)
    CALLER.set("first")

    await batcher.submit([image(0)], TIMEOUT_S)

    assert slots.callers == ["nobody"], "Ray would cancel the batch with that caller"


def large_png() -> ImageItem:
    file = io.BytesIO()
    Image.new("RGB", (3000, 3000), colour(9)).save(file, "PNG", compress_level=1)
    return ImageItem("image", file.getvalue())


async def test_the_loop_goes_on_while_a_large_image_is_decoded() -> None:
    batcher, item, num_turns = make_batcher(Slots()), large_png(), 0
    request = asyncio.create_task(batcher.submit([item], TIMEOUT_S))

    while not request.done():
        await asyncio.sleep(0)
        num_turns += 1

    assert colours(await request) == [colour(9)]
    assert num_turns > 200, "of which some ten are needed where the loop itself decodes"


async def one_caller(batcher: Batcher, choose: random.Random, index: int) -> str:
    """Submit some images, some of them bad; some callers leave."""
    indices = [choose.randrange(250) for _ in range(choose.randint(1, 5))]
    items = [image(i, num_patches=choose.randint(1, 4)) for i in indices]
    is_bad = choose.random() < 0.3
    if is_bad:
        items.insert(choose.randrange(len(items) + 1), truncated(999))
    request = asyncio.create_task(batcher.submit(items, TIMEOUT_S))
    if choose.random() < 0.3:
        for _ in range(choose.randrange(200)):
            await asyncio.sleep(0)
        request.cancel()
    try:
        embeddings = await request
    except InvalidImage as error:
        return f"bad {error.item}" if is_bad else "wrong"
    except (asyncio.CancelledError, Overloaded, BackendUnavailable) as error:
        return type(error).__name__
    right = not is_bad and colours(embeddings) == [colour(i) for i in indices]
    return "answered" if right else "wrong"


@pytest.mark.parametrize("seed", range(6))
async def test_in_a_random_crowd_every_caller_is_settled_and_every_counter_returns(
    seed: int,
) -> None:
    choose = random.Random(seed)
    slots = Slots(choose.randint(1, 2))
    batcher = make_batcher(
        slots,
        BatchLimits(max_images=6, max_patches=10),
        QueueLimits(max_images=150, max_decoded_bytes=20 * IMAGE_BYTES, decode_threads=2),
    )

    def fail_at_times(rows: Rows) -> Rows:
        if choose.random() < 0.15:
            raise BackendUnavailable("lost")
        return rows

    slots.change = fail_at_times

    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*(one_caller(batcher, choose, i) for i in range(60)))

    await until(lambda: is_idle(batcher))
    assert len(outcomes) == 60
    assert {"answered", "bad input[999]", "CancelledError"} <= set(outcomes)
    assert "wrong" not in outcomes
    assert max(slots.batch_sizes) <= 6
    slots.change = lambda rows: rows
    assert colours(await batcher.submit([image(5)], TIMEOUT_S)) == [colour(5)]


async def test_callers_that_ask_at_once_are_packed_together_and_each_gets_its_own() -> None:
    slots = Slots()
    batcher = make_batcher(slots, queue=QueueLimits(decode_threads=4))

    async def ask(indices: Sequence[int]) -> list[Colour]:
        return colours(await batcher.submit([image(i) for i in indices], TIMEOUT_S))

    answers = await asyncio.gather(*(ask(range(i, i + 3)) for i in range(0, 90, 3)))

    assert answers == [[colour(j) for j in range(i, i + 3)] for i in range(0, 90, 3)]
    assert sum(slots.batch_sizes) == 90
    assert len(slots.batches) < 90
