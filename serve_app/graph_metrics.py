"""A graph runner's record as metrics."""

from encoders.graph_stats import GraphStats
from serve_app.metrics import counter, gauge


def publish(stats: GraphStats, published: GraphStats) -> None:
    """Count what happened since the record that was published last."""
    outcomes = {"hit": stats.hits - published.hits}
    outcomes |= {reason: n - published.misses.get(reason, 0) for reason, n in stats.misses.items()}
    for outcome, count in outcomes.items():
        if count:
            counter("encoder_graph_batches_total").inc(count, tags={"outcome": outcome})
    seconds = (stats.capture_ms - published.capture_ms) / 1e3
    for metric, more in (
        (counter("encoder_graph_captures_total"), stats.captures - published.captures),
        (counter("encoder_graph_capture_seconds_total"), seconds),
        (counter("encoder_graph_failures_total"), stats.failures - published.failures),
        (
            counter("encoder_graph_short_of_memory_total"),
            stats.short_of_memory - published.short_of_memory,
        ),
        (counter("encoder_graph_mismatches_total"), stats.mismatches - published.mismatches),
        (counter("encoder_graph_no_gain_total"), stats.no_gain - published.no_gain),
        (
            counter("encoder_graph_shadow_checks_total"),
            stats.shadow_checks - published.shadow_checks,
        ),
        (
            counter("encoder_graph_shadow_mismatches_total"),
            stats.shadow_mismatches - published.shadow_mismatches,
        ),
        (counter("encoder_graph_evictions_total"), stats.evictions - published.evictions),
        (counter("encoder_graph_rebuilds_total"), stats.rebuilds - published.rebuilds),
    ):
        if more:  # Ray refuses to add nothing
            metric.inc(more)
    gauge("encoder_graph_longest_capture_ms").set(stats.longest_capture_ms)
    gauge("encoder_graph_live").set(stats.graphs)
    gauge("encoder_graph_retired").set(stats.retired)
    for kind, size in (
        ("arena", stats.arena_bytes),
        ("pool", stats.graph_pool_bytes),
        ("graphs", stats.graph_bytes),
    ):
        gauge("encoder_graph_memory_bytes").set(size, tags={"kind": kind})
