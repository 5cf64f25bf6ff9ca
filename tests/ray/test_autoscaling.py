"""Replicas come and go with the load, by the policies of the shipped files, in a real cluster."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.bad_images import flat_png
from tests.tiny import write_tiny_encoder

# The time is for machines that have more to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

IMAGES = "/v1/images/embeddings"
EDGE = 280
"""20 patches. The longer side alone decides how many an image has, so that one tower does all."""
HUGE = 12_000
BOUNDS = {
    "min_replicas": 1,
    "max_replicas": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2,
    "upscale_delay_s": 1,
    "downscale_delay_s": 2,
}
BY_PATCHES = {
    "policy": {
        "policy_function": "serve_app.autoscaling:PatchPolicy",
        "policy_kwargs": {"patches": HUGE / 10, "requests": 1.5},
    }
}
BY_REQUESTS = {"target_ongoing_requests": 1.5}  # Ray's own policy, at the same target
BY_AGE = {
    "policy": {
        "policy_function": "serve_app.autoscaling:QueueAgePolicy",
        "policy_kwargs": {"age_s": 0.005},
    }
}
ONE, TWO = {"RUNNING": 1}, {"RUNNING": 2}


def strip(patches: int) -> bytes:
    """An image that becomes so many patches, 20 in each column."""
    return flat_png(20, patches // 20)


def slow_jpeg(side: int) -> bytes:
    """An image that takes longer to decode than the tower takes for it: noise, in many scans."""
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", progressive=True)
    return file.getvalue()


def application(name: str, encoder: Path, **scaling: dict[str, Any]) -> Any:
    """An entry of `applications`, some of whose deployments scale."""
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "serve_app.app:build_app",
        "args": {
            "encoder": str(encoder),
            "topology": "inline",
            "device": "cpu",
            "batch": {"max_patches": HUGE},
            "queue": {"decode_threads": 1},
        },
        "deployments": [
            {"name": deployment, "autoscaling_config": BOUNDS | policy}
            for deployment, policy in scaling.items()
        ],
    }


@pytest.fixture(scope="module")
def apps(served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same tower twice, with other policies; the URL before their names."""
    folder = tmp_path_factory.mktemp("tiny")
    encoder = write_tiny_encoder(folder, shortest_edge=EDGE, max_pixels=HUGE * 14**2)
    applications = [
        application("patches", encoder, Encoder=BY_PATCHES),
        application("requests", encoder, Encoder=BY_REQUESTS, Ingress=BY_AGE),
    ]
    config = ServeDeploySchema.model_validate({"applications": applications})
    _get_global_client().deploy_apps(config, _blocking=True)
    yield served
    for app in applications:
        serve.delete(app["name"], _blocking=False)


def replicas(app: str, deployment: str) -> dict[str, int]:
    """How many replicas there are, by state."""
    return serve.status().applications[app].deployments[deployment].replica_states


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Return as soon as it holds."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {timeout_s} s: {what}: {serve.status()}"
        time.sleep(0.1)


@contextmanager
def load(url: str, images: list[bytes], clients: int = 1, rest_s: float = 0) -> Iterator[list[int]]:
    """Each client posts the images again and again; the list grows by each answer's status."""
    stop, statuses = threading.Event(), list[int]()
    files = [("file", image) for image in images]

    def post() -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                statuses.append(client.post(url + IMAGES, files=files).status_code)
                stop.wait(rest_s)

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(post) for _ in range(clients)]
        try:
            yield statuses
        finally:
            stop.set()
    for client in running:
        client.result()


def test_few_huge_images_add_encoders_where_a_count_of_requests_does_not(apps: str) -> None:
    huge = [strip(HUGE)]
    with (  # each has one request under way, and often none
        load(f"{apps}/patches", huge, rest_s=0.3) as of_patches,
        load(f"{apps}/requests", huge, rest_s=0.3) as of_requests,
    ):
        wait_for(lambda: replicas("patches", "Encoder") == TWO, "patches at 2")
        seen = len(of_requests)
        wait_for(lambda: len(of_requests) > seen, "another answer")
        counted = replicas("requests", "Encoder")

    assert counted == ONE
    assert set(of_patches + of_requests) == {200}
    wait_for(lambda: replicas("patches", "Encoder") == ONE, "patches back at 1")


def test_batches_that_wait_for_a_slot_count_as_requests_and_add_an_encoder(apps: str) -> None:
    with load(f"{apps}/requests", [strip(4000)], clients=8) as statuses:
        wait_for(lambda: replicas("requests", "Encoder") == TWO, "requests at 2")

    assert set(statuses) == {200}
    wait_for(lambda: replicas("requests", "Encoder") == ONE, "requests back at 1")


def test_images_that_wait_long_to_be_decoded_add_a_batcher(apps: str) -> None:
    with load(f"{apps}/requests", [slow_jpeg(1500)] * 10, clients=4) as statuses:
        wait_for(lambda: replicas("requests", "Ingress") == TWO, "the Ingress at 2")

    assert set(statuses) == {200}
    wait_for(lambda: replicas("requests", "Ingress") == ONE, "the Ingress back at 1")
