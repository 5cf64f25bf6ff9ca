"""The same service in every topology, and what survives the death of a replica in each."""

import io
from pathlib import Path

import httpx
import numpy as np
import pytest
from ray import serve

from encoders.encoder import Encoder
from encoders.image import decode_rgb
from encoders.packing import PackedBatch
from encoders.sizes import grid_thw
from serve_app.app import build_app
from serve_app.args import AppArgs

TIERS = {
    "split": {"Ingress", "Batcher", "Encoder"},
    "inline": {"Ingress", "Encoder"},
    "fused": {"Ingress"},
}


@pytest.mark.parametrize("topology", ["inline", "fused"])
def test_every_topology_gives_the_same_embeddings(
    served: str, photos: dict[str, bytes], demo_encoder: Encoder, topology: str
) -> None:
    app = build_app(AppArgs(device="cpu", topology=topology))
    serve.run(app, name=topology, route_prefix=f"/{topology}")
    names = ["astronaut.png", "coffee.png", "rocket.jpg"]

    reply = httpx.post(
        f"{served}/{topology}/v1/images/embeddings",
        files=[("file", photos[name]) for name in names],
        headers={"Accept": "application/x-npy"},
        timeout=60,
    )
    ready = httpx.get(f"{served}/{topology}/ready", timeout=60)
    models = httpx.get(f"{served}/{topology}/v1/models", timeout=60).json()

    pixels = [decode_rgb(photos[name], demo_encoder.config.limits) for name in names]
    grids = [grid_thw(demo_encoder.config, *image.shape[:2]) for image in pixels]
    expected = np.stack(demo_encoder.encode(PackedBatch.of(pixels, grids, 1)))
    np.testing.assert_allclose(np.load(io.BytesIO(reply.content)), expected, atol=2e-5)
    assert ready.status_code == 200
    ((encoder, graphs),) = models["data"][0]["graphs"].items()
    assert graphs["misses"].keys() == {"backend"}  # of one encoder, which is on the CPU
    environ = Path(f"/proc/{encoder.rpartition(':')[2]}/environ").read_bytes()
    assert b"OMP_WAIT_POLICY=PASSIVE" in environ
    assert set(serve.status().applications[topology].deployments) == TIERS[topology]
    serve.delete(topology)
