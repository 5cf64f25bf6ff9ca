"""Rows of results, and the files that they are written to after each of them."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.bare import Bare


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. Images, not requests, per second; null where nothing was to be had."""

    plan: str
    encoder: str
    case: str
    proxy: str
    topology: str
    graphs: str
    """What was overridden in the encoder's graph settings."""
    output: str
    gpus: int
    loop: str
    concurrency: int | None
    requests_offered_per_s: float | None
    images_per_request: int
    http_images_per_s: float
    bare_images_per_s: float | None
    of_bare: float | None
    """`http_images_per_s` by `bare_images_per_s`."""
    gpu_busy: float | None
    """Percent of the window."""
    p50_ms: float | None
    p99_ms: float | None
    p99_by_p50: float | None
    lone_forward_ms: float | None
    over_forward_ms: float | None
    """`p50_ms` without `lone_forward_ms`; of a lone caller only."""
    payload_gb_per_s: float
    images_per_batch: float | None
    hits: int
    misses: dict[str, int]
    captures: int
    """These three inside the window and its warm-up."""
    live_graphs: int
    graph_mib: float
    """Device memory of the graphs, their shared memory included, after the window."""
    cpu_ms_per_image: float | None
    cores: dict[str, float]
    busiest: str
    busiest_thread: str
    generator_core: float
    other_cores: float
    errors: int


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One process over many requests, in MiB. `own` leaves files and the object store out."""

    topology: str
    case: str
    requests: int
    role: str
    pid: int
    started: float | None
    warm: float | None
    half: float | None
    end: float
    own_warm: float | None
    own_half: float | None
    own_end: float
    growth: float | None
    """Of `own`, from warm to the end."""


@dataclass
class Report:
    """Everything so far. `path` without suffix, or None to keep it for the end."""

    about: dict[str, str]
    path: Path | None
    bare: list[Bare] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What was not measured, and why."""

    def document(self) -> str:
        """One line of JSON."""
        return json.dumps(
            self.about
            | {
                "bare": [asdict(x) for x in self.bare],
                "rows": [asdict(x) for x in self.rows],
                "memory": [asdict(x) for x in self.memory],
                "missing": self.missing,
            }
        )

    def write(self) -> None:
        """Both files, whole at any moment."""
        if self.path is None:
            return
        for suffix, text in ((".md", markdown(self)), (".json", self.document() + "\n")):
            scratch = self.path.with_suffix(f"{suffix}.part")
            scratch.write_text(text)
            scratch.replace(self.path.with_suffix(suffix))


def ratio(part: float | None, whole: float | None, digits: int = 3) -> float | None:
    """JSON has no NaN, and nothing is divided by nothing."""
    if part is None or not whole or math.isnan(part) or math.isnan(whole):
        return None
    return round(part / whole, digits)


def rounded(value: float, digits: int = 2) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else round(value, digits)


def best_bare(
    bare: Iterable[Bare], case: str, output: str, encoder: str, outstanding: int | None
) -> Bare | None:
    """The fastest batches that this load, or if it is open any, could form."""
    same = [
        x
        for x in bare
        if (x.case, x.output, x.encoder) == (case, output, encoder)
        and (outstanding is None or x.outstanding <= outstanding)
    ]
    return max(same, key=lambda x: x.images_per_s, default=None)


def lone_of(bare: Iterable[Bare], case: str, encoder: str) -> float | None:
    """The lone forward of a case."""
    times = [x.lone_forward_ms for x in bare if (x.case, x.encoder) == (case, encoder)]
    return next((time for time in times if time is not None), None)


def markdown(report: Report) -> str:
    """The results file for people."""
    about = report.about
    lines = [f"# Serving {about['encoder']} on {about['hardware']}", ""]
    lines += [f"* {key}: {value}" for key, value in about.items()]
    lines += ["", "Regimes and terms: see benchmarks/bench_serve.py.", ""]
    if report.bare:
        lines += ["The Encoder alone:", "", *bare_table(report.bare), ""]
    if report.rows:
        lines += ["The service:", "", *main_table(report.rows), ""]
        lines += ["Latencies:", "", *latency_table(report.rows), ""]
        lines += ["Graphs:", "", *graph_table(report.rows), ""]
        lines += ["Cores:", "", *core_table(report.rows), ""]
    if report.memory:
        lines += ["Memory, MiB:", "", *memory_table(report.memory), ""]
    if compared := comparisons(report.rows):
        lines += ["Side by side:", "", *(f"* {line}" for line in compared), ""]
    if report.missing:
        lines += ["Not measured:", "", *(f"* {line}" for line in report.missing), ""]
    return "\n".join(lines)


