"""One measurement of a running service: a load, and every meter beside it."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load import Generators, Load, Outcome, Summary, Window, summarize
from benchmarks.serving.bare import Bare
from benchmarks.serving.meters import Beside, Cores, Memory, Meter, gpu_meter, memory
from benchmarks.serving.plans import Service, Shot
from benchmarks.serving.report import MemoryRow, Row, best_bare, lone_of, ratio, rounded
from benchmarks.serving.service import Server

MEMORY_EVERY_S = 0.5
WARM_SHARE = 0.1
"""Of the requests over which memory is watched, sent before that."""


@dataclass(frozen=True)
class Graphs:
    """What all encoders told of their graphs."""

    hits: int = 0
    misses: tuple[tuple[str, int], ...] = ()
    captures: int = 0
    live: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, encoders: Sequence[dict[str, Any]]) -> "Graphs":
        """The sum over encoders."""
        misses: dict[str, int] = {}
        for stats in encoders:
            for why, count in stats["misses"].items():
                misses[why] = misses.get(why, 0) + count
        return cls(
            sum(stats["hits"] for stats in encoders),
            tuple(sorted(misses.items())),
            sum(stats["captures"] for stats in encoders),
            sum(stats["graphs"] for stats in encoders),
            sum(stats["graph_bytes"] + stats["arena_bytes"] for stats in encoders),
        )

    def since(self, before: "Graphs") -> "Graphs":
        """Counts since an earlier moment; sizes as they are."""
        earlier = dict(before.misses)
        misses = ((why, count - earlier.get(why, 0)) for why, count in self.misses)
        return Graphs(
            self.hits - before.hits,
            tuple((why, count) for why, count in misses if count),
            self.captures - before.captures,
            self.live,
            self.num_bytes,
        )

    @property
    def batches(self) -> int:
        """Replayed or not."""
        return self.hits + sum(count for _, count in self.misses)


@dataclass(frozen=True)
class Seen:
    """What one measurement saw."""

    summary: Summary
    cores: Cores
    gpu_busy: float | None
    graphs: Graphs
    images: int
    """Answered from the first moment on, warm-up included."""


def load_of(shot: Shot, server: Server, rate: float | None) -> Load:
    """The load that a measurement sends."""
    return Load(
        server.url + shot.query,
        shot.images_per_request,
        concurrency=shot.concurrency,
        rate=rate,
        requests=shot.requests,
        accept=shot.accept,
    )


def measure(
    server: Server,
    service: Service,
    shot: Shot,
    load: Load,
    generators: Generators,
    seconds: float,
    num_gpus: int,
) -> tuple[Seen, Beside]:
    """A window of the load after its warm-up."""
    before = Graphs.of(server.graphs(service.gpus))
    with gpu_meter(num_gpus and service.gpus) as gpus:
        begin = time.monotonic() + shot.warm_up_s
        window = Window(begin, begin + seconds)
        generators.start(load, shot.case, window)
        time.sleep(window.begin - time.monotonic())
        meter = Meter(server.pid)
        time.sleep(window.end - time.monotonic())
        cores = meter.cores()
        outcomes = generators.outcomes()
        busy = gpus.busy(*window)
    graphs = Graphs.of(server.graphs(service.gpus)).since(before)
    clients_s = [outcome.cpu_s for outcome in outcomes]
    beside = Beside(
        round(max(clients_s) / seconds, 2),
        round(max(cores.others - sum(clients_s) / seconds, 0.0), 2),
    )
    return seen(outcomes, window, load, cores, busy, graphs), beside


def seen(
    outcomes: Sequence[Outcome],
    window: Window,
    load: Load,
    cores: Cores,
    busy: float | None,
    graphs: Graphs,
) -> Seen:
    """Put together what generators and meters saw."""
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    summary = summarize(samples, window, open_loop=load.concurrency is None)
    images = sum(sample.ok for sample in samples) * load.images_per_request
    return Seen(summary, cores, busy, graphs, images)


def row_of(
    service: Service, shot: Shot, load: Load, seen: Seen, beside: Beside, bare: Sequence[Bare],
    name: str,
) -> Row:  # fmt: skip
    """What is written of a measurement."""
    summary, graphs = seen.summary, seen.graphs
    images_per_s = summary.requests_per_s * load.images_per_request
    outstanding = None if load.concurrency is None else load.concurrency * load.images_per_request
    # Alone it runs with graphs as they are configured, and with no others.
    alone = None if service.graphs else best_bare(bare, shot.case, shot.output, name, outstanding)
    alone_per_s = None if alone is None else round(alone.images_per_s * service.gpus, 1)
    lone_ms = lone_of(bare, shot.case, name) if load.images_per_request == 1 else None
    p50 = rounded(summary.p50_ms)
    is_lone = load.concurrency == 1 and shot.output == "pooled"
    over_ms = round(p50 - lone_ms, 2) if is_lone and p50 and lone_ms else None
    return Row(
        plan=shot.plan,
        encoder=name,
        case=shot.case,
        proxy=service.proxy,
        topology=service.topology,
        graphs=service.graphs_told,
        output=shot.output,
        gpus=service.gpus,
        loop="open" if load.concurrency is None else "closed",
        concurrency=load.concurrency,
        requests_offered_per_s=load.rate and round(load.rate, 2),
        images_per_request=load.images_per_request,
        http_images_per_s=round(images_per_s, 1),
        bare_images_per_s=alone_per_s,
        of_bare=ratio(images_per_s, alone_per_s),
        gpu_busy=seen.gpu_busy,
        p50_ms=p50,
        p99_ms=rounded(summary.p99_ms),
        p99_by_p50=ratio(summary.p99_ms, summary.p50_ms, 2),
        lone_forward_ms=lone_ms,
        over_forward_ms=over_ms,
        payload_gb_per_s=round(summary.bytes_per_s / 1e9, 3),
        images_per_batch=ratio(seen.images, graphs.batches, 2),
        hits=graphs.hits,
        misses=dict(graphs.misses),
        captures=graphs.captures,
        live_graphs=graphs.live,
        graph_mib=round(graphs.num_bytes / 2**20, 1),
        cpu_ms_per_image=ratio(seen.cores.all * 1e3, images_per_s, 2),
        cores=seen.cores.by_role,
        busiest=seen.cores.busiest,
        busiest_thread=seen.cores.busiest_thread,
        generator_core=beside.generator_core,
        other_cores=beside.other_cores,
        errors=summary.errors,
    )


def measure_memory(
    server: Server,
    service: Service,
    shot: Shot,
    load: Load,
    generators: Generators,
    started: dict[int, Memory],
    until: float,
) -> tuple[list[MemoryRow], int, float]:
    """Every process before, during and after the requests; how many were answered, in what time.

    `until` is the latest moment to go on; what was sent by then is what counts.
    """
    assert shot.requests is not None
    assert shot.concurrency is not None
    few = max(int(shot.requests * WARM_SHARE), shot.concurrency)
    now = time.monotonic()
    warming = Load(load.url, load.images_per_request, shot.concurrency, requests=few)
    generators.start(warming, shot.case, Window(now, until))
    generators.outcomes()
    series = Series(server.pid)
    begin = time.monotonic()
    generators.start(load, shot.case, Window(begin, until))
    samples = [sample for outcome in generators.outcomes() for sample in outcome.samples]
    seconds = time.monotonic() - begin
    answered = sum(sample.ok for sample in samples)
    return series.end(service, shot, started, answered), answered, seconds


class Series:
    """Every process's memory from now on, until it is asked for."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._done = threading.Event()
        self._snapshots = [memory(root)]
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(MEMORY_EVERY_S):
            self._snapshots.append(memory(self._root))

    def end(
        self, service: Service, shot: Shot, started: dict[int, Memory], answered: int
    ) -> list[MemoryRow]:
        """A row for each process that is there at the end."""
        self._done.set()
        self._thread.join()
        last = memory(self._root)
        warm, half = self._snapshots[0], self._snapshots[len(self._snapshots) // 2]
        rows = []
        for pid, end in sorted(last.items(), key=lambda item: item[1].role):
            first, middle = warm.get(pid), half.get(pid)
            rows.append(
                MemoryRow(
                    topology=service.topology,
                    case=shot.case,
                    requests=answered,
                    role=end.role,
                    pid=pid,
                    started=mib(started.get(pid), "rss"),
                    warm=mib(first, "rss"),
                    half=mib(middle, "rss"),
                    end=round(end.rss, 1),
                    own_warm=mib(first, "own"),
                    own_half=mib(middle, "own"),
                    own_end=round(end.own, 1),
                    growth=None if first is None else round(end.own - first.own, 1),
                )
            )
        return rows


def mib(memory: Memory | None, kind: str) -> float | None:
    """One of a process's sizes, if it was there."""
    return None if memory is None else round(getattr(memory, kind), 1)
