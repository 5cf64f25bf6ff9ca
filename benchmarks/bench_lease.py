"""Who gets an encoder's free slot, and how long it stays free, by how often those who wait ask.

One encoder of two slots whose batches take a given time each, one after another; several callers,
each in a process of its own, lease slots through the handle that Batchers use and always have a
next batch. `busy` is the share of the time in which a batch ran; `least` and `most` are batches of
the caller that got fewest and most; waits are from asking to the slot; `cores` is what the encoder
took besides. The last line of stdout is one JSON document.

usage: python benchmarks/bench_lease.py [--callers 4,8] [--batch-ms 10,90] [--seconds 8]
       [--write NAME]
"""

import argparse
import asyncio
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve

from benchmarks.bench_encoder import publish, table
from benchmarks.serving.bare import cpu_name
from encoders.packing import PackedBatch
from serve_app.app import LEASES, SLOTS
from serve_app.handles import EncoderHandle
from serve_app.service import Encoded, GraphStats

BATCH = PackedBatch.of([np.zeros((28, 28, 3), np.uint8)], [(1, 2, 2)], 1)
POLICIES: dict[str, dict[str, float]] = {"Ray's own": {}, "ours": LEASES}


class Sleeper:
    """An encoder whose device is a clock."""

    def __init__(self, batch_s: float) -> None:
        self._device = ThreadPoolExecutor(1)
        self._batch_s = batch_s
        self._busy_s = 0.0

    async def encode(self, *_: Any) -> Encoded:
        """One batch, behind those that came before."""
        await asyncio.get_running_loop().run_in_executor(self._device, self._work)
        return Encoded([], "sleeper", GraphStats(), None)

    def _work(self) -> None:
        begin = time.perf_counter()
        time.sleep(self._batch_s)
        self._busy_s += time.perf_counter() - begin

    async def spent(self) -> tuple[float, float]:
        """CPU seconds of this process, and seconds with a batch."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, self._busy_s


class Caller:
    """Leases slots as a Batcher does: one at a time, the next as soon as it has that one."""

    async def load(self, seconds: float) -> list[float]:
        """Seconds that each lease was waited for."""
        handle = EncoderHandle(serve.get_app_handle("encoder"))
        waits, batches, end = list[float](), set[asyncio.Task[None]](), time.monotonic() + seconds
        while time.monotonic() < end:
            leased, asked = asyncio.Event(), time.perf_counter()
            batches.add(asyncio.create_task(self._one(handle, leased)))
            await leased.wait()
            waits.append(time.perf_counter() - asked)
        await asyncio.gather(*batches)
        return waits

    async def _one(self, handle: EncoderHandle, leased: asyncio.Event) -> None:
        async with handle.lease() as slot:
            leased.set()
            await slot.encode(BATCH, "pooled", ["float32"])


def measure(policy: str, callers: int, batch_ms: float, seconds: float) -> dict[str, Any]:
    """One row."""
    deployed = serve.deployment(
        name="Encoder",
        max_ongoing_requests=SLOTS,
        request_router_config=POLICIES[policy],
        ray_actor_options={"num_cpus": 0.1},
    )(Sleeper)
    handle = serve.run(deployed.bind(batch_ms / 1e3), name="encoder", route_prefix=None)
    # Ray's own types know no `.remote` of a class's methods.
    remote: Any = ray.remote(num_cpus=0.1)(Caller)
    actors = [remote.remote() for _ in range(callers)]
    ray.get([actor.load.remote(0.5) for actor in actors])
    cpu_before, busy_before = handle.spent.remote().result()
    begin = time.monotonic()
    waits = ray.get([actor.load.remote(seconds) for actor in actors])
    elapsed = time.monotonic() - begin
    cpu, busy = handle.spent.remote().result()
    for actor in actors:
        ray.kill(actor)
    serve.delete("encoder")
    flat = np.concatenate(waits) * 1e3
    return {
        "policy": policy,
        "callers": callers,
        "batch_ms": batch_ms,
        "busy": round((busy - busy_before) / elapsed, 2),
        "least": min(map(len, waits)),
        "most": max(map(len, waits)),
        "wait_p50_ms": round(float(np.median(flat))),
        "wait_p99_ms": round(float(np.percentile(flat, 99))),
        "wait_max_ms": round(float(flat.max())),
        "cores": round((cpu - cpu_before) / elapsed, 2),
    }


def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", default="4,8")
    parser.add_argument("--batch-ms", default="10,90")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--write", type=Path, help="results file without suffix: .md and .json")
    options = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    rows = [
        measure(policy, int(callers), float(batch_ms), options.seconds)
        for batch_ms in options.batch_ms.split(",")
        for callers in options.callers.split(",")
        for policy in POLICIES
    ]
    about = {
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores",
        "ray": ray.__version__,
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }
    lines = [f"# Leases of an encoder's slots on {about['hardware']}", ""]
    lines += [f"* {key}: {value}" for key, value in about.items()]
    cells = [list(map(str, row.values())) for row in rows]
    lines += ["", *table(*rows[0], rows=cells)]
    publish(about | {"rows": rows}, "\n".join(lines) + "\n", options.write)


if __name__ == "__main__":
    main()
