"""Patch output over real Ray and real HTTP: the very bits of the encoder, whoever reads them."""

import io
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import ray
import safetensors.torch
import torch
from ray import serve

from encoders import EncoderConfig
from encoders.image import decode_rgb
from encoders.packing import PackedBatch
from encoders.sizes import grid_thw
from serve_app.service import Dtype, Encoded, Rows

PATCH = "/v1/images/embeddings?output=patch"
NPY, SAFETENSORS = "application/x-npy", "application/vnd.safetensors"


def encoded(config: EncoderConfig, files: list[bytes], dtype: Dtype) -> list[Rows]:
    """The rows that the served encoder itself gives, by a call past HTTP."""
    pixels = [decode_rgb(data, config.limits) for data in files]
    grids = [grid_thw(config, *image.shape[:2]) for image in pixels]
    batch = PackedBatch.of(pixels, grids, 1)
    encoder = serve.get_deployment_handle("Encoder", "default")
    result: Encoded = encoder.encode.remote(batch, "patch", [dtype] * len(files)).result(
        timeout_s=60
    )
    return list(result.rows)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_patch_rows_have_the_encoders_bits(
    served: str, photos: dict[str, bytes], demo_config: EncoderConfig, dtype: Dtype
) -> None:
    # Each alone: a batch of one is the same batch however it comes.
    for data in [photos["chelsea.png"], photos["rocket.jpg"]]:
        reply = httpx.post(f"{served}{PATCH}&dtype={dtype}", content=data, timeout=60)

        file = io.BytesIO(reply.raise_for_status().content)
        offsets, grids, rows = np.load(file), np.load(file), np.load(file)
        (expected,) = encoded(demo_config, [data], dtype)
        assert rows.tobytes() == expected.tobytes()
        assert rows.dtype == np.dtype(dtype)
        assert offsets.tolist() == [0, len(expected)] == [0, grids[0].prod()]


def test_patch_rows_in_bfloat16_have_the_encoders_bits(
    served: str, photos: dict[str, bytes], demo_config: EncoderConfig
) -> None:
    data = photos["coffee.png"]

    reply = httpx.post(f"{served}{PATCH}&dtype=bfloat16", content=data, timeout=60)

    rows = safetensors.torch.load(reply.raise_for_status().content)["rows"]
    (expected,) = encoded(demo_config, [data], "bfloat16")
    assert rows.dtype == torch.bfloat16
    assert rows.view(torch.int16).numpy().tobytes() == expected.tobytes()


def test_many_chunks_arrive_whole_and_in_order(served: str, photos: dict[str, bytes]) -> None:
    files = list(photos.values()) * 2
    parts = [("file", data) for data in files]

    reply = httpx.post(
        served + PATCH, files=parts, headers={"Accept": SAFETENSORS}, timeout=60
    ).raise_for_status()

    tensors = safetensors.torch.load(reply.content)
    offsets, rows = tensors["offsets"].tolist(), tensors["rows"]
    assert len(reply.content) > 10 * 2**20
    assert offsets[-1] == len(rows) == int(tensors["grid_thw"].prod(1).sum())
    for i in (0, 7, 39):
        alone = httpx.post(served + PATCH, content=files[i], timeout=60)
        file = io.BytesIO(alone.content)
        _, _, expected = np.load(file), np.load(file), np.load(file)
        np.testing.assert_allclose(rows[offsets[i] : offsets[i + 1]], expected, atol=2e-4)


def test_a_client_that_leaves_midway_costs_no_traceback(
    served: str, photos: dict[str, bytes]
) -> None:
    parts = [("file", data) for data in list(photos.values()) * 3]
    request = httpx.Request("POST", served + PATCH, files=parts)
    address = urlsplit(served)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())

    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"POST {PATCH} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    time.sleep(1)
    reply = httpx.post(served + PATCH, content=photos["chelsea.png"], timeout=60)

    assert reply.status_code == 200
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = [path.read_text() for path in (logs / "serve").glob("*Ingress*.log")]
    assert texts
    assert "Traceback" not in "".join(texts)
