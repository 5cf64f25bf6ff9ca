"""One Ray cluster and one served app for the whole session, on loopback."""

import os
import socket
from collections.abc import Iterator

import pytest

# Read by Ray's processes when they start: without it, each shutdown waits half a minute.
os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder carries the marker."""
    for item in items:
        if item.path.parent.name == "ray":
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def served() -> Iterator[str]:
    """Base URL of the demo encoder behind real HTTP, with the topology of serve_config.yaml."""
    import ray
    from ray import serve

    from serve_app.app import AppArgs, build_app

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A cluster of our own, whatever else runs on this machine.
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=300_000_000)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app(AppArgs(device="cpu")))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
