"""What graphs do for traffic: exact under load, faster where batches are small, never slower.

Three cases on the tower of Qwen3-VL-32B with random weights, bf16, pooled output:

* `app` and `web`: 1 000 batches of each trace (tests/traces.py), of 1 to 4 images. Each is
  run eagerly and through the runner, one after the other, from patches on the device to rows on the
  host. Between batches there is a pause, in which the runner may take four steps.
* `invariant`: 2 000 random batches of images above the verified floor; each image's bits beside
  those of the image alone.
* `cost`: batches of the `web` trace through a runner that promises `invariant` and through one that
  promises `exact`, by turns.
* `cold`: a runner that starts with a saved profile beside the one that wrote it.

The last line of stdout is one JSON document.

usage: python benchmarks/bench_traffic.py [--attention auto] [--batches 1000]
        [--only CASE,CASE] [--write NAME]
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_encoder import conditions, publish
from benchmarks.bench_graphs import Bench, markdown
from encoders.graph_profile import GraphProfile
from encoders.graph_runner import GraphRunner
from encoders.packing import Call, GridTHW, PackedLayout, num_patches
from encoders.sizes import grid_thw
from encoders.transfer import same_bits
from tests.traces import CONFIG, SIZES

SMALL_PATCHES = 1024
"""Of each image of the batches whose wall time has to fall by a quarter."""
STEPS_PER_PAUSE = 4
POOL = 96
"""Different images that the invariant batches are made of."""


def batch(name: str, chance: random.Random, most: int = 4) -> Call:
    """A batch of a trace, of 1 to `most` images, one row each."""
    count = chance.randint(1, most)
    return pooled([grid_thw(CONFIG, *SIZES[name](chance)) for _ in range(count)])


def pooled(grids: Sequence[GridTHW]) -> Call:
    """Images of these grids, one row each."""
    return Call(PackedLayout.of(grids, 0), "pooled")


def ready(bench: Bench, **settings: Any) -> GraphRunner:
    """A runner as an encoder has it when it is ready."""
    defaults = {"graph_mode": "budget", "admission": "gain", "max_patches": 16_384}
    runner = bench.runner(**defaults, **settings)
    runner.capture_now(runner.usual_calls())
    return runner


def timed(run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Wall milliseconds from the call to its rows on the host, and those of the device's stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    rows = run()
    end.record()
    rows.cpu()
    return (time.perf_counter() - start) * 1e3, begin.elapsed_time(end)


@torch.inference_mode()
def trace(bench: Bench, name: str, batches: int) -> dict[str, Any]:
    """Each batch eagerly and through the runner."""
    chance = random.Random(name)
    calls = [batch(name, chance) for _ in range(batches)]
    start = time.perf_counter()
    runner = ready(bench)
    ready_in = time.perf_counter() - start
    eager, graph, small = list[tuple[float, float]](), list[tuple[float, float]](), list[bool]()
    images, hits = 0, list[bool]()
    for call in calls:
        patches, before = bench.some_patches(call), runner.stats().hits
        runs = [
            (eager, partial(bench.forward.eager, patches, call)),
            (graph, partial(runner.run, patches, call)),
        ]
        with runner.on_stream():
            for times, run in chance.sample(runs, 2):  # neither always finds the caches warm
                times.append(timed(run))
        hits.append(runner.stats().hits > before)
        few = call.layout.num_images <= 2 and call.layout.max_seqlen < SMALL_PATCHES
        small.append(few)
        images += call.layout.num_images
        pause(runner)
    gains_below = runner.digest().gains_below  # type: ignore[union-attr]
    gaining = [call.layout.num_patches < gains_below for call in calls]
    walls = [[wall for wall, _ in times] for times in (eager, graph)]
    of_small = [[w for w, few in zip(times, small, strict=True) if few] for times in walls]
    stats = runner.stats()
    return {
        "case": name,
        "batches": batches,
        "images": images,
        "gains_below_patches": gains_below,
        "replayed_share_of_those": round(
            sum(h for h, g in zip(hits, gaining, strict=True) if g) / max(sum(gaining), 1), 4
        ),
        "device_ms_per_image": [
            round(sum(d for _, d in times) / images, 3) for times in (eager, graph)
        ],
        "wall_ms_per_image": [round(sum(times) / images, 3) for times in walls],
        "small_batches": sum(small),
        "small_wall_ms_per_batch": [round(statistics.mean(times), 3) for times in of_small],
        "small_wall_saved_percent": round(100 * (1 - sum(of_small[1]) / sum(of_small[0])), 1),
        "p99_wall_ms": [round(statistics.quantiles(times, n=100)[98], 2) for times in walls],
        "ready_in_seconds": round(ready_in, 1),
        "captures": stats.captures,
        "no_gain": stats.no_gain,
        "mismatches": stats.mismatches,
        "shadow_mismatches": stats.shadow_mismatches,
        "misses": stats.misses,
        "order": "eager, runner",
    }


@torch.inference_mode()
def invariant(bench: Bench, batches: int) -> dict[str, Any]:
    """Each image's row beside the row that it has alone."""
    started = time.perf_counter()
    runner = ready(bench, precision="invariant")
    found_in = time.perf_counter() - started
    floor = runner.stats().invariant_from
    if floor is None:
        return {"case": "invariant", "verified_floor_patches": None}
    chance, pool = random.Random("invariant"), list[tuple[GridTHW, Tensor, Tensor]]()
    while len(pool) < POOL:
        call = batch("web", chance, most=1)
        if floor <= call.layout.num_patches <= 4096:
            patches = bench.some_patches(call)
            with runner.on_stream():
                rows = bench.forward.eager(patches, call)
                pool.append((call.layout.grid_thw[0], patches, rows))
    images = equal = 0
    for _ in range(batches):
        chosen = chance.sample(pool, chance.randint(1, 6))
        call = pooled([grid for grid, _, _ in chosen])
        packed = [chosen[place] for place in call.layout.order]
        rows = runner.run(torch.cat([patches for _, patches, _ in packed]), call)
        with runner.on_stream():
            alike = [
                same_bits(row[None], own) for row, (_, _, own) in zip(rows, packed, strict=True)
            ]
        images, equal = images + len(alike), equal + sum(alike)
        pause(runner)
    stats = runner.stats()
    return {
        "case": "invariant",
        "verified_floor_patches": floor,
        "floor_found_in_seconds": round(found_in, 1),
        "batches": batches,
        "images": images,
        "equal": equal,
        "hits": stats.hits,
        "misses": stats.misses,
        "mismatches": stats.mismatches,
    }


