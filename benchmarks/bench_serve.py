"""What the service costs over the bare `Encoder`, by topology, by proxy and by load.

Two regimes. One caller at a time pays each tier's latency, and nothing is batched. Many callers are
bound by the CPU work around the encoder (proxy, HTTP, decoding, Ray's calls) as long as that costs
more than the encoder itself: there `cpu_ms_per_image` times the throughput nears the number of
cores, and `http_images_per_s` stays below `bare_images_per_s`. Else the encoder is the limit, the
two figures meet, and more callers only wait longer.

Real JPEGs, another image in each request, answers as npy, no cache anywhere; closed loops, and with
--rate an open one (benchmarks/load.py). A fresh Ray for each proxy and topology. The Encoder alone
gets the same images decoded and packed before the clock starts, in batches as large as the load can
make wait at once within the service's limits. `cpu_ms_per_image` is utime + stime of every process
of Ray and the service, idle ones too, so a slow load pays for more of their background. Apart from
it, `generator_core` is the busiest load generator's share of a core: near 1 it is the limit itself.
`other_cores` is what everybody else took of the machine meanwhile; --patience waits and repeats.
Where nothing was answered, there is null. HAProxy listens on every interface while it runs.
The last line of stdout is one JSON document.

usage: python benchmarks/bench_serve.py [--encoder dinov2-demo] [--device auto]
       [--topologies split,inline,fused] [--proxies python,haproxy] [--cases 224x224,512x512]
       [--concurrency 1,8,32] [--seconds 10] [--rate 50] [--images-per-request 1]
       [--like configs/serve/h200.yaml] [--replicas Ingress=4] [--clients 4] [--write NAME]
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from benchmarks.load import Generators, Load, Summary, Window, jpegs, summarize
from encoders.config import EncoderConfig
from encoders.image import decode_rgb
from encoders.packing import PackedBatch
from encoders.sizes import NUM_PREFIX, grid_thw
from serve_app.waiting import BatchLimits

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
DEPLOYMENTS = {
    "split": ("Ingress", "Batcher", "Encoder"),
    "inline": ("Ingress", "Encoder"),
    "fused": ("Ingress",),
}
PROXIES = ("python", "haproxy")
NUM_IMAGES = 256
WARM_UP_S = 3.0
CALM_CORES = 0.1
"""What others may take of the machine beside a measurement, if they can be waited for."""
UP_S = 600.0
"""How long a service may take to load its encoder and answer."""
DOWN_S = 120.0
OBJECT_STORE_BYTES = 1_000_000_000
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "536870912", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
"""As in the images that are deployed: large buffers are not mapped anew for each request."""


@dataclass(frozen=True)
class Row:
    """One measurement. Images, not requests, per second."""

    case: str
    proxy: str
    topology: str
    loop: str
    concurrency: int | None
    http_images_per_s: float
    bare_images_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_ms_per_image: float | None
    errors: int


class Beside(NamedTuple):
    """Who else used the machine during a measurement, in cores."""

    generator_core: float
    other_cores: float


@dataclass(frozen=True)
class Bare:
    """The Encoder by itself: images/s by case and batch size, and where it ran."""

    images_per_s: dict[tuple[str, int], float]
    device: str
    hardware: str
    num_gpus: int


@dataclass(frozen=True)
class Server:
    """A service that answers, and the process whose descendants are all of it."""

    url: str
    pid: int


@dataclass(frozen=True)
class Plan:
    """What to measure, beside which service."""

    images: dict[str, list[bytes]]
    concurrencies: list[int]
    rate: float | None
    images_per_request: int
    seconds: float
    processes: int
    patience_s: float
    limits: BatchLimits

    def loads(self, url: str) -> Iterator[Load]:
        """The closed loops, then the open one."""
        for concurrency in self.concurrencies:
            yield Load(url, self.images_per_request, concurrency=concurrency)
        if self.rate:
            yield Load(url, self.images_per_request, rate=self.rate)

    def outstanding(self, concurrency: int | None) -> int:
        """Images that can wait at once; an open loop bounds nothing."""
        callers = self.limits.max_images if concurrency is None else concurrency
        return callers * self.images_per_request


def batch_size(outstanding: int, case: str, config: EncoderConfig, limits: BatchLimits) -> int:
    """The largest batch that so many images at once can become."""
    _, rows, columns = grid_thw(config, *map(int, case.split("x")))
    return max(min(outstanding, limits.max_images, limits.max_patches // (rows * columns)), 1)


def packed(images: Sequence[bytes], size: int, config: EncoderConfig) -> list[PackedBatch]:
    """Batches of the images, decoded, each another."""
    pixels = [decode_rgb(data, config.limits) for data in images]
    grids = [grid_thw(config, *array.shape[:2]) for array in pixels]
    starts = range(0, len(pixels) - size + 1, size)
    prefix = NUM_PREFIX[config.family]
    return [PackedBatch.of(pixels[i : i + size], grids[i : i + size], prefix) for i in starts]


def bare(encoder: str, device: str, plan: Plan) -> Bare:
    """Load the Encoder and measure it at every case and batch size."""
    import torch

    from encoders.encoder import Encoder

    config = EncoderConfig.load(encoder)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = Encoder.load(config, device)
    outstanding = {plan.outstanding(load.concurrency) for load in plan.loads("")}
    speeds = {}
    for case, files in plan.images.items():
        for size in sorted({batch_size(count, case, config, plan.limits) for count in outstanding}):
            batches = packed(files[: max(8, 2 * size)], size, config)
            measurement = partial(calls_per_s, loaded.encode, batches, plan.seconds / 2)
            calls, beside = calmest(measurement, os.getpid(), plan.patience_s)
            sys.stderr.write(f"bare {case} by {size}: {size * calls:.1f} images/s {beside}\n")
            speeds[case, size] = size * calls
    on_gpu = device == "cuda"
    hardware = torch.cuda.get_device_name() if on_gpu else cpu_name()
    return Bare(speeds, device, hardware, torch.cuda.device_count() if on_gpu else 0)


def calls_per_s(
    call: Callable[[PackedBatch], object], batches: Sequence[PackedBatch], seconds: float
) -> tuple[float, Beside]:
    """One call after another, as the engine thread makes them, after two rounds of warm-up."""
    for batch in [*batches, *batches]:
        call(batch)
    meter = Meter(os.getpid())
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        call(batches[count % len(batches)])
        count += 1
    ours_s, busy_s = meter.read()
    return count / elapsed, Beside(0.0, round(max(busy_s - ours_s, 0.0) / elapsed, 2))


def cpu_name() -> str:
    """As the kernel calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """A call in a process of its own, so that its threads and memory are gone afterwards."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def environment(proxy: str, folder: str, ports: Sequence[int]) -> dict[str, str]:
    """What Ray's processes read when they start."""
    fixed = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # else each end takes half a minute
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(proxy == "haproxy")),
    }
    # HAProxy's own ports and files, lest it meets another service's on this machine.
    own = {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }
    return fixed | MALLOC | (own if proxy == "haproxy" else {})


