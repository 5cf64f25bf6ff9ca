"""Pooled and patch embeddings in every type of reply, and what a large one costs."""

import asyncio
import io
import logging
import pickle
import re
import socket
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import uvicorn

from encoders.config import EncoderConfig
from serve_app import replies
from serve_app.api import build_api
from serve_app.endpoints import ApiLimits
from serve_app.replies import CHUNK_BYTES, JSON, NPY, SAFETENSORS
from serve_app.schemas import PatchEmbeddingsReply, narrow, widen
from serve_app.service import (
    POOLED,
    Dtype,
    Embedding,
    EncoderGraphs,
    ImageItem,
    Rows,
    Wanted,
)
from tests.sglang.parts import png

CONFIG = EncoderConfig.load("dinov2-demo")
IMAGES = "/v1/images/embeddings"
WIDTH = 24
GRIDS = [(1, 2, 4), (1, 6, 6), (1, 2, 2)]
PNGS = [png(i, (40, 40)) for i in range(len(GRIDS))]
FILES = [("file", data) for data in PNGS]
DTYPES: list[Dtype] = ["float32", "float16", "bfloat16"]
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def float32(image: int, wanted: Wanted) -> Rows:
    """What the service below makes of an image, before it is rounded."""
    rows = GRIDS[image][1] * GRIDS[image][2] // 4
    shape = (rows, WIDTH) if wanted.output == "patch" else (CONFIG.dimensions,)
    values = np.random.default_rng(image).standard_normal(shape)
    scaled: Rows = (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)
    return scaled


class Service:
    """Rows of the kind and dtype that is wanted, at once."""

    def __init__(self) -> None:
        self.wanted = list[Wanted]()

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        self.wanted.append(wanted)
        numbers = [PNGS.index(item.data) for item in images]
        return [Embedding(narrow(float32(i, wanted), wanted.dtype), GRIDS[i]) for i in numbers]

    async def encoders(self) -> EncoderGraphs:
        return {}


class Given:
    """Answers with what it was given."""

    def __init__(self, *rows: Rows) -> None:
        self.embeddings = [Embedding(x, (1, len(x), 4)) for x in rows]

    async def submit(self, *_: Any) -> list[Embedding]:
        return self.embeddings

    async def encoders(self) -> EncoderGraphs:
        return {}


def make_client(service: Any, **limits: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_api(service, CONFIG, ApiLimits(**limits)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def ask(
    query: str, accept: str | None, service: Any = None, files: Any = FILES, **limits: Any
) -> httpx.Response:
    async with make_client(service or Service(), **limits) as client:
        if accept is None:
            del client.headers["accept"]
        else:
            client.headers["accept"] = accept
        return await client.post(f"{IMAGES}?{query}", files=files)


def joined(wanted: Wanted) -> Rows:
    """All rows of the three images in float32."""
    rows = [float32(i, wanted) for i in range(len(GRIDS))]
    return np.concatenate(rows) if wanted.output == "patch" else np.stack(rows)


@pytest.mark.parametrize(
    ("query", "accept", "answered"),
    [
        ("", None, JSON),
        ("", "*/*", JSON),
        ("output=pooled", f"{NPY}", NPY),
        ("dtype=bfloat16", "*/*", JSON),
        ("dtype=bfloat16", f"{NPY}, {SAFETENSORS};q=0.1", SAFETENSORS),
        ("output=patch", None, NPY),
        ("output=patch", "*/*", NPY),
        ("output=patch", "text/html, */*;q=0.8", NPY),
        ("output=patch", "application/*", NPY),
        ("output=patch", SAFETENSORS, SAFETENSORS),
        ("output=patch", JSON, JSON),
        ("output=patch", f"{JSON}, text/plain, */*", JSON),
        ("output=patch&dtype=bfloat16", None, SAFETENSORS),
        ("output=patch&dtype=bfloat16", f"{NPY}, */*;q=0.5", SAFETENSORS),
    ],
)
async def test_the_reply_is_of_the_type_that_is_accepted(
    query: str, accept: str | None, answered: str
) -> None:
    response = await ask(query, accept)

    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == answered
    assert int(response.headers["content-length"]) == len(response.content)


@pytest.mark.parametrize(
    ("query", "accept", "message"),
    [
        ("", "text/html", f"pooled embeddings in float32 are offered as {JSON}, {NPY}, "),
        ("output=patch", "image/*", f"patch embeddings in float32 are offered as {NPY}, "),
        ("output=patch", f"*/*, {NPY};q=0, {SAFETENSORS};q=0", f"{SAFETENSORS}, {JSON}"),
        (
            "dtype=bfloat16",
            NPY,
            f"pooled embeddings in bfloat16 are offered as {JSON}, {SAFETENSORS}; NumPy has no "
            "bfloat16",
        ),
        ("output=patch&dtype=bfloat16", NPY, f"{SAFETENSORS}, {JSON}; NumPy has no bfloat16"),
    ],
)
async def test_a_type_that_is_not_offered_is_refused_before_anything_is_encoded(
    query: str, accept: str, message: str
) -> None:
    service = Service()

    response = await ask(query, accept, service)

    assert response.status_code == 406
    assert message in response.json()["detail"]
    assert response.json()["error"]["code"] == "not_acceptable"
    assert service.wanted == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("output=both", "query.output: "),
        ("output=", "query.output: "),
        ("dtype=float64", "query.dtype: "),
        ("dtype=bf16", "query.dtype: "),
        ("output=patch&dimensions=5", "dimensions shortens pooled embeddings, not patch rows"),
    ],
)
async def test_an_impossible_query_is_a_bad_request(query: str, message: str) -> None:
    service = Service()

    response = await ask(query, NPY, service)

    assert response.status_code == 400
    assert message in response.json()["detail"]
    assert service.wanted == []


