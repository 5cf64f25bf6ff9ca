"""What the service costs over the bare `Encoder`: by topology, by graphs, by output, by GPUs.

Two regimes. One caller at a time pays each tier's latency, and nothing is batched. Many callers are
bound by the CPU work around the encoder (proxy, HTTP, decoding, Ray's calls) as long as that costs
more than the encoder itself: there one process or thread fills its core (`busiest`), or
`cpu_ms_per_image` times the throughput nears the number of cores, and `http_images_per_s` stays
below `bare_images_per_s`. Else the encoder is the limit, the two figures meet, and more callers
only wait longer.

Real JPEGs, another image in each request, no cache anywhere; closed loops and open ones
(benchmarks/load.py). A fresh Ray for each service. The Encoder alone gets the same images in
batches as large as the load can make wait at once within the service's limits; their pixels lie on
the device, forwards run back to back, rows are copied to the host, and there is one wait at the
end. `lone forward` is one image's, waited for. `cpu_ms_per_image` is utime + stime of every process
of Ray and the service, idle ones too. Apart from it, `generator_core` is the busiest load
generator's share of a core: near 1 it is the limit itself. `other_cores` is what everybody else
took of the machine meanwhile; --patience waits and repeats. `gpu_busy` is the mean of the driver's
own samples. Where nothing was to be had, there is null. While HAProxy runs, its metrics and
statistics are on every interface.

Plans (benchmarks/serving/plans.py); several share services and repeat nothing:
  sweep       the given proxies, topologies, cases and concurrencies
  topologies  throughput beside the bare tower, a lone caller, an open loop at 80 % of the best
  graphs      three sizes and their mix, few callers and many, with graphs on, off, and with too
              small a capacity; for a while before each, since encoders learn what gains by a graph
  patch       patch rows as float16: payload a second
  small       DINOv2 S/14, 32 images a request
  gpus        one GPU beside several
  memory      every process's memory over many requests
Cases are sizes, `mix` (three of them by turns) and `varied` (every image its own).
Nothing starts that would not end within --budget-s; each row is on stderr and in the files of
--write as soon as it is there. The last line of stdout is one JSON document.

usage: python benchmarks/bench_serve.py --plan topologies,graphs [--encoder qwen3-vl-32b]
       [--random-weights] [--like configs/serve/h200.yaml] [--replicas Ingress=4,Batcher=2]
       [--budget-s 400] [--seconds 5] [--gpus 1,2] [--clients 4] [--write NAME]
"""

import argparse
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.load import NPY, Generators
from benchmarks.serving import bare
from benchmarks.serving.images import Pools, pools
from benchmarks.serving.measuring import load_of, measure, measure_memory, row_of
from benchmarks.serving.meters import calmest, memory
from benchmarks.serving.plans import (
    LEARNING_S,
    LOAD_SHARE,
    PLANS,
    SAFETENSORS,
    WARM_UP_S,
    Service,
    Shot,
    Wanted,
    stages,
)
from benchmarks.serving.report import Report
from benchmarks.serving.service import (
    DEPLOYMENTS,
    PROXIES,
    UP_S,
    Server,
    Services,
    app_arguments,
)
from encoders.config import EncoderConfig
from serve_app.production import MALLOC
from serve_app.waiting import BatchLimits

BARE_S = 2.0
"""Of each measurement of the Encoder alone."""
BARE_SHARE = 0.4
"""Of the budget, after which it is left alone."""
START_S = 45.0
"""What a start is thought to take until one was seen."""
END_S = 12.0
"""Kept for the last service's end."""
REQUESTS_S = 15.0
"""What watching memory takes at least; it is cut short by the budget."""


