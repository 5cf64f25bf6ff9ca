"""The HTTP interface over ASGI: every dialect in, every encoding out, every refusal on the way."""

import asyncio
import base64
import gc
import io
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib import import_module
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from encoders.config import EncoderConfig
from encoders.errors import ConfigError, DeadlineExceeded, EncoderError, InvalidImage, Overloaded
from encoders.graph_stats import GraphStats
from encoders.packing import PackedBatch
from serve_app import endpoints
from serve_app.api import build_api
from serve_app.batcher import Batcher, QueueLimits
from serve_app.bodies import TIMEOUT_HEADER
from serve_app.canary import CANARY
from serve_app.endpoints import ApiLimits
from serve_app.replies import NPY
from serve_app.service import (
    POOLED,
    Embedding,
    EncoderGraphs,
    ImageItem,
    ImageService,
    Rows,
    Wanted,
)
from serve_app.waiting import BatchLimits

CONFIG = EncoderConfig.load("dinov2-demo")
WIDTH = CONFIG.dimensions
EMBEDDINGS, IMAGES = "/v1/embeddings", "/v1/images/embeddings"


def embedding(data: bytes) -> Embedding:
    """What the service below makes of any bytes: a unit vector, and their number as patches."""
    values = np.random.default_rng(zlib.crc32(data)).standard_normal(WIDTH)
    return Embedding((values / np.linalg.norm(values)).astype(np.float32), (1, 1, len(data)))


GRAPHS = GraphStats(hits=7, misses={"unseen": 3}, captures=2, graphs=2, graph_pool_bytes=4096)


class Service:
    """Answers at once from the bytes alone, or raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.requests = list[list[ImageItem]]()

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        self.requests.append(list(images))
        if self.error is not None:
            raise self.error
        return [embedding(item.data) for item in images]

    async def encoders(self) -> EncoderGraphs:
        return {"host:1": GRAPHS}

    @property
    def names(self) -> list[str]:
        return [item.name for request in self.requests for item in request]


class Stuck:
    """Never answers."""

    def __init__(self) -> None:
        self.was_cancelled = False

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return []

    async def encoders(self) -> EncoderGraphs:
        await asyncio.Event().wait()
        return {}


class MeanSlots:
    """One encoder, always free, whose rows are the images' mean values."""

    digest = None

    def encoders(self) -> EncoderGraphs:
        return {}

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["MeanSlots"]:
        yield self

    async def encode(self, batch: PackedBatch, *_: Any) -> Rows:
        rows = np.zeros((batch.layout.num_images, WIDTH), np.float32)
        sizes = [height * width * 3 for height, width in batch.sizes]
        images = np.split(batch.pixels, np.cumsum(sizes)[:-1])
        rows[list(batch.layout.order), 0] = [image.mean() for image in images]
        return rows


def make_client(
    service: ImageService, config: EncoderConfig = CONFIG, *, headers: Any = None, **limits: Any
) -> httpx.AsyncClient:
    app = build_api(service, config, ApiLimits(**limits))
    # As a server does: the reply counts, and an exception behind it goes to the log.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


def real_service() -> Batcher:
    return Batcher(MeanSlots(), CONFIG, BatchLimits(), QueueLimits())


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (value, value, value)).save(file, "PNG")
    return file.getvalue()


def vectors(response: httpx.Response) -> Rows:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    values = [entry["embedding"] for entry in data]
    if isinstance(values[0], str):
        values = [np.frombuffer(base64.b64decode(value, validate=True), "<f4") for value in values]
    return np.array(values, np.float32)


def expected(*items: bytes) -> Rows:
    return np.stack([embedding(item).values for item in items])


