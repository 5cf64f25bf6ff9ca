"""Output kinds and dtypes, from a request to its rows: only the kind splits a batch."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from encoders import EncoderConfig
from encoders.encoder import Encoder
from encoders.errors import InvalidImage
from encoders.packing import PackedBatch
from serve_app.args import AppArgs
from serve_app.batcher import Batcher, QueueLimits
from serve_app.local import fused_service
from serve_app.replica import EncoderReplica
from serve_app.service import Dtype, ImageItem, Output, Rows, Wanted
from serve_app.waiting import BatchLimits, num_not_finite
from tests.conditions import until
from tests.sglang.parts import batch_of, png
from tests.tiny import QWEN3_VL_COLUMNS, write_tiny_qwen3_vl

SIZES = [(64, 64), (200, 90), (33, 47), (128, 256)]
IMAGES = [ImageItem(f"input[{i}]", png(i, size)) for i, size in enumerate(SIZES)]
ROWS = [4, 3 * 6, 1, 8 * 4]
"""That a merge of two by two leaves of patches of 16 pixels."""


class Slots:
    """One real encoder; a batch starts when `go` is set."""

    def __init__(self, replica: EncoderReplica) -> None:
        self._replica = replica
        self._free = asyncio.Semaphore(1)
        self.go = asyncio.Event()
        self.batches = list[tuple[Output, list[Dtype]]]()
        self.spoil = False
        self.digest = None

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["Slots"]:
        async with self._free:
            await self.go.wait()
            yield self

    async def encode(
        self, batch: PackedBatch, output: Output, dtypes: Sequence[Dtype]
    ) -> Sequence[Rows] | Rows:
        self.batches.append((output, list(dtypes)))
        rows = (await self._replica.encode(batch, output, dtypes)).rows
        if self.spoil:
            rows[0].reshape(-1)[3] = 0xFF80  # minus infinity in bfloat16
        return rows


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EncoderConfig:
    return EncoderConfig.load(str(write_tiny_qwen3_vl(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="module")
def replica(config: EncoderConfig) -> EncoderReplica:
    return EncoderReplica(config, "cpu", 60)


@pytest.fixture
def slots(replica: EncoderReplica) -> Slots:
    return Slots(replica)


@pytest.fixture
def batcher(slots: Slots, config: EncoderConfig) -> Batcher:
    return Batcher(slots, config, BatchLimits(), QueueLimits(decode_threads=1))


async def all_wait(batcher: Batcher, *requests: asyncio.Task[object], images: int) -> None:
    """Decoded, with no slot yet."""
    await until(lambda: len(batcher._waiting) == images or any(x.done() for x in requests))


async def test_patch_rows_come_for_each_image_with_its_grid(
    batcher: Batcher, slots: Slots, config: EncoderConfig
) -> None:
    slots.go.set()

    embeddings = await batcher.submit(IMAGES, 60, Wanted("patch"))

    assert [x.values.shape for x in embeddings] == [(n, QWEN3_VL_COLUMNS) for n in ROWS]
    assert [x.num_patches for x in embeddings] == [4 * n for n in ROWS]
    bare = Encoder.load(config)
    for item, embedding in zip(IMAGES, embeddings, strict=True):
        batch = batch_of(bare, item.data)
        assert embedding.grid_thw == batch.layout.grid_thw[0]
        expected = bare.encode(batch, "patch")[0].numpy()
        np.testing.assert_allclose(embedding.values, expected, atol=2e-5)


async def test_a_batch_is_of_one_kind_and_the_one_that_waits_longest_goes_first(
    batcher: Batcher, slots: Slots
) -> None:
    kinds: list[Output] = ["patch", "pooled", "patch", "pooled"]
    requests = list[asyncio.Task[object]]()
    for count, (item, kind) in enumerate(zip(IMAGES, kinds, strict=True), 1):
        requests.append(asyncio.create_task(batcher.submit([item], 60, Wanted(kind))))
        await all_wait(batcher, images=count)

    slots.go.set()
    results = await asyncio.gather(*requests)

    assert [output for output, _ in slots.batches] == ["patch", "pooled"]
    assert [len(dtypes) for _, dtypes in slots.batches] == [2, 2]
    shapes = [embeddings[0].values.shape for embeddings in results]  # type: ignore[index]
    assert shapes == [(ROWS[0], QWEN3_VL_COLUMNS), (8,), (ROWS[2], QWEN3_VL_COLUMNS), (8,)]


async def one_that_knows(slots: Slots, config: EncoderConfig, max_row_bytes: int) -> Batcher:
    """A batcher of that limit which a batch has told how wide rows are; the next one waits."""
    limits = BatchLimits(max_row_bytes=max_row_bytes)
    batcher = Batcher(slots, config, limits, QueueLimits(decode_threads=1))
    slots.go.set()
    await batcher.submit(IMAGES[:1], 60, Wanted("patch"))
    slots.go.clear()
    slots.batches.clear()
    return batcher


@pytest.mark.parametrize(
    ("wanted", "batches"),
    [
        (Wanted("patch", "float16"), [3, 1]),
        (Wanted("patch", "bfloat16"), [3, 1]),
        (Wanted("patch", "float32"), [1, 1, 1, 1]),
        (Wanted("pooled"), [4]),
    ],
    ids=repr,
)
async def test_a_batch_is_cut_by_the_bytes_of_its_rows_once_one_has_told_how_many(
    slots: Slots, config: EncoderConfig, wanted: Wanted, batches: list[int]
) -> None:
    item = IMAGES[0]
    batcher = await one_that_knows(slots, config, 3 * ROWS[0] * QWEN3_VL_COLUMNS * 2)
    request = asyncio.create_task(batcher.submit([item] * 4, 60, wanted))
    await all_wait(batcher, request, images=4)

    slots.go.set()
    await request

    assert [len(dtypes) for _, dtypes in slots.batches] == batches


async def test_rows_of_several_dtypes_count_as_wide_as_the_widest(
    slots: Slots, config: EncoderConfig
) -> None:
    item = IMAGES[0]
    batcher = await one_that_knows(slots, config, 3 * ROWS[0] * QWEN3_VL_COLUMNS * 2)
    requests = list[asyncio.Task[object]]()
    for count, dtype in enumerate(("float16", "bfloat16", "float32", "float16"), 1):
        wanted = Wanted("patch", dtype)
        requests.append(asyncio.create_task(batcher.submit([item], 60, wanted)))
        await all_wait(batcher, *requests, images=count)

    slots.go.set()
    await asyncio.gather(*requests)

    assert [dtypes for _, dtypes in slots.batches] == [
        ["float16", "bfloat16"],
        ["float32"],
        ["float16"],
    ]


async def test_rows_of_one_image_may_be_more_than_a_batch_may_have(
    slots: Slots, config: EncoderConfig
) -> None:
    batcher = await one_that_knows(slots, config, 1)
    slots.go.set()

    await batcher.submit(IMAGES, 60, Wanted("patch"))

    assert [len(dtypes) for _, dtypes in slots.batches] == [1] * 4


@pytest.mark.parametrize("kind", ["pooled", "patch"])
async def test_dtypes_share_a_batch_and_each_image_gets_its_own(
    batcher: Batcher, slots: Slots, replica: EncoderReplica, kind: Output
) -> None:
    dtypes: list[Dtype] = ["bfloat16", "float16", "float32", "bfloat16"]
    item = IMAGES[1]
    requests = [
        asyncio.create_task(batcher.submit([item], 60, Wanted(kind, dtype))) for dtype in dtypes
    ]
    await all_wait(batcher, images=4)

    slots.go.set()
    (bf16,), (fp16,), (fp32,), (again,) = await asyncio.gather(*requests)

    assert slots.batches == [(kind, dtypes)]
    wide = torch.from_numpy(fp32.values.copy())
    assert fp16.values.dtype == np.float16
    assert bf16.values.dtype == np.uint16
    np.testing.assert_allclose(fp16.values, wide.half().numpy(), rtol=2**-10, atol=1e-5)
    bits = torch.from_numpy(bf16.values.view(np.int16).copy()).view(torch.bfloat16)
    torch.testing.assert_close(bits.float(), wide, rtol=2**-8, atol=1e-5)
    np.testing.assert_array_equal(again.values, bf16.values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_an_image_has_the_same_bits_whatever_dtypes_its_neighbours_want(
    replica: EncoderReplica, config: EncoderConfig, dtype: Dtype
) -> None:
    batch = batch_of(Encoder.load(config), IMAGES[1].data)
    twice = PackedBatch.of(
        [batch.pixels.reshape(*batch.sizes[0], 3)] * 2, [batch.layout.grid_thw[0]] * 2, 0
    )

    alike = (await replica.encode(twice, "patch", [dtype, dtype])).rows
    mixed = (await replica.encode(twice, "patch", [dtype, "float32"])).rows

    assert alike[0].tobytes() == mixed[0].tobytes()


async def test_pooled_float32_rows_are_one_array_and_those_of_the_bare_encoder(
    replica: EncoderReplica, config: EncoderConfig
) -> None:
    bare = Encoder.load(config)
    batch = batch_of(bare, IMAGES[1].data)

    rows = (await replica.encode(batch)).rows

    expected = torch.stack(bare.encode(batch)).numpy()
    assert isinstance(rows, np.ndarray)
    assert rows.tobytes() == expected.tobytes()


async def test_a_value_that_is_not_finite_is_found_among_the_bits_of_bfloat16(
    batcher: Batcher, slots: Slots
) -> None:
    slots.go.set()
    slots.spoil = True

    with pytest.raises(InvalidImage, match=r"input\[0\]: 1 of 96 values of the embedding"):
        await batcher.submit(IMAGES[:1], 60, Wanted("patch", "bfloat16"))


@pytest.mark.parametrize("kind", ["pooled", "patch"])
async def test_rows_that_callers_of_this_process_hold_are_not_in_pinned_memory(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch, kind: Output
) -> None:
    downloaded = list[torch.Tensor]()

    def download(tensor: torch.Tensor) -> torch.Tensor:
        downloaded.append(tensor.clone())
        return downloaded[-1]

    monkeypatch.setattr("encoders.forward.download", download)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    fused = fused_service(AppArgs(device="cpu"), config, 1)
    replica = EncoderReplica(config, "cpu", 60, lends=True)

    (kept,) = await fused.submit(IMAGES[:1], 60, Wanted(kind, "float16"))
    batch = batch_of(Encoder.load(config), IMAGES[0].data)
    (lent,) = (await replica.encode(batch, kind, ["float16"])).rows

    assert not any(np.shares_memory(kept.values, x.numpy()) for x in downloaded)
    # Ray copies these into its store before anybody else sees them.
    assert np.shares_memory(lent, downloaded[-1].numpy())
    np.testing.assert_array_equal(kept.values, lent)


def test_not_finite_values_are_counted_in_every_type() -> None:
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 3e38, -0.0, 1e-40])
    bits = values.bfloat16().view(torch.int16).numpy().view(np.uint16)

    assert num_not_finite(values.numpy()) == 3
    assert num_not_finite(values.half().numpy()) == 4  # 3e38 is no half
    assert num_not_finite(bits) == 3
