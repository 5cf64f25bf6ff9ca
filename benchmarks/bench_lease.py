"""Who gets an encoder's free slot, and how long it stays free, by how often those who wait ask.

One encoder of two slots whose batches take a given time each, one after another; several callers,
each in a process of its own, lease slots through the handle that Batchers use and always have a
next batch. All figures but waits are of the same seconds, through which every caller asks: `busy`
is the share of them in which a batch ran; `least` and `most` are slots of the caller that got the
fewest and of the one that got the most; `cores` is what the encoder took besides. Waits are from
asking to the slot, with those that ended later. The last line of stdout is one JSON document.

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
WARM_UP_S = 2.0


def cpu_s() -> float:
    """Of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Sleeper:
    """An encoder whose device is a clock."""

    def __init__(self, batch_s: float) -> None:
        self._device = ThreadPoolExecutor(1)
        self._batch_s = batch_s
        self._ran = list[tuple[float, float]]()

    async def encode(self, *_: Any) -> Encoded:
        """One batch, behind those that came before."""
        await asyncio.get_running_loop().run_in_executor(self._device, self._work)
        return Encoded([], "sleeper", GraphStats(), None)

    def _work(self) -> None:
        begin = time.monotonic()
        time.sleep(self._batch_s)
        self._ran.append((begin, time.monotonic()))

    async def watch(self, begin: float, end: float) -> None:
        """Be metered between two moments that are yet to come."""
        self._metered = asyncio.create_task(self._meter(begin, end))  # a call would take a slot

    async def metered(self) -> tuple[float, float]:
        """Seconds with a batch, and of CPU, between those moments."""
        return await self._metered

    async def _meter(self, begin: float, end: float) -> tuple[float, float]:
        await asyncio.sleep(begin - time.monotonic())
        before = cpu_s()
        await asyncio.sleep(end - time.monotonic())
        used = cpu_s() - before
        await asyncio.sleep(2 * self._batch_s)  # the one that ran at the end is noted behind it
        inside = (min(last, end) - max(first, begin) for first, last in self._ran)
        return sum(max(seconds, 0.0) for seconds in inside), used


class Caller:
    """Leases slots as a Batcher does: one at a time, the next as soon as it has that one."""

    async def load(self, begin: float, end: float) -> list[tuple[float, float]]:
        """From now on until `end`: when each lease of a slot was asked for, and had.

        Those that were had before `begin` are left out.
        """
        handle = EncoderHandle(serve.get_app_handle("encoder"))
        leases, batches = list[tuple[float, float]](), set[asyncio.Task[None]]()
        while (asked := time.monotonic()) < end:
            leased = asyncio.Event()
            batches.add(asyncio.create_task(self._one(handle, leased)))
            await leased.wait()
            leases.append((asked, time.monotonic()))
        await asyncio.gather(*batches)
        return [(asked, had) for asked, had in leases if had > begin]

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
    ray.get([actor.load.remote(0.0, 0.0) for actor in actors])  # which waits for their processes
    begin = time.monotonic() + WARM_UP_S
    end = begin + seconds
    handle.watch.remote(begin, end).result()
    loads = ray.get([actor.load.remote(begin, end) for actor in actors])
    busy, cpu = handle.metered.remote().result()
    for actor in actors:
        ray.kill(actor)
    serve.delete("encoder")
    waits = np.array([had - asked for load in loads for asked, had in load]) * 1e3
    slots = [sum(had < end for _, had in load) for load in loads]
    return {
        "policy": policy,
        "callers": callers,
        "batch_ms": batch_ms,
        "busy": round(busy / seconds, 2),
        "least": min(slots),
        "most": max(slots),
        "wait_p50_ms": round(float(np.median(waits))),
        "wait_p99_ms": round(float(np.percentile(waits, 99))),
        "wait_max_ms": round(float(waits.max())),
        "cores": round(cpu / seconds, 2),
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