@pytest.mark.parametrize("dtype", DTYPES[:2])
async def test_pooled_numpy_is_one_array_in_its_dtype(dtype: Dtype) -> None:
    response = await ask(f"dtype={dtype}", NPY)

    array = np.load(io.BytesIO(response.content), allow_pickle=False)
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array, joined(POOLED).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
async def test_patch_numpy_is_read_as_the_docs_say(dtype: Dtype, page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    example = re.search(r"^file = io\.BytesIO.*?(?=^```)", text, re.DOTALL | re.MULTILINE)
    assert example
    names: dict[str, Any] = {"io": io, "np": np}
    names["reply"] = await ask(f"output=patch&dtype={dtype}", NPY)

    exec(example[0], names)

    offsets, grid_thw, rows = names["offsets"], names["grid_thw"], names["rows"]
    images = names["images"]
    assert len(example[0].splitlines()) == 3
    assert names["file"].read() == b""
    assert offsets.tolist() == [0, 2, 11, 12]
    assert offsets.dtype == grid_thw.dtype == np.int64
    assert grid_thw.tolist() == [list(grid) for grid in GRIDS]
    assert rows.dtype == np.dtype(dtype)
    wanted = Wanted("patch", dtype)
    for i, image in enumerate(images):
        np.testing.assert_array_equal(image, float32(i, wanted).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
async def test_safetensors_are_read_by_the_real_package(dtype: Dtype) -> None:
    pooled = await ask(f"dtype={dtype}", SAFETENSORS)
    patch = await ask(f"output=patch&dtype={dtype}", SAFETENSORS)

    (embeddings,) = safetensors.torch.load(pooled.content).values()
    tensors = safetensors.torch.load(patch.content)
    expected = torch.from_numpy(joined(POOLED)).to(TORCH[dtype])
    torch.testing.assert_close(embeddings, expected, rtol=0, atol=0)
    assert tensors.keys() == {"offsets", "grid_thw", "rows"}
    expected = torch.from_numpy(joined(Wanted("patch"))).to(TORCH[dtype])
    torch.testing.assert_close(tensors["rows"], expected, rtol=0, atol=0)
    assert tensors["offsets"].tolist() == [0, 2, 11, 12]
    assert tensors["grid_thw"].tolist() == [list(grid) for grid in GRIDS]
    assert tensors["grid_thw"].dtype == tensors["offsets"].dtype == torch.int64
    header_bytes = int.from_bytes(patch.content[:8], "little")
    assert header_bytes % 8 == 0


@pytest.mark.parametrize("dtype", DTYPES)
async def test_json_has_the_numbers_of_the_dtype(dtype: Dtype) -> None:
    pooled = await ask(f"dtype={dtype}", JSON)
    patch = await ask(f"output=patch&dtype={dtype}", JSON)

    values = [x["embedding"] for x in pooled.json()["data"]]
    rounded = widen(narrow(joined(POOLED), dtype)).astype(np.float32)
    np.testing.assert_array_equal(np.array(values, np.float32), rounded)
    body = patch.json()
    assert PatchEmbeddingsReply.model_validate(body).model_dump(mode="json") == body
    for i, item in enumerate(body["data"]):
        assert (item["index"], item["grid_thw"]) == (i, list(GRIDS[i]))
        rounded = widen(narrow(float32(i, Wanted("patch")), dtype)).astype(np.float32)
        np.testing.assert_array_equal(np.array(item["embedding"], np.float32), rounded)
    assert body["usage"] == {"prompt_tokens": 48, "total_tokens": 48}
    assert body["model"] == "dinov2-demo"


async def test_too_many_patches_for_json_are_refused_before_they_are_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service()
    monkeypatch.setattr(replies, "MAX_JSON_VALUES", 384)

    refused = await ask("output=patch", JSON, service)
    as_numpy = await ask("output=patch", NPY, service)

    assert (refused.status_code, as_numpy.status_code) == (413, 200)
    assert "the limit of patch rows in JSON is 1" in refused.json()["detail"]
    assert len(service.wanted) == 1


async def test_patch_rows_in_json_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    values = 12 * WIDTH
    monkeypatch.setattr(replies, "json_patches", lambda config: 1 << 20)  # the fake's are narrow
    monkeypatch.setattr(replies, "MAX_JSON_VALUES", values)
    exact = await ask("output=patch", JSON)
    monkeypatch.setattr(replies, "MAX_JSON_VALUES", values - 1)
    refused = await ask("output=patch", JSON)
    as_numpy = await ask("output=patch", NPY)

    assert (exact.status_code, as_numpy.status_code) == (200, 200)
    assert refused.status_code == 413
    message = f"the rows have {values} values, the limit of JSON is {values - 1}; accept {NPY} or"
    assert message in refused.json()["detail"]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_shortened_embedding_is_scaled_before_it_is_rounded(dtype: Dtype) -> None:
    service = Service()

    response = await ask(f"dimensions=5&dtype={dtype}", SAFETENSORS, service)

    short = joined(POOLED)[:, :5]
    short = short / np.linalg.norm(short, axis=1, keepdims=True)
    (embeddings,) = safetensors.torch.load(response.content).values()
    assert embeddings.dtype == TORCH[dtype]
    rtol = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    torch.testing.assert_close(embeddings.float(), torch.from_numpy(short), rtol=rtol, atol=1e-7)
    assert service.wanted == [POOLED]


async def test_what_is_not_scaled_is_shortened_in_its_own_dtype() -> None:
    config, service = CONFIG.model_copy(update={"normalize": False}), Service()
    transport = httpx.ASGITransport(build_api(service, config, ApiLimits()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(
            f"{IMAGES}?dimensions=5&dtype=bfloat16", files=FILES, headers={"accept": SAFETENSORS}
        )

    (embeddings,) = safetensors.torch.load(response.content).values()
    expected = torch.from_numpy(joined(POOLED)[:, :5]).bfloat16()
    torch.testing.assert_close(embeddings, expected, rtol=0, atol=0)
    assert service.wanted == [Wanted("pooled", "bfloat16")]


def test_rounding_to_bfloat16_is_torchs_own() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    ties = np.arange(0x3F808000, 0x3F900000, 0x8000, np.uint32)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]

    rounded = narrow(values, "bfloat16")

    expected = torch.from_numpy(values).bfloat16()
    np.testing.assert_array_equal(rounded, expected.view(torch.int16).numpy().view(np.uint16))
    np.testing.assert_array_equal(widen(rounded), expected.float().numpy())


async def test_more_patches_than_the_limit_are_refused_with_both_numbers() -> None:
    service = Service()
    patches = 3 * 16 * 16  # that the demo makes of square images
    async with make_client(service, max_patches=patches - 1) as client:
        pooled = await client.post(IMAGES, files=FILES)
        refused = await client.post(f"{IMAGES}?output=patch", files=FILES)
    exact = await ask("output=patch", NPY, max_patches=patches)

    assert (pooled.status_code, exact.status_code) == (200, 200)
    assert refused.status_code == 413
    message = f"the images become {patches} patches, the limit of patch output is {patches - 1}"
    assert refused.json()["detail"] == message
    assert service.wanted == [POOLED]


async def test_a_file_that_is_no_image_is_refused_by_name_for_patch_output_too() -> None:
    service = Service()

    response = await ask("output=patch", NPY, service, [*FILES, ("file", b"GIF89a")])

    assert response.status_code == 422
    assert response.json()["error"]["param"] == "file[3]"
    assert service.wanted == []


@pytest.mark.parametrize("accept", [NPY, SAFETENSORS])
async def test_read_only_and_strided_rows_leave_as_they_are(accept: str) -> None:
    wide = np.arange(2 * 700_000, dtype=np.float32).reshape(-1, 20)
    strided, frozen = wide[:, ::2], wide.copy()[:, :10]
    frozen.flags.writeable = False

    response = await ask("output=patch", accept, Given(strided, frozen))

    assert len(response.content) > CHUNK_BYTES
    expected = np.concatenate([strided, frozen])
    if accept == NPY:
        file = io.BytesIO(response.content)
        _, _, rows = np.load(file), np.load(file), np.load(file)
    else:
        rows = safetensors.numpy.load(response.content)["rows"]
    np.testing.assert_array_equal(rows, expected)


async def test_a_large_reply_goes_out_in_views_that_are_made_as_they_are_sent() -> None:
    rows = [np.ones((16384, 1024), np.float32) for _ in range(2)]  # 64 MiB each
    wanted = Wanted("patch")
    embeddings = [Embedding(x, (1, 128, 128)) for x in rows]
    sizes, kinds = list[int](), set[type]()

    async def send(message: Any) -> None:
        if body := message.get("body"):
            sizes.append(len(body))
            kinds.add(type(body))

    async def receive() -> Any:
        await asyncio.Event().wait()

    tracemalloc.start()
    response = await replies.reply(embeddings, SAFETENSORS, wanted, "tiny")
    await response({"type": "http"}, receive, send)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert sum(sizes) == int(response.headers["content-length"]) > 2 * 64 * 2**20
    assert max(sizes) == CHUNK_BYTES
    assert kinds == {memoryview}
    assert peak < 2**20


def test_rays_pickle_makes_bytes_of_a_view() -> None:
    message = {"type": "http.response.body", "body": memoryview(b"abcdef")[1:3]}

    copied = pickle.loads(pickle.dumps([message]))

    assert copied == [{"type": "http.response.body", "body": b"bc"}]


@asynccontextmanager
async def listening(service: Any) -> AsyncIterator[tuple[str, int]]:
    """A real server over the service, on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = build_api(service, CONFIG, ApiLimits())
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        task = asyncio.create_task(server._serve(sockets=[listener]))
        yield listener.getsockname()[:2]
        server.should_exit = True
        await task


def request(accept: str) -> bytes:
    head = (
        f"POST {IMAGES}?output=patch HTTP/1.1\r\nhost: test\r\naccept: {accept}\r\n"
        f"content-length: {len(PNGS[0])}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + PNGS[0]


async def test_a_hundred_megabytes_cross_a_real_server_without_being_held_twice() -> None:
    rows = np.random.default_rng(0).integers(0, 255, (28_000, 4096), np.uint8)
    async with listening(Given(rows.view(np.float32))) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request(SAFETENSORS))
        await asyncio.sleep(0.05)
        tracemalloc.start()
        head = await reader.readuntil(b"\r\n\r\n")
        left = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        tail = b""
        while piece := await reader.read(CHUNK_BYTES):
            left -= len(piece)
            tail = piece[-64:] if len(piece) >= 64 else (tail + piece)[-64:]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        writer.close()

    assert left == 0
    assert tail == rows[-1, -64:].tobytes()
    assert rows.nbytes > 100e6
    assert peak < 8 * 2**20


async def test_a_client_that_leaves_midway_leaves_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Given(np.zeros((16384, 2048), np.float32))
    before = asyncio.all_tasks()
    with caplog.at_level(logging.WARNING):
        async with listening(service) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request(NPY))
            await reader.readexactly(100_000)
            writer.transport.abort()
            async with asyncio.timeout(10):
                while len(asyncio.all_tasks() - before) > 1:  # the server's own  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{address[1]}") as client:
                health = await client.get("/health")

    assert health.status_code == 200
    assert caplog.records == []


async def test_others_are_answered_while_a_large_reply_goes_out() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await ask("output=patch", NPY, Given(np.zeros((16384, 1024), np.float32)))
    task.cancel()

    assert turns > 64  # once after each MiB


class Queue:
    """Takes messages without a limit, as Ray does, and makes one batch of all that it finds."""

    def __init__(self) -> None:
        self.messages = list[Any]()
        self.batches = list[int]()

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def consume(self) -> None:
        while True:
            await asyncio.sleep(0.004)
            batch, self.messages = self.messages, []
            self.batches.append(len(batch))


async def reply_of(num_chunks: int) -> Any:
    rows = np.zeros((num_chunks * CHUNK_BYTES // 4096, 1024), np.float32)
    return await replies.reply([Embedding(rows, (1, 2, 2))], NPY, Wanted("patch"), "tiny")


async def test_few_views_are_under_way_where_nothing_holds_the_sender_back() -> None:
    queue, response = Queue(), await reply_of(100)
    task = asyncio.create_task(queue.consume())

    await response({"type": "http"}, queue.receive, queue.send)
    await asyncio.sleep(0.02)
    task.cancel()

    assert sum(queue.batches) == 100 + 7  # start, three headers, two small arrays, end
    assert max(queue.batches) <= 12


async def test_whoever_keeps_every_view_is_not_waited_for_for_ever() -> None:
    queue, response = Queue(), await reply_of(20)

    async with asyncio.timeout(10):
        await response({"type": "http"}, queue.receive, queue.send)

    body = b"".join(message.get("body", b"") for message in queue.messages)
    assert len(body) == int(response.headers["content-length"])
