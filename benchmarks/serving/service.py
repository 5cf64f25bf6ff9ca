"""Starts a service with a Ray of its own, as its Serve file would, and ends it."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import yaml

from benchmarks.serving.meters import cpu_seconds
from benchmarks.serving.plans import Service
from serve_app.production import MALLOC

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOYMENTS = {
    "split": ("Ingress", "Batcher", "Encoder"),
    "inline": ("Ingress", "Encoder"),
    "fused": ("Ingress",),
}
PROXIES = ("python", "haproxy")
UP_S = 600.0
"""How long a service may take to load its encoder and answer."""
DOWN_S = 60.0
STORE_BYTES = 1 << 30, 16 << 30
"""Of Ray's object store: at least, and at most, of half of the shared memory."""
PORTS = count(30_000, 50)
"""Of replicas: a range for each service, since one may still be ending when the next starts."""


@dataclass(frozen=True)
class Server:
    """A service that answers, and the process whose descendants are all of it."""

    base: str
    pid: int

    @property
    def url(self) -> str:
        """Where images go."""
        return f"{self.base}/v1/images/embeddings"

    def graphs(self, num_encoders: int) -> list[dict[str, Any]]:
        """How each encoder's graphs stood when it last answered; none if not all could be asked.

        Fused, a replica knows its own encoder alone, and the proxy chooses whom a request reaches.
        """
        told: dict[str, dict[str, Any]] = {}
        for _ in range(20 * num_encoders):
            with urllib.request.urlopen(f"{self.base}/v1/models", timeout=30) as reply:
                (model,) = json.load(reply)["data"]
            told |= model["graphs"]
            if len(told) >= num_encoders:
                return list(told.values())
        return []


def environment(service: Service, folder: str, ports: Sequence[int]) -> dict[str, str]:
    """What Ray's processes read when they start."""
    fixed = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # else each end takes half a minute
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(service.proxy == "haproxy")),
    }
    own = apart(folder, ports, next(PORTS))
    graphs = {f"ENCODER_{name.upper()}": value for name, value in service.graphs}
    return fixed | MALLOC | graphs | (own if service.proxy == "haproxy" else {})


def apart(folder: str, ports: Sequence[int], first_port: int) -> dict[str, str]:
    """HAProxy's own ports and files, lest it meets another service's on this machine.

    `ports` are those of its metrics, of its statistics, and of Ray's proxy behind it; a replica
    takes one of the 50 from `first_port` on.
    """
    return {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_port + 49),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }


def replica_counts(topology: str, wanted: dict[str, int]) -> dict[str, int]:
    """Replicas of each deployment. Fused, each Ingress holds an encoder and needs its device."""
    if topology == "fused":
        return {"Ingress": wanted.get("Encoder", 1)}
    return {name: wanted.get(name, 1) for name in DEPLOYMENTS[topology]}