def replica_counts(topology: str, wanted: dict[str, int]) -> dict[str, int]:
    """Replicas of each deployment. Fused, each Ingress holds an encoder and needs its device."""
    if topology == "fused":
        return {"Ingress": wanted.get("Encoder", 1)}
    return {name: wanted.get(name, 1) for name in DEPLOYMENTS[topology]}


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
        object_store_memory=OBJECT_STORE_BYTES,
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


@contextmanager
def served(
    proxy: str, app_args: dict[str, Any], wanted: dict[str, int], num_gpus: int
) -> Iterator[Server]:
    """The service behind a proxy, with a Ray of its own."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    http_port, *ports = free_ports(3)
    replicas = replica_counts(app_args["topology"], wanted)
    with tempfile.TemporaryDirectory() as folder:
        env = environment(proxy, folder, ports)
        args = (theirs, env, app_args, replicas, http_port, num_gpus)
        process = spawn.Process(target=serve_until_told, args=args)
        process.start()
        theirs.close()  # from now on its death is an EOFError here
        try:
            ours.recv()
            url = f"http://127.0.0.1:{http_port}"
            wait_until_ready(url)
            assert process.pid is not None
            yield Server(f"{url}/v1/images/embeddings", process.pid)
        finally:
            ours.close()
            end(process)


def end(process: SpawnProcess) -> None:
    """Let a service end by itself, else by force, with all that it started."""
    process.join(DOWN_S)
    if process.is_alive():
        for pid in cpu_seconds(process.pid or 0):
            os.kill(pid, signal.SIGKILL)
        process.join()


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_until_ready(url: str) -> None:
    """Until the encoder answers through the proxy."""
    deadline = time.monotonic() + UP_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=30).close()
            return
        except OSError:  # of urllib too
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def cpu_seconds(root: int) -> dict[int, float]:
    """utime + stime of a process and each of its descendants, by pid."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return {pid: seconds[pid] for pid in parents if root in ancestry(pid, parents)}