class Bench:
    """Everything that is measured in one call, in order, within its budget."""

    def __init__(self, options: argparse.Namespace, report: Report, deadline: float) -> None:
        self._options = options
        self._report = report
        self._deadline = deadline
        self._start_s = START_S
        self._best: dict[tuple[Service, str, int, str], float] = {}
        self._encoders: dict[str, tuple[str, str]] = {}
        """Encoder -> the configuration that was loaded for it, and its name."""

    def left(self) -> float:
        """Seconds that the budget still has, the last service's end apart."""
        return self._deadline - time.monotonic() - END_S

    def bare(
        self, todo: dict[Service, list[Shot]], images: Pools, limits: BatchLimits, folder: Path
    ) -> bare.Machine:
        """Every encoder by itself, in a process of its own."""
        machine = None
        for encoder in dict.fromkeys(service.encoder for service in todo):
            wants = dict.fromkeys(
                bare.Want(shot.case, outstanding, shot.output)
                for service, shots in todo.items()
                if service.encoder == encoder
                for shot in shots
                for outstanding in formed(service, shot, limits.max_images)
            )
            used = {want.case: images[want.case] for want in wants}
            into = folder / Path(encoder).stem if self._options.random_weights else None
            asked = [] if self._options.no_bare else list(wants)
            found, machine, loaded = in_child(
                bare.measure_bare, encoder, self._options.device, used, asked, limits,
                BARE_S, into, self._deadline - (1 - BARE_SHARE) * self._options.budget_s,
            )  # fmt: skip
            self._encoders[encoder] = loaded, EncoderConfig.load(loaded).name
            self._report.bare += found
        assert machine is not None
        return machine

    def stage(
        self,
        services: Services,
        service: Service,
        shots: Sequence[Shot],
        generators: Generators,
        num_gpus: int,
    ) -> None:
        """Start a service and measure it, as far as time allows."""
        if self.left() < self._start_s + self._cost(shots[0]):
            self._miss(service, shots, f"{self.left():.0f} s left")
            return
        begin, path = time.monotonic(), self._encoders[service.encoder][0]
        loaded = Service(path, service.topology, service.proxy, service.graphs, service.gpus)
        with services.served(loaded, min(UP_S, self.left())) as server:
            self._start_s = time.monotonic() - begin
            sys.stderr.write(f"up after {self._start_s:.1f} s: {service.told}\n")
            started = memory(server.pid)
            for shot in shots:
                if self.left() < self._cost(shot):
                    self._miss(service, [shot], f"{self.left():.0f} s left")
                elif shot.requests is not None:
                    self._memory(server, service, shot, generators, started)
                else:
                    self._row(server, service, shot, generators, num_gpus)

    def _row(
        self, server: Server, service: Service, shot: Shot, generators: Generators, num_gpus: int
    ) -> None:
        rate = shot.rate
        if shot.of_best is not None:
            best = self._best.get((service, shot.case, shot.images_per_request, shot.output))
            if not best:
                self._miss(service, [shot], "no closed loop of it was measured")
                return
            rate = shot.of_best * best
        load = load_of(shot, server, rate)
        options, name = self._options, self._encoders[service.encoder][1]
        measurement = partial(
            measure, server, service, shot, load, generators, options.seconds, num_gpus
        )
        seen, beside = calmest(measurement, server.pid, options.patience)
        if load.concurrency is not None:
            key = service, shot.case, shot.images_per_request, shot.output
            self._best[key] = max(self._best.get(key, 0.0), seen.summary.requests_per_s)
        row = row_of(service, shot, load, seen, beside, self._report.bare, name)
        self._report.rows.append(row)
        sys.stderr.write(f"{row}\n")
        self._report.write()

    def _memory(
        self,
        server: Server,
        service: Service,
        shot: Shot,
        generators: Generators,
        started: dict[int, Any],
    ) -> None:
        until = self._deadline - END_S
        load = load_of(shot, server, None)
        rows, answered, seconds = measure_memory(
            server, service, shot, load, generators, started, until
        )
        self._report.memory += rows
        for row in rows:
            sys.stderr.write(f"{row}\n")
        sys.stderr.write(f"{answered} of {shot.requests} requests in {seconds:.1f} s\n")
        self._report.write()

    def _cost(self, shot: Shot) -> float:
        if shot.requests is not None:
            return REQUESTS_S
        return shot.warm_up_s + float(self._options.seconds) + 1.0

    def _miss(self, service: Service, shots: Sequence[Shot], why: str) -> None:
        for shot in shots:
            line = f"{service.told}: {shot.told}: {why}"
            sys.stderr.write(f"not measured: {line}\n")
            self._report.missing.append(line)
        self._report.write()


