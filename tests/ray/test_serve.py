"""The demo encoder behind real Ray and real HTTP."""

import asyncio
import base64
import io
import time
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from PIL import Image, ImageEnhance

from encoders import EncoderConfig
from encoders.encoder import Encoder
from encoders.image import decode_rgb
from encoders.packing import PackedBatch
from encoders.sizes import grid_thw
from tests.bad_images import BAD_IMAGES, BadImage, jpeg

IMAGES = "/v1/images/embeddings"
NPY = {"Accept": "application/x-npy"}


def data_uri(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def embed(url: str, files: list[bytes]) -> np.ndarray:
    """One request with many files, answered as an array."""
    parts = [("file", data) for data in files]
    reply = httpx.post(url + IMAGES, files=parts, headers=NPY, timeout=60).raise_for_status()
    return np.load(io.BytesIO(reply.content))


def test_a_posted_photo_comes_back_as_its_embedding(
    served: str, photos: dict[str, bytes], demo_encoder: Encoder
) -> None:
    data = photos["astronaut.png"]

    reply = httpx.post(served + IMAGES, content=data, timeout=60)

    assert reply.status_code == 200
    (item,) = reply.json()["data"]
    config = demo_encoder.config
    pixels = decode_rgb(data, config.limits)
    batch = PackedBatch.of([pixels], [grid_thw(config, *pixels.shape[:2])], 1)
    assert len(item["embedding"]) == 384
    np.testing.assert_allclose(item["embedding"], demo_encoder.encode(batch)[0], atol=2e-5)


def test_the_model_shows_each_encoders_graphs(served: str, photos: dict[str, bytes]) -> None:
    embed(served, [photos["astronaut.png"]])

    models = httpx.get(served + "/v1/models", timeout=60).json()

    ((_, graphs),) = models["data"][0]["graphs"].items()
    assert graphs["misses"].keys() == {"backend"}  # the attention of the CPU is not captured
    assert graphs["hits"] == graphs["mismatches"] == 0


def test_many_files_come_back_in_order_whatever_their_neighbours(
    served: str, photos: dict[str, bytes]
) -> None:
    alone = np.concatenate([embed(served, [data]) for data in photos.values()])

    together = embed(served, list(photos.values()))

    np.testing.assert_allclose(together, alone, atol=2e-5)


def test_the_openai_client_needs_no_persuasion(served: str, photos: dict[str, bytes]) -> None:
    files = [photos["chelsea.png"], photos["rocket.jpg"]]
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="unused", max_retries=0)

    with client:
        packed = client.embeddings.create(model="dinov2-demo", input=list(map(data_uri, files)))
        floats = client.embeddings.create(
            model="dinov2-demo", input=list(map(data_uri, files)), encoding_format="float"
        )
        with pytest.raises(openai.BadRequestError, match="not fetched"):
            client.embeddings.create(model="dinov2-demo", input="https://example.org/cat.jpg")
        assert [model.id for model in client.models.list()] == ["dinov2-demo"]

    expected = embed(served, files)
    for reply in (packed, floats):
        np.testing.assert_allclose([x.embedding for x in reply.data], expected, atol=2e-5)
    assert packed.usage.prompt_tokens == 2 * 16 * 24


@pytest.mark.parametrize("bad", BAD_IMAGES.values(), ids=BAD_IMAGES.keys())
async def test_a_bad_image_is_refused_within_a_second_and_its_neighbours_are_answered(
    served: str, bad: BadImage
) -> None:
    async with httpx.AsyncClient(base_url=served, timeout=60) as client:
        good = [client.post(IMAGES, content=jpeg(seed=seed)) for seed in range(6)]
        neighbours = asyncio.gather(*good)
        start = time.monotonic()
        refused = await client.post(IMAGES, files=[("file", jpeg()), ("file", bad.data)])
        took = time.monotonic() - start
        answered = [reply.status_code for reply in await neighbours]

    body = refused.json()
    assert refused.status_code == bad.status, body
    assert took < 1
    assert body["detail"] == body["error"]["message"]
    assert body["error"]["param"] == "file[1]"
    assert body["detail"].startswith("file[1]: ")
    assert all(number in body["detail"] for number in bad.said), body
    assert answered == [200] * 6


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [
        ("data:image/png;base64,?!", 400, "input[0]: wrong base64"),
        ("a picture of a cat", 400, "input[0]: text input is not supported"),
        ("https://example.org/cat.jpg", 400, "input[0]: https: addresses are not fetched"),
        ("file:///etc/passwd", 400, "input[0]: file: addresses are not fetched"),
    ],
)
def test_a_bad_item_is_refused_by_name(served: str, value: str, status: int, said: str) -> None:
    reply = httpx.post(f"{served}/v1/embeddings", json={"input": [value]}, timeout=60)

    assert reply.status_code == status
    assert reply.json()["error"]["param"] == "input[0]"
    assert reply.json()["detail"].startswith(said)


def test_65_files_are_refused_with_both_numbers(served: str) -> None:
    reply = httpx.post(served + IMAGES, files=[("file", jpeg())] * 65, timeout=60)

    assert reply.status_code == 413
    assert reply.json()["detail"] == "the request has 65 images, the limit is 64"


def test_live_ready_and_documented(served: str) -> None:
    for path in ("/health", "/ready", "/docs", "/openapi.json"):
        assert httpx.get(served + path, timeout=60).status_code == 200, path


def test_only_the_encoder_process_has_torch(served: str) -> None:
    httpx.get(f"{served}/ready", timeout=60).raise_for_status()
    with_torch = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended meanwhile
            title = (process / "cmdline").read_bytes().strip(b"\0 ").decode()
            if title.startswith("ray::ServeReplica:"):
                name = title.split(":")[-1].split(".")[0]  # a method that runs is shown behind it
                with_torch[name] = "libtorch" in (process / "maps").read_text()

    assert with_torch == {"Ingress": False, "Batcher": False, "Encoder": True}


def augmented(photo: Image.Image, rng: np.random.Generator) -> bytes:
    """A turned, cropped, perhaps mirrored and brightened or darkened part of a photo, as JPEG."""
    scale = rng.uniform(0.35, 0.6)
    width, height = int(photo.width * scale), int(photo.height * scale)
    left = rng.integers(0, photo.width - width + 1)
    top = rng.integers(0, photo.height - height + 1)
    part = photo.rotate(rng.uniform(-15, 15), Image.Resampling.BICUBIC)
    part = part.crop((left, top, left + width, top + height))
    if rng.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    file = io.BytesIO()
    ImageEnhance.Brightness(part).enhance(rng.uniform(0.7, 1.3)).save(file, "JPEG", quality=90)
    return file.getvalue()


def test_crops_find_the_photo_they_were_cut_from(
    served: str, photos: dict[str, bytes], demo_config: EncoderConfig
) -> None:
    rng = np.random.default_rng(0)
    pixels = [decode_rgb(data, demo_config.limits) for data in photos.values()]
    crops = [augmented(Image.fromarray(photo), rng) for photo in pixels for _ in range(6)]
    library = embed(served, list(photos.values()))

    found = np.concatenate([embed(served, crops[i : i + 40]) for i in range(0, len(crops), 40)])

    top1 = (found @ library.T).argmax(axis=1) == np.repeat(np.arange(len(photos)), 6)
    assert top1.mean() >= 0.85
