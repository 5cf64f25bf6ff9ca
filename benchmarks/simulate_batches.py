"""What share of images would be replayed, and what the Batcher's preference costs: in virtual time.

Seeded arrivals (tests/traces.py) through the real queue and the real graph runner; the device and
its times are a model of an H200 (tests/virtual_time.py), so every machine prints the same figures.
Each trace runs twice on the same arrivals: batches that the encoder can replay preferred, and first
come, first served. The last line of stdout is one JSON document.

usage: python -m benchmarks.simulate_batches [--batches 20000] [--bursts calm,busy,crowded]
"""

import argparse
import json
import sys
from typing import Any

from encoders.config import GraphSettings
from serve_app.engine import BUSY_SHARE
from serve_app.waiting import BatchLimits
from tests.traces import BURSTS
from tests.virtual_time import EAGER_FLOOR_MS, SLOTS, Summary, compare

RUNS = [("app", "exact"), ("app", "budget"), ("web", "exact"), ("web", "budget")]
COLUMNS = {
    "replayable": "{:.1%}", "replayed": "{:.1%}", "mean_wait_ms": "{:.2f}", "p99_wait_ms": "{:.1f}",
    "mean_answer_ms": "{:.2f}", "p99_answer_ms": "{:.1f}", "encoder_ms_per_image": "{:.2f}",
    "utilisation": "{:.0%}", "captures": "{}", "evictions": "{}",
}  # fmt: skip


def rows_of(bursts: str, trace: str, mode: str, batches: int) -> list[dict[str, Any]]:
    """Both runs of one trace in one mode."""
    labels = {"bursts": bursts, "trace": trace, "graph_mode": mode}
    preferred, first_come = compare(trace, BURSTS[bursts], mode, batches)
    return [
        {**labels, "choice": choice, **as_json(summary)}
        for choice, summary in (("preferred", preferred), ("first come", first_come))
    ]


def as_json(summary: Summary) -> dict[str, float]:
    """Figures to four places."""
    return {name: round(value, 4) for name, value in summary._asdict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--bursts", default=",".join(BURSTS))
    options = parser.parse_args()
    names, rows = ["bursts", "trace", "graph_mode", "choice"], []
    print("| " + " | ".join([*names, *COLUMNS]) + " |")
    print("| --- " * (len(names) + len(COLUMNS)) + "|")
    for bursts in options.bursts.split(","):
        for trace, mode in RUNS:
            for row in rows_of(bursts, trace, mode, options.batches):
                cells = [row[name] for name in names]
                cells += [form.format(row[name]) for name, form in COLUMNS.items()]
                print("| " + " | ".join(cells) + " |")
                sys.stdout.flush()
                rows.append(row)
    conditions = {
        "bursts": {name: bursts._asdict() for name, bursts in BURSTS.items()},
        "eager_floor_ms": EAGER_FLOOR_MS,
        "busy_share": BUSY_SHARE,
        "slots": SLOTS,
        "graph_capacity": GraphSettings().graph_capacity,
        "prefer_within_ms": BatchLimits().prefer_within_ms,
    }
    print(json.dumps({"conditions": conditions, "rows": rows}))


if __name__ == "__main__":
    main()
