"""Every metric in one table, of which docs/metrics.md is printed: `python -m serve_app.metrics`.

Ray adds the tags `deployment`, `replica` and `application`, and exports each as `ray_<name>`.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ray.serve import metrics

MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric counts, where, and in which unit."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    tier: str
    unit: str
    help: str
    tags: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


def _duration(name: str, tier: str, help: str) -> Metric:
    return Metric(name, "histogram", tier, "ms", help, boundaries=MILLISECONDS)


def _graphs(
    name: str, kind: Literal["counter", "gauge"], unit: str, help: str, tags: tuple[str, ...] = ()
) -> Metric:
    return Metric(f"encoder_graph_{name}", kind, "Encoder", unit, help, tags)


TABLE = (
    Metric("encoder_requests_total", "counter", "Ingress", "requests", "answered", ("status",)),
    _duration("encoder_request_ms", "Ingress", "from headers to reply"),
    Metric("encoder_refusals_total", "counter", "Ingress", "requests", "refused", ("reason",)),
    Metric("encoder_parts_total", "counter", "Ingress", "parts", "of SGLang, ended", ("result",)),
    _duration("encoder_push_ms", "Ingress", "of one message, from connecting to written"),
    Metric(
        "encoder_parts_without_receivers", "gauge", "Ingress", "parts", "encoded, nobody to send to"
    ),
    Metric("encoder_registrations_total", "counter", "Ingress", "calls", "to SGLang", ("result",)),
    Metric("encoder_images_total", "counter", "Batcher", "images", "embedded"),
    Metric("encoder_patches_total", "counter", "Batcher", "patches", "embedded"),
    Metric("encoder_admitted_images", "gauge", "Batcher", "images", "admitted, not yet answered"),
    _duration("encoder_decode_ms", "Batcher", "of one image, in its thread"),
    _duration("encoder_queue_wait_ms", "Batcher", "of one image, from decoded to packed"),
    _duration("encoder_lease_wait_ms", "Batcher", "for an encoder slot"),
    Metric(
        "encoder_batch_fill", "histogram", "Batcher", "share", "of a budget", ("budget",), SHARES
    ),
    Metric("encoder_retries_total", "counter", "Batcher", "batches", "sent again, encoder lost"),
    _duration(
        "encoder_forward_ms",
        "Encoder",
        "of one batch on its device, with its way back to the host",
    ),
    _graphs("batches_total", "counter", "batches", "replayed, or eager for a reason", ("outcome",)),
    _graphs("captures_total", "counter", "graphs", "captured"),
    _graphs("capture_seconds_total", "counter", "s", "of all captures together"),
    _graphs("longest_capture_ms", "gauge", "ms", "of one capture"),
    _graphs("failures_total", "counter", "captures", "killed, or refused by the runtime"),
    _graphs("short_of_memory_total", "counter", "captures", "not begun: the free-memory floor"),
    _graphs("mismatches_total", "counter", "graphs", "not used: other bits than eager"),
    _graphs("no_gain_total", "counter", "graphs", "not kept: no faster than eager"),
    _graphs("shadow_checks_total", "counter", "replays", "compared with an eager run"),
    _graphs("shadow_mismatches_total", "counter", "replays", "of these, unlike eager"),
    _graphs("evictions_total", "counter", "graphs", "least recently used, replaced"),
    _graphs("rebuilds_total", "counter", "rebuilds", "all graphs captured anew in a fresh pool"),
    _graphs("live", "gauge", "graphs", "that can be replayed now"),
    _graphs("retired", "gauge", "graphs", "evicted, whose memory waits for a rebuild"),
    _graphs("memory_bytes", "gauge", "bytes", "of the device that graphs hold", ("kind",)),
    Metric("encoder_outstanding_patches", "gauge", "Encoder", "patches", "in its slots"),
)
BY_NAME = {metric.name: metric for metric in TABLE}


@cache
def counter(name: str) -> metrics.Counter:
    """The table's counter of that name, made on first use in this process."""
    return metrics.Counter(name, BY_NAME[name].help, BY_NAME[name].tags)  # type: ignore[arg-type]


@cache
def gauge(name: str) -> metrics.Gauge:
    """The table's gauge of that name, made on first use in this process."""
    return metrics.Gauge(name, BY_NAME[name].help, BY_NAME[name].tags)  # type: ignore[arg-type]


@cache
def histogram(name: str) -> metrics.Histogram:
    """The table's histogram of that name, made on first use in this process."""
    metric = BY_NAME[name]
    boundaries, tags = list(metric.boundaries), metric.tags
    return metrics.Histogram(name, metric.help, boundaries, tags)  # type: ignore[arg-type]


def observe_since(name: str, start: float) -> None:
    """Observe the milliseconds since `start`, a value of `time.perf_counter`."""
    histogram(name).observe((time.perf_counter() - start) * 1e3)


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Observe the block's wall time in milliseconds, whatever comes of it."""
    start = time.perf_counter()
    try:
        yield
    finally:
        observe_since(name, start)


def markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Printed by `python -m serve_app.metrics`. Ray exports each as `ray_<name>` on the metrics",
        "port of every node, with the tags `deployment`, `replica` and `application` beside those",
        "below; counters and histograms start at zero with the replica.",
        "",
        "| name | kind | tier | unit | what | tags |",
        "|---|---|---|---|---|---|",
    ]
    for x in TABLE:
        tags = ", ".join(x.tags)
        lines.append(f"| `{x.name}` | {x.kind} | {x.tier} | {x.unit} | {x.help} | {tags} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