def formed(service: Service, shot: Shot, max_images: int) -> list[int]:
    """Images that one encoder may get at once. With two slots, a load is halved as often as not."""
    if shot.of_best is not None:
        return []
    whole = max(shot.outstanding(max_images) // service.gpus, 1)
    uniform = shot.case != "mix" and shot.output == "pooled"
    return sorted({max(whole // 2, 1), whole} if uniform else {whole})


def limits_of(options: argparse.Namespace) -> BatchLimits:
    """Of a batch, in the service and for the Encoder alone."""
    return BatchLimits.model_validate(options.app_args.get("batch", {}))


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """A call in a process of its own, so that its threads and memory are gone afterwards."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as child:
        return child.submit(function, *args).result()


def run(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """All plans."""
    wanted = wishes(options)
    todo = stages(options.plan, wanted)
    limits = limits_of(options)
    cases = list(dict.fromkeys(shot.case for shots in todo.values() for shot in shots))
    begin = time.monotonic()
    images = pools(cases, options.images)
    sys.stderr.write(f"images after {time.monotonic() - begin:.1f} s\n")
    report.about["images"] = f"{options.images} distinct JPEGs a size, " + ", ".join(
        f"{case}: {mean_kb(files)} kB" for case, files in images.items()
    )
    bench = Bench(options, report, deadline)
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
        machine = bench.bare(todo, images, limits, Path(folder))
        report.about |= {
            "hardware": f"{machine.hardware}, {os.cpu_count()} CPU cores ({platform.machine()})",
            "device": machine.device,
            "GPUs": str(machine.num_gpus),
        }
        report.write()
        sys.stderr.write(f"bare after {time.monotonic() - begin:.1f} s\n")
        generators = Generators(images, options.clients)
        services = Services(options.app_args, options.replicas, machine)
        for service, shots in todo.items():
            try:
                bench.stage(services, service, shots, generators, machine.num_gpus)
            except Exception as error:  # the others are measured all the same
                traceback.print_exc()
                report.missing.append(f"{service.told}: {error!r}")
                report.write()
                generators.end()  # they may still hold what nobody fetched
                generators = Generators(images, options.clients)
        generators.end()
        services.wait_for_ends()


def wishes(options: argparse.Namespace) -> Wanted:
    """What plans read of the command line."""
    return Wanted(
        encoder=options.encoder,
        small_encoder=options.small_encoder,
        topologies=options.topologies and tuple(options.topologies),
        proxies=tuple(options.proxies),
        cases=options.cases and tuple(options.cases),
        concurrencies=options.concurrency and tuple(map(int, options.concurrency)),
        rate=options.rate,
        images_per_request=options.images_per_request,
        gpus=tuple(map(int, options.gpus)),
        requests=options.requests,
        graph_modes=tuple(options.graph_modes),
        patch_accept=options.patch_accept,
    )


def conditions(options: argparse.Namespace) -> dict[str, str]:
    """What a figure has to be read with."""
    replicas = ", ".join(f"{name} {n}" for name, n in options.replicas.items()) or "1 of each"
    about = {
        "encoder": Path(options.encoder).stem
        + (", random weights" if options.random_weights else ""),
        "hardware": "?",
        "torch": version("torch"),
        "ray": version("ray"),
        "python": platform.python_version(),
        "plans": ", ".join(options.plan),
        "batch limits": str(limits_of(options).model_dump()),
        "replicas": f"{replicas}; an Encoder for each GPU",
        "seconds": f"{options.seconds:g} after {WARM_UP_S:g} of warm-up; in the plan graphs, "
        f"after {LEARNING_S:g}",
        "load generators": f"{options.clients} processes of aiohttp {version('aiohttp')}",
        "open loops": f"at {LOAD_SHARE:.0%} of the best closed loop unless a rate is given",
        "environment": " ".join(f"{key}={value}" for key, value in MALLOC.items()),
        "load average before": " ".join(f"{x:.2f}" for x in os.getloadavg()),
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }
    return about | ({"note": options.note} if options.note else {})


def mean_kb(files: Sequence[bytes]) -> int:
    """Mean size of a file."""
    return round(sum(map(len, files)) / len(files) / 1e3)


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
    add = parser.add_argument
    add("--plan", type=words, default=["sweep"], help="names from above, comma-separated")
    add("--budget-s", type=float, default=3600.0, help="for all of it")
    add("--encoder", help="a shipped name, or a YAML file")
    add("--small-encoder", default="dinov2-demo", help="of the plan small")
    add("--random-weights", action="store_true", help="of the released shape, made here")
    add("--like", type=Path, help="a Serve file whose limits and encoder to take")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--topologies", type=words, help="in place of a plan's own")
    add("--proxies", type=words, default=list(PROXIES), help="of the sweep")
    add("--cases", type=words, help="HEIGHTxWIDTH,... or mix, in place of a plan's own")
    add("--concurrency", type=words, help="in place of a plan's own")
    add("--rate", type=float, help="requests/s of an open loop of the sweep as well")
    add("--images-per-request", type=int, default=1, help="of the sweep")
    add("--images", type=int, default=256, help="distinct ones of each size")
    add("--seconds", type=float, default=5.0, help="of each window")
    add("--replicas", type=counts, default={}, help="Ingress=4,Batcher=2")
    add("--gpus", type=words, default=["1"], help="of the plan gpus: 1,2")
    add("--requests", type=int, default=10_000, help="of the plan memory")
    add("--graph-modes", type=words, default=["on", "off", "few"], help="of the plan graphs")
    add("--patch-accept", choices=[NPY, SAFETENSORS], default=NPY)
    add("--no-bare", action="store_true", help="leave the Encoder alone out")
    processes = max((os.cpu_count() or 1) // 4, 1)
    add("--clients", type=int, default=processes, help="load generators")
    add("--patience", type=float, default=0.0, help="s to wait for a calm machine, for each row")
    add("--note", default="", help="what else ran on the machine")
    add("--write", type=Path, help="results file without suffix: .md and .json")
    options = parser.parse_args(arguments)
    for name, given, known in (
        ("--plan", options.plan, PLANS),
        ("--topologies", options.topologies or (), DEPLOYMENTS),
        ("--proxies", options.proxies, PROXIES),
        ("--replicas", options.replicas, DEPLOYMENTS["split"]),
        ("--graph-modes", options.graph_modes, ("on", "off", "few", "exact")),
    ):
        if strays := set(given) - set(known):
            parser.error(f"{name}: {', '.join(sorted(strays))} is none of {', '.join(known)}")
    return options


def stop(signum: int, _: FrameType | None) -> None:
    """A signal ends what was started; what was measured is written already."""
    raise SystemExit(f"stopped by {signal.Signals(signum).name}")


def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    options = parse()
    deadline = time.monotonic() + options.budget_s
    signal.signal(signal.SIGTERM, stop)
    options.app_args = app_arguments(options.encoder, options.like)
    options.encoder = options.app_args["encoder"]
    report = Report(conditions(options), options.write)
    run(options, report, deadline)
    report.write()
    print(report.document())


if __name__ == "__main__":
    main()