def assert_refused(
    response: httpx.Response,
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": body["detail"], "type": kind, "param": param, "code": code}
    assert body == {"error": error, "detail": body["detail"], "message": body["detail"]}
    assert message in body["detail"]


class Chunks:
    """A request body that counts how many of its parts were asked for."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.num_read = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            self.num_read += 1
            yield part


async def test_a_raw_body_is_one_image() -> None:
    service = Service()
    async with make_client(service) as client:
        response = await client.post(IMAGES, content=b"abc", headers={"content-type": "image/png"})

    np.testing.assert_array_equal(vectors(response), expected(b"abc"))
    assert service.requests == [[ImageItem("image", b"abc")]]
    body = response.json()
    assert body["object"] == "list"
    assert body["model"] == "dinov2-demo"
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


async def test_a_raw_body_needs_no_content_type() -> None:
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, content=b"abc")

    np.testing.assert_array_equal(vectors(response), expected(b"abc"))


async def test_multipart_files_are_answered_in_their_order_under_any_field_name() -> None:
    service = Service()
    contents = [b"file %d" % i + b"x" * i * 1000 for i in range(20)]
    files = [(("file", "image")[i % 2], (f"{i}.png", data)) for i, data in enumerate(contents)]
    async with make_client(service) as client:
        response = await client.post(IMAGES, files=files, data={"note": "not a file"})

    np.testing.assert_array_equal(vectors(response), expected(*contents))
    assert service.names == [f"file[{i}]" for i in range(20)]


async def test_a_multipart_file_that_goes_to_disk_arrives_whole() -> None:
    data = np.random.default_rng(0).bytes(3_000_000)
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, files=[("file", ("a.png", data))])

    np.testing.assert_array_equal(vectors(response), expected(data))


@pytest.mark.parametrize("accept", [NPY, f"{NPY}, application/json;q=0.5"])
async def test_numpy_comes_back_where_it_is_accepted(accept: str) -> None:
    files = [("file", ("a.png", data)) for data in (b"a", b"b", b"c")]
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, files=files, headers={"accept": accept})

    array = np.load(io.BytesIO(response.content), allow_pickle=False)
    assert response.headers["content-type"] == NPY
    assert array.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(array, expected(b"a", b"b", b"c"))


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
async def test_json_comes_back_otherwise(accept: str) -> None:
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, content=b"abc", headers={"accept": accept})

    assert response.headers["content-type"] == "application/json"
    np.testing.assert_array_equal(vectors(response), expected(b"abc"))


async def test_images_are_shortened_by_a_query_in_json_and_numpy() -> None:
    url = f"{IMAGES}?dimensions=5"
    async with make_client(Service()) as client:
        as_json = await client.post(url, content=b"abc")
        as_numpy = await client.post(url, content=b"abc", headers={"accept": NPY})

    short = expected(b"abc")[:, :5]
    short /= np.linalg.norm(short)
    np.testing.assert_allclose(vectors(as_json), short, rtol=1e-6)
    np.testing.assert_allclose(np.load(io.BytesIO(as_numpy.content)), short, rtol=1e-6)


@pytest.mark.parametrize("dimensions", ["0", "-1", "1.5", "many", "9" * 5000])
async def test_a_query_for_impossible_dimensions_is_refused(dimensions: str) -> None:
    service = Service()
    async with make_client(service) as client:
        response = await client.post(f"{IMAGES}?dimensions={dimensions}", content=b"abc")

    assert_refused(response, 400, "query.dimensions: ", code="invalid_request")
    assert len(response.content) < 1000
    assert service.requests == []


async def test_real_images_pass_through_a_real_batcher_in_both_endpoints() -> None:
    values = [0, 255, 17]
    files = [("file", ("a", png(value))) for value in values]
    async with make_client(real_service()) as client:
        uploads = await client.post(IMAGES, files=files)
        uris = await client.post(EMBEDDINGS, json={"input": [uri(png(x)) for x in values]})

    np.testing.assert_array_equal(vectors(uploads)[:, 0], values)
    np.testing.assert_array_equal(vectors(uris)[:, 0], values)
    patches = uploads.json()["usage"]["prompt_tokens"]
    assert patches == uris.json()["usage"]["prompt_tokens"] == 3 * 16 * 16


@pytest.mark.parametrize(
    ("content", "status", "code", "message"),
    [
        (b"", 400, "invalid_request", "image: 0 bytes where an image belongs"),
        (b"hello", 415, "unsupported_image_type", "image: not an image of type JPEG, PNG"),
        (b"%PDF-1.7", 415, "unsupported_image_type", "image: not an image of type JPEG, PNG"),
        (png(1)[:60], 422, "invalid_image", "image: the image"),
    ],
)
async def test_bytes_that_are_no_image_are_refused_by_what_is_wrong(
    content: bytes, status: int, code: str, message: str
) -> None:
    async with make_client(real_service()) as client:
        response = await client.post(IMAGES, content=content)

    assert_refused(response, status, message, code=code, param="image")


async def test_a_bad_file_among_good_ones_is_named() -> None:
    files = [("file", ("a", data)) for data in (png(1), png(2), b"hello", png(3))]
    async with make_client(real_service()) as client:
        response = await client.post(IMAGES, files=files)

    message = "file[2]: not an image of type"
    assert_refused(response, 415, message, code="unsupported_image_type", param="file[2]")


@pytest.mark.parametrize("kind", ["input", "object", "base64"])
async def test_a_bad_item_among_good_ones_is_named(kind: str) -> None:
    bad = {"input": "a cat", "object": {"text": "a cat"}, "base64": "data:;base64,AAAAA"}[kind]
    async with make_client(Service()) as client:
        response = await client.post(EMBEDDINGS, json={"input": [uri(b"a"), bad]})

    assert_refused(response, 400, "input[1]: ", code="invalid_request", param="input[1]")


PART = b'Content-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
MULTIPART = b"--x\r\n" + PART + b"abc\r\n--x--\r\n"


async def test_the_multipart_body_that_is_broken_below_is_right_itself() -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, content=MULTIPART, headers=headers)

    np.testing.assert_array_equal(vectors(response), expected(b"abc"))


BROKEN: dict[str, tuple[str, bytes]] = {
    "no boundary": ("multipart/form-data", MULTIPART),
    "an empty boundary": ("multipart/form-data; boundary=", MULTIPART),
    "a quote as boundary": ('multipart/form-data; boundary="', MULTIPART),
    "another boundary": ("multipart/form-data; boundary=y", MULTIPART),
    "an endless boundary": ("multipart/form-data; boundary=" + "x" * 3000, MULTIPART),
    "an empty body": ("multipart/form-data; boundary=x", b""),
    "no line ends": ("multipart/form-data; boundary=x", MULTIPART.replace(b"\r\n", b"\n")),
    "a preamble": ("multipart/form-data; boundary=x", b"junk" + MULTIPART),
    "an epilogue without end": ("multipart/form-data; boundary=x", b"--x\r\n" + PART + b"abc"),
    "no name": ("multipart/form-data; boundary=x", MULTIPART.replace(b'name="file"; ', b"")),
    "no disposition": ("multipart/form-data; boundary=x", MULTIPART.replace(b"Content", b"X")),
    "a header with a space": ("multipart/form-data; boundary=x", b"--x\r\nA B: c\r\n\r\n"),
    "an endless header": ("multipart/form-data; boundary=x", b"--x\r\n" + b"H" * 100_000),
    "no file": (
        "multipart/form-data; boundary=x",
        MULTIPART.replace(b'; filename="a.png"', b""),
    ),
    "an endless field": (
        "multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"a" * 2_000_000,
    ),
}


# A file that is cut off stays with the parser, and closes when that is collected.
@pytest.mark.filterwarnings("ignore:Unclosed file:ResourceWarning")
@pytest.mark.parametrize(("content_type", "content"), BROKEN.values(), ids=BROKEN)
async def test_a_broken_multipart_body_is_refused(content_type: str, content: bytes) -> None:
    service = Service()
    async with make_client(service) as client:
        headers = {"content-type": content_type}
        response = await client.post(IMAGES, content=content, headers=headers)

    gc.collect()
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["detail"]
    assert service.requests == []


@pytest.mark.filterwarnings("ignore:Unclosed file:ResourceWarning")
async def test_a_multipart_body_cut_off_anywhere_is_never_a_500() -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with make_client(Service()) as client:
        statuses = set[int]()
        for end in range(len(MULTIPART)):
            response = await client.post(IMAGES, content=MULTIPART[:end], headers=headers)
            statuses.add(response.status_code)

    gc.collect()
    assert statuses <= {200, 400}, "200 where nothing but the last mark was cut off"
    assert 400 in statuses


async def test_a_multipart_body_that_ends_after_a_whole_file_is_not_answered_without_its_last() -> (
    None
):
    content = b"--x\r\n" + PART + b"abc\r\n--x\r\n" + PART + b"de"
    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, content=content, headers=headers)

    message = "the multipart body ends before its closing boundary"
    assert_refused(response, 400, message, code="invalid_request")


async def test_the_type_of_a_multipart_body_may_be_in_upper_case() -> None:
    headers = {"content-type": "Multipart/Form-Data; boundary=x"}
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, content=MULTIPART, headers=headers)

    np.testing.assert_array_equal(vectors(response), expected(b"abc"))


@pytest.mark.parametrize(
    "codec", ["undefined", "idna", "punycode", "unicode_escape", "raw_unicode_escape", "utf-7"]
)
async def test_a_charset_that_cannot_decode_a_file_name_is_no_fault_of_ours(codec: str) -> None:
    content = MULTIPART.replace(b"a.png", b"\xff\\u12.-\xe9")
    headers = {"content-type": f"multipart/form-data; boundary=x; charset={codec}"}
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, content=content, headers=headers)

    assert response.status_code in (200, 400)
    assert response.status_code == 200 or "charset" in response.json()["detail"]


@pytest.mark.parametrize(("max_images", "status"), [(64, 413), (2000, 200)])
async def test_more_files_than_starlette_allows_by_itself_meet_our_own_limit(
    max_images: int, status: int
) -> None:
    files = [("file", ("a", b"x"))] * 1001
    async with make_client(Service(), max_images=max_images) as client:
        response = await client.post(IMAGES, files=files)

    assert response.status_code == status
    if status == 413:
        message = "the request has more than 65 images, the limit is 64"
        assert_refused(response, 413, message, code="request_too_large")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"input": uri(b"abc")}, ["input"]),
        ({"input": [uri(b"abc")]}, ["input[0]"]),
        ({"input": {"image": uri(b"abc")}}, ["input"]),
        ({"input": [{"image_url": {"url": uri(b"abc")}}]}, ["input[0]"]),
        ({"input": [{"bytes": "YWJj"}]}, ["input[0]"]),
        ({"input": ["YWJj"], "modality": "image"}, ["input[0]"]),
        ({"input": "YWJj", "modality": "image"}, ["input"]),
    ],
    ids=repr,
)
async def test_an_image_in_json_reaches_the_service_in_every_dialect(
    fields: dict[str, Any], names: list[str]
) -> None:
    service = Service()
    async with make_client(service) as client:
        response = await client.post(EMBEDDINGS, json=fields)

    np.testing.assert_array_equal(vectors(response), expected(b"abc"))
    assert service.names == names


async def test_items_of_many_dialects_in_one_request_are_answered_in_order() -> None:
    contents = [b"image %d" % i for i in range(40)]
    dialects = (uri, lambda x: {"image": uri(x)}, lambda x: {"b64_json": uri(x).split(",")[1]})
    items = [dialects[i % 3](data) for i, data in enumerate(contents)]
    async with make_client(Service()) as client:
        response = await client.post(EMBEDDINGS, json={"input": items})

    np.testing.assert_array_equal(vectors(response), expected(*contents))


async def test_base64_and_floats_are_the_same_numbers_to_the_last_bit() -> None:
    fields = {"input": [uri(b"a"), uri(b"b")], "model": "dinov2-demo"}
    async with make_client(Service()) as client:
        base64s = await client.post(EMBEDDINGS, json=fields | {"encoding_format": "base64"})
        floats = await client.post(EMBEDDINGS, json=fields | {"encoding_format": "float"})

    assert isinstance(base64s.json()["data"][0]["embedding"], str)
    assert isinstance(floats.json()["data"][0]["embedding"], list)
    np.testing.assert_array_equal(vectors(base64s), expected(b"a", b"b"))
    np.testing.assert_array_equal(vectors(floats), expected(b"a", b"b"))


@pytest.mark.parametrize("name", ["dimensions", "output_dimension"])
@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings_are_shortened_and_at_unit_length_again(name: str, encoding: str) -> None:
    fields = {"input": uri(b"abc"), "encoding_format": encoding, name: 7}
    async with make_client(Service()) as client:
        response = await client.post(EMBEDDINGS, json=fields)

    short = expected(b"abc")[:, :7]
    np.testing.assert_allclose(vectors(response), short / np.linalg.norm(short), rtol=1e-6)


async def test_a_model_that_does_not_normalise_is_shortened_as_it_is() -> None:
    config = CONFIG.model_copy(update={"normalize": False})
    async with make_client(Service(), config) as client:
        response = await client.post(EMBEDDINGS, json={"input": uri(b"abc"), "dimensions": 7})

    np.testing.assert_array_equal(vectors(response), expected(b"abc")[:, :7])


async def test_the_full_width_may_be_asked_for_and_one_more_is_refused_with_both_numbers() -> None:
    async with make_client(Service()) as client:
        full = await client.post(EMBEDDINGS, json={"input": uri(b"a"), "dimensions": WIDTH})
        more = await client.post(EMBEDDINGS, json={"input": uri(b"a"), "dimensions": WIDTH + 1})

    np.testing.assert_allclose(vectors(full), expected(b"a"), rtol=1e-6)
    message = f"dimensions is {WIDTH + 1}, the model has {WIDTH}"
    assert_refused(more, 400, message, code="invalid_request")


async def test_another_model_is_not_found_and_the_message_names_the_one_that_is() -> None:
    async with make_client(Service()) as client:
        response = await client.post(EMBEDDINGS, json={"input": uri(b"a"), "model": "clip"})

    message = "model 'clip' is not served here, only 'dinov2-demo'"
    assert_refused(response, 404, message, code="unknown_model")


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": "dinov2-demo"}], ids=repr)
async def test_the_model_may_be_named_or_left_out(fields: dict[str, Any]) -> None:
    async with make_client(Service()) as client:
        response = await client.post(EMBEDDINGS, json={"input": uri(b"a")} | fields)

    np.testing.assert_array_equal(vectors(response), expected(b"a"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"hello",
        b"null",
        b"[]",
        b"7",
        b"{}",
        b'{"input":NaN}',
        b'{"input":"\\ud800","modality":"image"}',
        b'{"input":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"input":' + b"[" * 5000,
        b'{"input":[' + b"9" * 10_000 + b"]}",
        b'{"input":["a",]}',
        b"input=abc",
    ],
    ids=lambda content: repr(content[:24]),
)
async def test_a_body_that_is_not_the_json_of_a_request_is_a_bad_request(content: bytes) -> None:
    service = Service()
    async with make_client(service) as client:
        response = await client.post(EMBEDDINGS, content=content)

    assert_refused(response, 400, "", code="invalid_request")
    assert response.json()["detail"]
    assert service.requests == []


LONG = "SECRET" * 200_000


@pytest.mark.parametrize(
    "fields",
    [
        {"input": {"text": LONG}},
        {"input": [uri(b"a"), LONG]},
        {"input": [LONG + "*"], "modality": "image"},
        {"input": "data:" + LONG},
        {"input": f"data:image/png;base64,{LONG}*"},
        {"input": [[LONG]]},
        {"input": "http://" + LONG},
        {"input": LONG + ":"},
        {"input": uri(b"a"), "encoding_format": LONG},
        {"input": uri(b"a"), "dimensions": LONG},
        {"input": uri(b"a"), "modality": [LONG]},
        {"input": uri(b"a"), "model": {"name": LONG}},
        {"model": LONG},
    ],
    ids=lambda fields: repr(fields)[:48],
)
async def test_a_request_of_the_wrong_shape_is_refused_without_its_megabyte(
    fields: dict[str, Any],
) -> None:
    async with make_client(Service()) as client:
        response = await client.post(EMBEDDINGS, json=fields)

    assert response.status_code == 400
    assert response.json()["detail"]
    assert len(response.content) < 1200
    assert "SECRET" not in response.text


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"input": {LONG: 1}}, 400), ({"input": uri(b"a"), "model": LONG}, 404)],
    ids=["key", "model"],
)
async def test_of_a_name_that_is_a_megabyte_only_the_beginning_comes_back(
    fields: dict[str, Any], status: int
) -> None:
    async with make_client(Service()) as client:
        response = await client.post(EMBEDDINGS, json=fields)

    assert response.status_code == status
    assert len(response.content) < 1200


def openai_client(service: ImageService, key: str = "any", **limits: Any) -> openai.AsyncOpenAI:
    # openai 3 brings its own successor of httpx, earlier ones take httpx itself.
    http = import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
    app = build_api(service, CONFIG, ApiLimits(**limits))
    transport = http.ASGITransport(app, raise_app_exceptions=False)
    return openai.AsyncOpenAI(
        api_key=key,
        base_url="http://test/v1",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
    )


async def test_the_openai_client_gets_equal_vectors_by_default_and_as_floats() -> None:
    items = [uri(b"a"), uri(b"b")]
    async with openai_client(Service()) as client:
        default = await client.embeddings.create(model="dinov2-demo", input=items)
        floats = await client.embeddings.create(
            model="dinov2-demo", input=items, encoding_format="float"
        )

    for reply in (default, floats):
        values = np.array([entry.embedding for entry in reply.data], np.float32)
        np.testing.assert_array_equal(values, expected(b"a", b"b"))
    assert default.usage.total_tokens == floats.usage.total_tokens == 2


async def test_the_openai_client_may_send_objects_and_ask_for_fewer_dimensions() -> None:
    items: Any = [{"image": uri(b"a")}]
    async with openai_client(Service()) as client:
        reply = await client.embeddings.create(model="dinov2-demo", input=items, dimensions=3)

    short = expected(b"a")[0, :3]
    np.testing.assert_allclose(reply.data[0].embedding, short / np.linalg.norm(short), rtol=1e-6)


async def test_the_openai_client_lists_the_model() -> None:
    async with openai_client(Service()) as client:
        models = await client.models.list()

    assert [model.id for model in models.data] == ["dinov2-demo"]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"model": "clip", "input": uri(b"a")}, openai.NotFoundError, "is not served here"),
        ({"model": "dinov2-demo", "input": "a cat"}, openai.BadRequestError, "text input"),
    ],
)
async def test_the_openai_client_raises_its_own_errors_with_our_message(
    fields: dict[str, Any], kind: type[openai.APIStatusError], message: str
) -> None:
    async with openai_client(Service()) as client:
        with pytest.raises(kind, match=message) as caught:
            await client.embeddings.create(**fields)

    assert caught.value.type == "invalid_request_error"
    assert caught.value.code in ("unknown_model", "invalid_request")


async def test_the_openai_client_passes_with_the_right_key_alone() -> None:
    fields: dict[str, Any] = {"model": "dinov2-demo", "input": uri(b"a")}
    async with openai_client(Service(), "right", api_key="right") as client:
        reply = await client.embeddings.create(**fields)
    async with openai_client(Service(), "wrong", api_key="right") as client:
        with pytest.raises(openai.AuthenticationError, match="wrong API key"):
            await client.embeddings.create(**fields)

    assert len(reply.data) == 1


@pytest.mark.parametrize(
    ("authorization", "message"),
    [
        (None, "this service wants an `Authorization: Bearer` header"),
        ("", "this service wants an `Authorization: Bearer` header"),
        ("Bearer", "this service wants an `Authorization: Bearer` header"),
        ("Basic right", "this service wants an `Authorization: Bearer` header"),
        ("right", "this service wants an `Authorization: Bearer` header"),
        ("Bearer wrong", "wrong API key"),
        ("Bearer Right", "wrong API key"),
        ("Bearer righ", "wrong API key"),
        ("Bearer right1", "wrong API key"),
        ("Bearer r\u00efght", "wrong API key"),
    ],
)
@pytest.mark.parametrize(
    ("method", "url"), [("POST", EMBEDDINGS), ("POST", IMAGES), ("GET", "/v1/models")]
)
async def test_without_the_key_nothing_is_read_or_encoded(
    authorization: str | None, message: str, method: str, url: str
) -> None:
    service, body = Service(), Chunks(b"abc")
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    async with make_client(service, api_key="right") as client:
        response = await client.request(method, url, headers=headers, content=body)

    assert_refused(response, 401, message, code="unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"
    assert service.requests == []
    assert body.num_read == 0
    assert "right" not in response.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_with_the_key_a_request_passes(scheme: str) -> None:
    headers = {"authorization": f"{scheme} right"}
    async with make_client(Service(), api_key="right", headers=headers) as client:
        response = await client.post(IMAGES, content=b"abc")
        models = await client.get("/v1/models")

    np.testing.assert_array_equal(vectors(response), expected(b"abc"))
    assert models.status_code == 200


async def test_models_are_told_of_while_no_batcher_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "REPORT_WITHIN_S", 0.05)
    async with make_client(Stuck()) as client:
        response = await client.get("/v1/models")

    assert response.status_code == 200
    assert response.json()["data"][0]["graphs"] == {}


async def test_a_key_beyond_ascii_passes() -> None:
    headers = {"authorization": "Bearer k\u00e4se".encode()}
    async with make_client(Service(), api_key="k\u00e4se", headers=headers) as client:
        response = await client.get("/v1/models")

    assert response.status_code == 200


@pytest.mark.parametrize("url", ["/health", "/ready", "/docs", "/openapi.json"])
async def test_probes_and_docs_need_no_key(url: str) -> None:
    async with make_client(Service(), api_key="right") as client:
        response = await client.get(url)

    assert response.status_code == 200


def test_the_key_does_not_show_in_the_limits() -> None:
    limits = ApiLimits(api_key="right")

    text = f"{limits!r} {limits} {limits.model_dump()} {limits.model_dump_json()}"

    assert "right" not in text


async def test_one_image_too_many_is_refused_with_both_numbers_and_the_limit_itself_passes() -> (
    None
):
    service = Service()
    items = [uri(b"%d" % i) for i in range(65)]
    files = [("file", ("a", b"%d" % i)) for i in range(65)]
    message = "the request has 65 images, the limit is 64"
    async with make_client(service) as client:
        as_json = await client.post(EMBEDDINGS, json={"input": items})
        as_files = await client.post(IMAGES, files=files)
        encoded = len(service.requests)
        fits = [
            await client.post(EMBEDDINGS, json={"input": items[:64]}),
            await client.post(IMAGES, files=files[:64]),
        ]

    assert_refused(as_json, 413, message, code="request_too_large")
    assert_refused(as_files, 413, message, code="request_too_large")
    assert encoded == 0
    assert [len(vectors(response)) for response in fits] == [64, 64]


async def test_no_images_at_all_are_refused() -> None:
    service, message = Service(), "the request has 0 images, at least 1 is needed"
    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with make_client(service) as client:
        as_json = await client.post(EMBEDDINGS, json={"input": []})
        as_multipart = await client.post(IMAGES, content=b"--x--\r\n", headers=headers)

    assert_refused(as_json, 400, message, code="invalid_request")
    assert_refused(as_multipart, 400, message, code="invalid_request")
    assert service.requests == []


CONTENT_TYPES = {
    EMBEDDINGS: "application/json",
    IMAGES: "image/png",
    f"{IMAGES}?multipart": "multipart/form-data; boundary=x",
}


@pytest.mark.parametrize("url", CONTENT_TYPES)
async def test_a_body_that_is_declared_too_long_is_refused_before_it_is_read(url: str) -> None:
    service, body = Service(), Chunks(b"abc")
    headers = {"content-type": CONTENT_TYPES[url], "content-length": "1001"}
    async with make_client(service, max_body_bytes=1000) as client:
        response = await client.post(url, content=body, headers=headers)

    message = "the body has 1001 bytes or more, the limit is 1000"
    assert_refused(response, 413, message, code="request_too_large")
    assert body.num_read == 0
    assert service.requests == []


@pytest.mark.parametrize("url", CONTENT_TYPES)
async def test_a_body_that_grows_too_long_is_refused_while_it_is_read(url: str) -> None:
    service, body = Service(), Chunks(b"--x\r\n" + PART, *[b"a" * 100] * 1000)
    async with make_client(service, max_body_bytes=1000) as client:
        headers = {"content-type": CONTENT_TYPES[url]}
        response = await client.post(url, content=body, headers=headers)

    gc.collect()
    message = "bytes or more, the limit is 1000"
    assert_refused(response, 413, message, code="request_too_large")
    assert body.num_read <= 11
    assert service.requests == []


async def test_a_length_of_thousands_of_digits_is_too_long() -> None:
    body = Chunks(b"a")
    async with make_client(Service()) as client:
        response = await client.post(IMAGES, content=body, headers={"content-length": "9" * 5000})

    assert_refused(response, 413, "the limit is", code="request_too_large")
    assert body.num_read == 0


async def test_a_client_that_leaves_while_it_sends_is_no_fault_of_ours() -> None:
    app, sent = build_api(Service(), CONFIG, ApiLimits()), list[Any]()
    messages = [
        {"type": "http.request", "body": b"a", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": IMAGES,
        "raw_path": IMAGES.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    await app(scope, receive, send)

    assert sent[0]["status"] == 400


async def test_a_body_that_understates_its_length_is_counted_all_the_same() -> None:
    body = Chunks(*[b"a" * 100] * 1000)
    async with make_client(Service(), max_body_bytes=1000) as client:
        response = await client.post(IMAGES, content=body, headers={"content-length": "10"})

    assert_refused(response, 413, "the limit is 1000", code="request_too_large")
    assert body.num_read == 11


@pytest.mark.parametrize("declare", [True, False])
async def test_a_body_of_just_the_limit_passes(declare: bool) -> None:
    content = b"a" * 1000
    body = content if declare else Chunks(content[:500], content[500:])
    async with make_client(Service(), max_body_bytes=1000) as client:
        response = await client.post(IMAGES, content=body)

    np.testing.assert_array_equal(vectors(response), expected(content))


async def test_an_answer_that_is_late_is_a_408_and_its_work_is_cancelled() -> None:
    service = Stuck()
    async with make_client(service, request_timeout_s=0.02) as client, asyncio.timeout(4):
        response = await client.post(IMAGES, content=b"abc")

    message = "1 images were not encoded within 0.02 s"
    assert_refused(response, 408, message, code="deadline_exceeded")
    assert service.was_cancelled


class Patient:
    """Notes how much time it was given."""

    def __init__(self) -> None:
        self.timeouts = list[float]()

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        self.timeouts.append(timeout_s)
        return [embedding(item.data) for item in images]


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        (None, 60.0),
        ("0.25", 0.25),
        (" 5 ", 5.0),
        ("60", 60.0),
        ("61", 60.0),
        ("inf", 60.0),
        ("1e400", 60.0),
        ("1e-300", 1e-300),
    ],
)
@pytest.mark.parametrize("url", [EMBEDDINGS, IMAGES])
async def test_a_client_may_ask_for_less_time_and_never_gets_more(
    asked: str | None, granted: float, url: str
) -> None:
    service = Patient()
    headers = {} if asked is None else {TIMEOUT_HEADER: asked}
    async with make_client(service) as client:
        await client.post(url, json={"input": uri(b"abc")}, headers=headers)

    assert service.timeouts == [granted]


@pytest.mark.parametrize(
    "asked", ["0", "-0", "-1", "-inf", "nan", "1e-400", "", "soon", "1s", "0x1", "9" * 5000 + "s"]
)
@pytest.mark.parametrize("url", [EMBEDDINGS, IMAGES])
async def test_an_impossible_time_is_refused_and_nothing_is_encoded(asked: str, url: str) -> None:
    service = Patient()
    headers = {TIMEOUT_HEADER: asked}
    async with make_client(service) as client:
        response = await client.post(url, json={"input": uri(b"abc")}, headers=headers)

    assert_refused(response, 400, f"{TIMEOUT_HEADER} is ", code="invalid_request")
    assert len(response.content) < 400
    assert service.timeouts == []


@pytest.mark.parametrize(("asked", "ours"), [("0.02", 60.0), ("60", 0.02), ("inf", 0.02)])
async def test_whichever_time_is_shorter_ends_the_request(asked: str, ours: float) -> None:
    service = Stuck()
    async with make_client(service, request_timeout_s=ours) as client, asyncio.timeout(4):
        response = await client.post(IMAGES, content=b"abc", headers={TIMEOUT_HEADER: asked})

    message = "1 images were not encoded within 0.02 s"
    assert_refused(response, 408, message, code="deadline_exceeded")
    assert service.was_cancelled


async def test_an_overloaded_service_is_a_503_that_says_when_to_come_back() -> None:
    message = "3 images wait and 1 came, the limit is 3"
    async with make_client(Service(Overloaded(message))) as client:
        response = await client.post(IMAGES, content=b"abc")

    assert_refused(response, 503, message, code="overloaded")
    assert response.headers["retry-after"] == "1"


async def test_an_error_that_names_an_item_is_passed_on_with_it() -> None:
    error = InvalidImage("broken").named("input[3]")
    async with make_client(Service(error)) as client:
        response = await client.post(EMBEDDINGS, json={"input": uri(b"a")})

    assert_refused(response, 422, "input[3]: broken", code="invalid_image", param="input[3]")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("SECRET"), ValueError("SECRET"), KeyError("SECRET"), ConfigError("SECRET")],
    ids=repr,
)
@pytest.mark.parametrize("url", [EMBEDDINGS, IMAGES])
async def test_an_error_of_ours_is_a_plain_500_that_tells_nothing(
    error: Exception, url: str
) -> None:
    async with make_client(Service(error)) as client:
        response = await client.post(url, json={"input": uri(b"a")})

    assert_refused(response, 500, "internal error")
    assert "SECRET" not in response.text + str(response.headers)
    assert "Traceback" not in response.text


async def test_an_unexpected_exception_still_reaches_the_servers_log() -> None:
    app = build_api(Service(RuntimeError("lost")), CONFIG, ApiLimits())
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        with pytest.raises(RuntimeError, match="lost"):
            await client.post(IMAGES, content=b"abc")


@pytest.mark.parametrize(
    ("method", "url", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v2/embeddings", 404),
        ("GET", EMBEDDINGS, 405),
        ("PUT", IMAGES, 405),
        ("DELETE", "/health", 405),
    ],
)
async def test_an_unknown_route_or_method_is_answered_in_the_same_shape(
    method: str, url: str, status: int
) -> None:
    async with make_client(Service()) as client:
        response = await client.request(method, url)

    assert_refused(response, status, {404: "Not Found", 405: "Method Not Allowed"}[status])


async def test_a_wrong_method_is_told_the_right_one() -> None:
    async with make_client(Service()) as client:
        response = await client.get(EMBEDDINGS)

    assert response.headers["allow"] == "POST"


async def test_health_answers_without_an_encoder() -> None:
    service = Service(RuntimeError("lost"))
    async with make_client(service) as client:
        response = await client.get("/health")

    assert (response.status_code, response.json()) == (200, {"status": "live"})
    assert service.requests == []


async def test_readiness_asks_an_encoder_once_and_then_trusts_its_answer() -> None:
    service = Service()
    async with make_client(service) as client:
        responses = [await client.get("/ready") for _ in range(3)]

    assert [response.json() for response in responses] == [{"status": "ready"}] * 3
    assert service.requests == [[CANARY]]


async def test_readiness_trusts_the_answer_to_any_request() -> None:
    service = Service()
    async with make_client(service) as client:
        await client.post(IMAGES, content=b"abc")
        response = await client.get("/ready")

    assert response.status_code == 200
    assert service.names == ["image"]


@pytest.mark.parametrize(
    "error",
    [Overloaded("full"), DeadlineExceeded("late"), InvalidImage("NaN"), ConfigError("wrong")],
    ids=repr,
)
async def test_an_encoder_that_does_not_answer_is_not_ready_until_it_does(
    error: EncoderError,
) -> None:
    service = Service(error)
    async with make_client(service) as client:
        before = await client.get("/ready")
        service.error = None
        after = await client.get("/ready")

    assert_refused(before, 503, "no encoder answers", code="overloaded")
    assert before.headers["retry-after"] == "1"
    assert after.status_code == 200


async def test_a_request_that_fails_does_not_make_a_service_ready() -> None:
    service = Service(InvalidImage("broken"))
    async with make_client(service) as client:
        await client.post(IMAGES, content=b"abc")
        response = await client.get("/ready")

    assert response.status_code == 503
    assert service.names == ["image", "canary"]


async def test_an_answer_that_is_old_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.endpoints.READY_FOR_S", 0.0)
    service = Service()
    async with make_client(service) as client:
        await client.get("/ready")
        service.error = Overloaded("full")
        response = await client.get("/ready")

    assert response.status_code == 503
    assert service.names == ["canary", "canary"]


async def test_an_encoder_that_hangs_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.endpoints.READY_FOR_S", 0.02)
    service = Stuck()
    async with make_client(service) as client, asyncio.timeout(4):
        response = await client.get("/ready")

    assert_refused(response, 503, "not encoded within 0.02 s", code="overloaded")
    assert service.was_cancelled


async def test_the_canary_passes_through_a_real_batcher() -> None:
    async with make_client(real_service()) as client:
        response = await client.get("/ready")

    assert (response.status_code, response.json()) == (200, {"status": "ready"})


async def test_the_model_is_listed_with_every_limit_that_a_client_has_to_keep() -> None:
    async with make_client(Service(), max_images=5, max_body_bytes=1000) as client:
        response = await client.get("/v1/models")

    assert response.json() == {
        "object": "list",
        "data": [
            {
                "id": "dinov2-demo",
                "object": "model",
                "owned_by": "vision-encoder-serve",
                "dimensions": 384,
                "normalized": True,
                "outputs": ["pooled", "patch"],
                "dtypes": ["float32", "float16", "bfloat16"],
                "reply_types": ["application/json", NPY, "application/vnd.safetensors"],
                "max_images_per_request": 5,
                "max_patches_per_request": 65536,
                "max_body_bytes": 1000,
                "max_image_bytes": CONFIG.limits.max_bytes,
                "max_image_pixels": CONFIG.limits.max_pixels,
                "max_aspect_ratio": CONFIG.limits.max_aspect_ratio,
                "graphs": {"host:1": asdict(GRAPHS)},
            }
        ],
    }


async def test_the_schema_lists_every_route_and_what_their_bodies_are() -> None:
    async with make_client(Service()) as client:
        schema = (await client.get("/openapi.json")).json()

    paths = schema["paths"]
    assert set(paths) == {"/health", "/ready", "/v1/models", EMBEDDINGS, IMAGES}
    as_json = paths[EMBEDDINGS]["post"]["requestBody"]["content"]
    as_images = paths[IMAGES]["post"]["requestBody"]["content"]
    assert "input" in as_json["application/json"]["schema"]["properties"]
    assert set(as_images) == {"image/*", "multipart/form-data"}
    replies = [paths[url]["post"]["responses"]["200"]["content"] for url in (EMBEDDINGS, IMAGES)]
    assert replies[0]["application/json"]["schema"]["$ref"].endswith("/EmbeddingsReply")
    both = [x["$ref"].split("/")[-1] for x in replies[1]["application/json"]["schema"]["anyOf"]]
    assert both == ["EmbeddingsReply", "PatchEmbeddingsReply"]
    assert set(replies[1]) == {"application/json", NPY, "application/vnd.safetensors"}
    assert replies[1][NPY]["schema"] == {"type": "string", "format": "binary"}
    for url in (EMBEDDINGS, IMAGES):
        assert "HTTPBearer" in json.dumps(paths[url]["post"]["security"])


async def test_the_schema_refers_to_nothing_that_it_lacks() -> None:
    async with make_client(Service()) as client:
        schema = (await client.get("/openapi.json")).json()

    names = {part.split('"')[0] for part in json.dumps(schema).split("#/components/schemas/")[1:]}
    assert names
    assert names <= set(schema["components"]["schemas"])


async def test_the_documentation_page_shows_the_schema() -> None:
    async with make_client(Service()) as client:
        response = await client.get("/docs")

    assert response.status_code == 200
    assert "/openapi.json" in response.text


async def test_many_clients_at_once_get_their_own_answers() -> None:
    values = list(range(0, 250, 5))
    async with make_client(real_service()) as client:
        responses = await asyncio.gather(
            *(client.post(IMAGES, content=png(value)) for value in values)
        )

    assert [vectors(response)[0, 0] for response in responses] == values


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_a_multipart_body_may_come_in_pieces_of_any_size(size: int) -> None:
    files = [b"abc", bytes(200_000), b"--x"]
    body = b"".join(b"--x\r\n" + PART + file + b"\r\n" for file in files) + b"--x--\r\n"
    if size < 1024:  # few bytes each, or it takes minutes
        body = body.replace(bytes(200_000), b"z")
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    service = Service()

    async with make_client(service) as client:
        reply = await client.post(
            IMAGES,
            content=Chunks(*pieces),
            headers={"content-type": "multipart/form-data; boundary=x"},
        )

    assert reply.status_code == 200
    (items,) = service.requests
    assert [len(item.data) for item in items] == [3, 1 if size < 1024 else 200_000, 3]


async def test_a_large_multipart_body_lets_others_have_their_turn() -> None:
    body = b"--x\r\n" + PART + bytes(20 << 20) + b"\r\n--x--\r\n"
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with make_client(Service()) as client:
        task = asyncio.create_task(other())
        await client.post(
            IMAGES, content=body, headers={"content-type": "multipart/form-data; boundary=x"}
        )
        task.cancel()

    assert turns > 20 * 16  # once after each 64 KiB