def comparisons(rows: Sequence[Row]) -> list[str]:
    """What rows say together: topologies beside the bare tower, GPUs beside one."""
    closed = [row for row in rows if row.loop == "closed" and row.concurrency != 1]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in closed:
        same = (row.encoder, row.case, row.output, row.images_per_request, row.graphs)
        groups.setdefault(same, []).append(row)
    lines = []
    for (encoder, case, output, *_, graphs), group in groups.items():
        name = " ".join(filter(None, (encoder, case, output, graphs)))
        one = [row for row in group if row.gpus == 1 and row.proxy == "haproxy"]
        if best := max(one, key=lambda row: row.http_images_per_s, default=None):
            share = f"{best.of_bare:.1%} of the bare tower" if best.of_bare else "no bare tower"
            lines.append(f"{name}: {best.topology} is the best topology, {share}")
        speeds = {row.topology: row.http_images_per_s for row in one}
        if "split" in speeds and (part := ratio(speeds["split"], speeds.get("inline"))):
            lines.append(f"{name}: split does {part:.1%} of what inline does")
        for row in group:
            alike = [x for x in one if x.topology == row.topology]
            if row.gpus > 1 and alike and (times := times_of(row, alike[-1])):
                lines.append(f"{name}: {row.topology} on {row.gpus} GPUs, {times:.2f}x one")
    return lines


def times_of(row: Row, one: Row) -> float | None:
    """How many times as fast."""
    return ratio(row.http_images_per_s, one.http_images_per_s)


def bare_table(rows: Sequence[Bare]) -> list[str]:
    """Bare rows for people."""
    head = (
        "encoder", "case", "output", "callers' images", "images/batch", "images/s",
        "encode images/s", "lone forward ms", "GPU busy %",
    )  # fmt: skip
    return table(head, [list(asdict(row).values()) for row in rows])


def main_table(rows: Sequence[Row]) -> list[str]:
    """What was done a second, and beside what."""
    head = (
        "plan", "encoder", "case", "proxy", "topology", "graphs", "GPUs", "loop", "concurrency",
        "images/request", "images/s", "bare images/s", "of bare", "GPU busy %", "payload GB/s",
        "CPU-ms/image", "errors", "generator's core", "other cores",
    )  # fmt: skip
    cells = [
        [
            x.plan, x.encoder, x.case, x.proxy, x.topology, x.graphs, x.gpus, x.loop,
            x.concurrency, x.images_per_request, x.http_images_per_s, x.bare_images_per_s,
            x.of_bare, x.gpu_busy, x.payload_gb_per_s, x.cpu_ms_per_image, x.errors,
            x.generator_core, x.other_cores,
        ]
        for x in rows
    ]  # fmt: skip
    return table(head, cells)


def latency_table(rows: Sequence[Row]) -> list[str]:
    """How long callers waited."""
    head = (
        "case", "topology", "graphs", "output", "loop", "concurrency", "requests/s offered",
        "p50 ms", "p99 ms", "p99/p50", "lone forward ms", "p50 over it ms",
    )  # fmt: skip
    cells = [
        [
            x.case, x.topology, x.graphs, x.output, x.loop, x.concurrency,
            x.requests_offered_per_s, x.p50_ms, x.p99_ms, x.p99_by_p50, x.lone_forward_ms,
            x.over_forward_ms,
        ]
        for x in rows
    ]  # fmt: skip
    return table(head, cells)


def graph_table(rows: Sequence[Row]) -> list[str]:
    """What was replayed."""
    head = (
        "case", "topology", "graphs", "loop", "concurrency", "images/batch", "replayed", "eager",
        "captures", "live", "MiB",
    )  # fmt: skip
    cells = [
        [
            x.case, x.topology, x.graphs, x.loop, x.concurrency, x.images_per_batch, x.hits,
            " ".join(f"{why} {count}" for why, count in x.misses.items()), x.captures,
            x.live_graphs, x.graph_mib,
        ]
        for x in rows
    ]  # fmt: skip
    return table(head, cells)


def core_table(rows: Sequence[Row]) -> list[str]:
    """Who used the CPU."""
    head = ("case", "topology", "loop", "concurrency", "cores", "busiest process", "its thread")
    cells = [
        [
            x.case, x.topology, x.loop, x.concurrency,
            ", ".join(f"{name} {cores:.2f}" for name, cores in x.cores.items()),
            x.busiest, x.busiest_thread,
        ]
        for x in rows
    ]  # fmt: skip
    return table(head, cells)


def memory_table(rows: Sequence[MemoryRow]) -> list[str]:
    """Every process."""
    head = (
        "topology", "case", "requests", "process", "pid", "start", "warm", "half", "end",
        "own, warm", "own, half", "own, end", "own growth",
    )  # fmt: skip
    return table(head, [list(asdict(row).values()) for row in rows])


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    cells = [["-" if cell in (None, "") else str(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells)]