@torch.inference_mode()
def cost(bench: Bench, batches: int) -> dict[str, Any]:
    """Times of the same batches by what is promised of bits."""
    promises = ("exact", "invariant")
    runners = {promise: ready(bench, precision=promise) for promise in promises}
    floor = runners["invariant"].stats().invariant_from
    chance, below, images = random.Random("cost"), 0, 0
    times: dict[str, list[tuple[float, float]]] = {promise: [] for promise in promises}
    for _ in range(batches):
        call = batch("web", chance)
        patches = bench.some_patches(call)
        for promise in chance.sample(promises, 2):
            with runners[promise].on_stream():
                times[promise].append(timed(partial(runners[promise].run, patches, call)))
            pause(runners[promise])
        images += call.layout.num_images
        below += sum(num_patches(grid) < (floor or 0) for grid in call.layout.grid_thw)
    return {
        "case": "cost",
        "batches": batches,
        "images": images,
        "images_below_the_floor": below,
        "wall_ms_per_image": [round(sum(w for w, _ in times[p]) / images, 3) for p in promises],
        "device_ms_per_image": [round(sum(d for _, d in times[p]) / images, 3) for p in promises],
        "order": ", ".join(promises),
    }


@torch.inference_mode()
def cold(bench: Bench) -> dict[str, Any]:
    """The share of replays in a hundred batches, warm and with nothing but the profile."""
    settings = {"graph_mode": "budget", "admission": "gain", "max_patches": 16_384}
    chance = random.Random("cold")
    calls = [batch("web", chance) for _ in range(300)]
    warm = ready(bench)
    feed(bench, warm, calls[:200])
    with tempfile.TemporaryDirectory() as folder:
        profile = GraphProfile(Path(folder) / "hot.json", CONFIG, bench.forward.tower.num_prefix)
        profile.write(warm.hottest())
        other = bench.runner(**settings)
        start = time.perf_counter()
        other.capture_now(profile.read())
        captured_in = time.perf_counter() - start
    captured = other.stats().captures
    shares = [feed(bench, runner, calls[200:]) for runner in (warm, other)]
    return {
        "case": "cold",
        "captured_before_ready": captured,
        "captured_in_seconds": round(captured_in, 2),
        "warm_share": shares[0],
        "cold_share": shares[1],
    }


def pause(runner: GraphRunner) -> None:
    """Some steps of idle work: a graph is recorded, timed and compared in 6 to 15."""
    for _ in range(STEPS_PER_PAUSE):
        if not runner.idle():
            break


def feed(bench: Bench, runner: GraphRunner, calls: Sequence[Call]) -> float:
    """Run batches with pauses between; the share that was replayed."""
    before = runner.stats().hits
    for call in calls:
        runner.run(bench.some_patches(call), call)
        pause(runner)
    return (runner.stats().hits - before) / len(calls)


def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--write", type=Path, help="results file without suffix: .md and .json")
    parser.add_argument("--only", help="some of the cases, with commas between them")
    options = parser.parse_args()
    bench, rows = Bench(options.attention), list[dict[str, Any]]()
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "app": lambda: trace(bench, "app", options.batches),
        "web": lambda: trace(bench, "web", options.batches),
        "invariant": lambda: invariant(bench, 2 * options.batches),
        "cost": lambda: cost(bench, options.batches),
        "cold": lambda: cold(bench),
    }
    for name in options.only.split(",") if options.only else cases:
        random.seed(0)
        rows.append(cases[name]())
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    about = conditions(bench.device, "qwen3-vl", bench.forward.backend.name)
    publish(about | {"rows": rows}, markdown(about, rows), options.write)


if __name__ == "__main__":
    main()