def ancestry(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """A process, its parent, and so on."""
    while pid:
        yield pid
        pid = parents.get(pid, 0)


class Meter:
    """CPU seconds since it was made: of a service, and of the whole machine."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._before = cpu_seconds(root)
        self._busy_before = busy_seconds()

    def read(self) -> tuple[float, float]:
        """The service's, and all of the machine's. A process that came meanwhile counts whole."""
        after = cpu_seconds(self._root)
        service = sum(seconds - self._before.get(pid, 0.0) for pid, seconds in after.items())
        return service, busy_seconds() - self._busy_before


def busy_seconds() -> float:
    """What all cores have spent on anything but idling."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:]
    ticks = sum(map(int, (user, nice, system, irq, softirq)))
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_for_calm(root: int, patience_s: float) -> None:
    """Until others leave the machine to the service, or patience ends."""
    deadline = time.monotonic() + patience_s
    calm = False
    while not calm and time.monotonic() < deadline:
        meter, interval_s = Meter(root), 3.0
        time.sleep(interval_s)
        service, busy = meter.read()
        calm = busy - service < CALM_CORES * interval_s


def calmest(
    measure: Callable[[], tuple[T, Beside]], root: int, patience_s: float
) -> tuple[T, Beside]:
    """A measurement that others left alone, or the least disturbed that patience allows.

    Chosen by what others did, never by its own figures.
    """
    deadline = time.monotonic() + patience_s
    best = measure()
    while best[1].other_cores > CALM_CORES and time.monotonic() < deadline:
        wait_for_calm(root, deadline - time.monotonic())
        best = min(best, measure(), key=lambda result: result[1].other_cores)
    return best


def measure(
    server: Server, case: str, load: Load, plan: Plan, labels: dict[str, Any]
) -> tuple[Row, Beside]:
    """One row, and what ran beside it."""
    processes = min(plan.processes, load.concurrency or plan.processes)
    generators = Generators(load, plan.images[case], processes)
    begin = time.monotonic() + WARM_UP_S
    window = Window(begin, begin + plan.seconds)
    generators.start(window)
    time.sleep(window.begin - time.monotonic())
    meter = Meter(server.pid)
    time.sleep(window.end - time.monotonic())
    service_s, busy_s = meter.read()
    outcomes = generators.outcomes()
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    summary = summarize(samples, window, open_loop=load.concurrency is None)
    clients_s = [outcome.cpu_s for outcome in outcomes]
    others_s = max(busy_s - service_s - sum(clients_s), 0.0)
    beside = Beside(round(max(clients_s) / plan.seconds, 2), round(others_s / plan.seconds, 2))
    return row_of(case, load, summary, service_s / plan.seconds, labels), beside


def row_of(
    case: str, load: Load, summary: Summary, service_cores: float, labels: dict[str, Any]
) -> Row:
    """What is written of a measurement."""
    images_per_s = summary.requests_per_s * load.images_per_request
    return Row(
        case=case,
        **labels,
        loop="open" if load.concurrency is None else "closed",
        concurrency=load.concurrency,
        http_images_per_s=round(images_per_s, 1),
        p50_ms=rounded(summary.p50_ms),
        p99_ms=rounded(summary.p99_ms),
        cpu_ms_per_image=rounded(service_cores * 1e3 / (images_per_s or math.nan)),
        errors=summary.errors,
    )


def rounded(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else round(value, 2)


def measure_all(
    options: argparse.Namespace, plan: Plan, alone: Bare
) -> Iterator[tuple[Row, Beside]]:
    """Every row, and what ran beside it."""
    config = EncoderConfig.load(options.encoder)
    for proxy in options.proxies:
        for topology in options.topologies:
            app_args = options.app_args | {"topology": topology, "device": alone.device}
            with served(proxy, app_args, options.replicas, alone.num_gpus) as server:
                for case in plan.images:
                    for load in plan.loads(server.url):
                        outstanding = plan.outstanding(load.concurrency)
                        size = batch_size(outstanding, case, config, plan.limits)
                        labels = {
                            "proxy": proxy,
                            "topology": topology,
                            "bare_images_per_s": round(alone.images_per_s[case, size], 1),
                        }
                        measurement = partial(measure, server, case, load, plan, labels)
                        row, beside = calmest(measurement, server.pid, plan.patience_s)
                        sys.stderr.write(f"{row} {beside}\n")
                        yield row, beside


def conditions(options: argparse.Namespace, plan: Plan, alone: Bare) -> dict[str, str]:
    """What a figure has to be read with."""
    about = {
        "encoder": Path(options.encoder).stem,
        "hardware": f"{alone.hardware}, {os.cpu_count()} CPU cores ({platform.machine()})",
        "device": alone.device,
        "torch": version("torch"),
        "ray": version("ray"),
        "python": platform.python_version(),
        "images": f"{NUM_IMAGES} distinct JPEGs a case, "
        + ", ".join(f"{case}: {mean_kb(files)} kB" for case, files in plan.images.items()),
        "images per request": str(plan.images_per_request),
        "batch limits": str(plan.limits),
        "replicas": ", ".join(f"{k} {n}" for k, n in options.replicas.items()) or "1 of each",
        "seconds": f"{plan.seconds:g} after {WARM_UP_S:g} of warm-up",
        "load generators": f"up to {plan.processes} processes of aiohttp {version('aiohttp')}",
        "bare batches": ", ".join(f"{size} x {case}" for case, size in alone.images_per_s),
        "environment": " ".join(f"{key}={value}" for key, value in MALLOC.items()),
        "load average before": " ".join(f"{x:.2f}" for x in os.getloadavg()),
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }
    optional = {"open loop": plan.rate and f"{plan.rate:g} requests/s", "note": options.note}
    return about | {key: value for key, value in optional.items() if value}


def mean_kb(files: Sequence[bytes]) -> int:
    """Mean size of a file."""
    return round(sum(map(len, files)) / len(files) / 1e3)


def markdown(about: dict[str, str], rows: Sequence[Row], beside: Sequence[Beside]) -> str:
    """The results file for people."""
    lines = [f"# Serving {about['encoder']} on {about['hardware']}", ""]
    lines += [f"* {key}: {value}" for key, value in about.items()]
    lines += ["", "Regimes and terms: see benchmarks/bench_serve.py.", ""]
    lines.append(
        "| case | proxy | topology | loop | concurrency | images/s | bare images/s | p50 ms "
        "| p99 ms | CPU-ms/image | errors | generator's core | other cores |"
    )
    lines.append("|" + "---|" * 13)
    for row, others in zip(rows, beside, strict=True):
        cells = ["-" if cell is None else str(cell) for cell in (*asdict(row).values(), *others)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def words(text: str) -> list[str]:
    """A list on the command line."""
    return text.split(",")


def counts(text: str) -> dict[str, int]:
    """`Ingress=4,Batcher=2` on the command line."""
    return {name: int(count) for name, _, count in (word.partition("=") for word in words(text))}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", help="a shipped name, or a YAML file")
    parser.add_argument("--like", type=Path, help="a Serve file whose limits and encoder to take")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--topologies", type=words, default=list(DEPLOYMENTS))
    parser.add_argument("--proxies", type=words, default=list(PROXIES))
    parser.add_argument("--cases", type=words, default=["224x224"], help="HEIGHTxWIDTH,...")
    parser.add_argument("--concurrency", type=words, default=["1", "8", "32"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, help="requests/s of an open loop as well")
    parser.add_argument("--images-per-request", type=int, default=1)
    parser.add_argument("--replicas", type=counts, default={}, help="Ingress=4,Batcher=2")
    processes = max((os.cpu_count() or 1) // 4, 1)
    parser.add_argument("--clients", type=int, default=processes, help="load generators at most")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="s to wait for a calm machine, for each row"
    )
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--write", type=Path, help="results file without suffix: .md and .json")
    options = parser.parse_args(arguments)
    for name, given, known in (
        ("--topologies", options.topologies, DEPLOYMENTS),
        ("--proxies", options.proxies, PROXIES),
        ("--replicas", options.replicas, DEPLOYMENTS["split"]),
    ):
        if strays := set(given) - set(known):
            parser.error(f"{name}: {', '.join(sorted(strays))} is none of {', '.join(known)}")
    return options


def app_arguments(encoder: str | None, like: Path | None) -> dict[str, Any]:
    """The app's arguments as a Serve file has them, but for the encoder if another is named."""
    args: dict[str, Any] = {"encoder": "dinov2-demo"}
    if like:
        args |= yaml.safe_load(like.read_text())["applications"][0]["args"]
        args.pop("encoder_labels", None)  # this Ray has no nodes with labels
    if encoder:
        args["encoder"] = encoder
    if Path(args["encoder"]).suffix in (".yaml", ".yml"):
        args["encoder"] = str(Path(args["encoder"]).resolve())  # Ray's processes start elsewhere
    return args


def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    options = parse()
    options.app_args = app_arguments(options.encoder, options.like)
    options.encoder = options.app_args["encoder"]
    plan = Plan(
        images={case: jpegs(case, NUM_IMAGES) for case in options.cases},
        concurrencies=[int(word) for word in options.concurrency if word],
        rate=options.rate,
        images_per_request=options.images_per_request,
        seconds=options.seconds,
        processes=options.clients,
        patience_s=options.patience,
        limits=BatchLimits.model_validate(options.app_args.get("batch", {})),
    )
    alone = in_child(bare, options.encoder, options.device, plan)
    about = conditions(options, plan, alone)
    rows, beside = zip(*measure_all(options, plan, alone), strict=True)
    document = json.dumps(
        about
        | {"beside": [others._asdict() for others in beside]}
        | {"rows": [asdict(row) for row in rows]}
    )
    if options.write:
        options.write.with_suffix(".md").write_text(markdown(about, rows, beside))
        options.write.with_suffix(".json").write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