def store_bytes() -> int:
    """For Ray's object store, through which pixels and rows pass."""
    least, most = STORE_BYTES
    return max(least, min(most, shutil.disk_usage("/dev/shm").free // 2))


def serve_until_told(
    pipe: Connection,
    env: dict[str, str],
    app_args: dict[str, Any],
    replicas: dict[str, int],
    http_port: int,
    num_gpus: int,
) -> None:
    """A process that starts Ray and the app, says so, and ends both when its pipe closes."""
    os.dup2(2, 1)  # stdout is for the results alone
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(env)
    import ray
    from ray import serve

    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=store_bytes(),
        log_to_driver=False,
    )
    try:
        deploy(app_args, replicas, http_port)
        pipe.send(None)
        pipe.recv()
    except (EOFError, KeyboardInterrupt):
        pass  # the benchmark died; what it started has to end all the same
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(app_args: dict[str, Any], replicas: dict[str, int], http_port: int) -> None:
    """Start the app as its YAML would, and wait until all of it runs."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    http = {"host": "127.0.0.1", "port": http_port}
    app = {
        "name": "encoder",
        "route_prefix": "/",
        "import_path": "serve_app.app:build_app",
        "args": app_args,
        "deployments": [{"name": name, "num_replicas": n} for name, n in replicas.items()],
    }
    logs = {"enable_access_log": False}  # as in the shipped files
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config=logs)
    # `serve.run` cannot set the number of replicas; this is what `serve run FILE.yaml` calls.
    schema = ServeDeploySchema(
        applications=[app], http_options=http, proxy_location="HeadOnly", logging_config=logs
    )
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(schema)
    deadline = time.monotonic() + UP_S
    while (status := serve.status().applications.get("encoder")) is None or (
        status.status != "RUNNING"
    ):
        if time.monotonic() > deadline or (status and status.status == "DEPLOY_FAILED"):
            raise RuntimeError(f"the app does not run: {status}")
        time.sleep(0.2)


class Services:
    """Starts services one after another; one may still be ending while the next one loads."""

    def __init__(self, app_args: dict[str, Any], wanted: dict[str, int], machine: Any) -> None:
        self._app_args = app_args
        self._wanted = wanted
        self._device: str = machine.device
        self._ending: list[threading.Thread] = []

    @contextmanager
    def served(self, service: Service, up_s: float) -> Iterator[Server]:
        """A service that answers within so many seconds, alone on the machine."""
        args = self._app_args | {
            "encoder": service.encoder,
            "topology": service.topology,
            "device": self._device,
        }
        wanted = self._wanted | {"Encoder": service.gpus * self._wanted.get("Encoder", 1)}
        replicas = replica_counts(service.topology, wanted)
        num_gpus = wanted["Encoder"] if self._device == "cuda" else 0
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        http_port, *ports = free_ports(4)
        folder = tempfile.mkdtemp(prefix="bench-")
        env = environment(service, folder, ports)
        process = spawn.Process(
            target=serve_until_told, args=(theirs, env, args, replicas, http_port, num_gpus)
        )
        process.start()
        theirs.close()  # from now on its death is an EOFError here
        deadline = time.monotonic() + up_s
        try:
            if not ours.poll(up_s):
                raise TimeoutError(f"{service.told} was not up within {up_s:.0f} s")
            ours.recv()
            base = f"http://127.0.0.1:{http_port}"
            wait_until_ready(base, deadline)
            self.wait_for_ends()
            assert process.pid is not None
            yield Server(base, process.pid)
        finally:
            ours.close()
            thread = threading.Thread(target=end, args=(process, folder))
            thread.start()
            self._ending.append(thread)

    def wait_for_ends(self) -> None:
        """Until no earlier service is left."""
        for thread in self._ending:
            thread.join()
        self._ending.clear()


def end(process: SpawnProcess, folder: str) -> None:
    """Let a service end by itself, else by force, with all that it started."""
    process.join(DOWN_S)
    if process.is_alive():
        for pid in cpu_seconds(process.pid or 0):
            os.kill(pid, signal.SIGKILL)
        process.join()
    shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_until_ready(base: str, deadline: float) -> None:
    """Until the encoder answers through the proxy."""
    while True:
        try:
            urllib.request.urlopen(f"{base}/ready", timeout=30).close()
            return
        except OSError:  # of urllib too
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def app_arguments(encoder: str | None, like: Path | None) -> dict[str, Any]:
    """The app's arguments as a Serve file has them, but for the encoder if another is named."""
    args: dict[str, Any] = {"encoder": "dinov2-demo"}
    if like:
        args |= yaml.safe_load(like.read_text())["applications"][0]["args"]
        args.pop("encoder_labels", None)  # this Ray has no nodes with labels
        args.pop("sglang", None)
    if encoder:
        args["encoder"] = encoder
    if Path(args["encoder"]).suffix in (".yaml", ".yml"):
        args["encoder"] = str(Path(args["encoder"]).resolve())  # Ray's processes start elsewhere
    return args
