"""What graphs do for traffic: exact under load, faster where batches are small, never slower.

Three cases on the tower of Qwen3-VL-32B with random weights, bf16, pooled output:

* `app` and `web`: 1 000 batches of each trace, first come first served, of 1 to 4 images. Each is
  run eagerly and through the runner, one after the other, from patches on the device to rows on the
  host. Between batches there is a pause, in which the runner may capture one graph.
* `invariant`: 2 000 random batches of images above the verified floor; each image's bits beside
  those of the image alone.
* `cold`: a runner that starts with a saved profile beside the one that wrote it.

The last line of stdout is one JSON document.

usage: python benchmarks/bench_traffic.py [--attention auto] [--batches 1000] [--write NAME]
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_encoder import conditions
from bench_graphs import Bench, Size, markdown, web_sizes

from encoders.graph_profile import GraphProfile
from encoders.graph_runner import GraphRunner
from encoders.packing import Call, PackedLayout
from encoders.transfer import same_bits

NAMED_SIZES: list[Size] = [
    (224, 224), (256, 256), (320, 320), (384, 384), (512, 512), (480, 640),
    (640, 480), (512, 768), (768, 512), (640, 640), (768, 768), (768, 1024),
]  # fmt: skip
SMALL_PATCHES = 1024
"""Of each image of the batches whose wall time has to fall by a quarter."""
POOL = 96
"""Different images that the invariant batches are made of."""


def app_sizes(count: int) -> list[Size]:
    """Named sizes by Zipf, and 20 % odd ones."""
    weights = [1 / (rank + 1) for rank in range(len(NAMED_SIZES))]
    sizes = []
    for _ in range(count):
        if random.random() < 0.2:
            sizes.append((32 * random.randint(2, 32), 32 * random.randint(2, 32)))
        else:
            sizes += random.choices(NAMED_SIZES, weights)
    return sizes


def pooled(sizes: Sequence[Size]) -> Call:
    """Images of these sizes, one row each."""
    grids = [(1, height // 16, width // 16) for height, width in sizes]
    return Call(PackedLayout.of(grids, 0), "pooled")


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
def trace(
    bench: Bench, name: str, sizes: Callable[[int], list[Size]], batches: int
) -> dict[str, Any]:
    """Each batch eagerly and through the runner."""
    calls = [pooled(sizes(random.randint(1, 4))) for _ in range(batches)]
    runner = bench.runner(graph_mode="budget", admission="gain", max_patches=16_384)
    eager, graph, small = list[tuple[float, float]](), list[tuple[float, float]](), list[bool]()
    images, hits = 0, list[bool]()
    for call in calls:
        patches, before = bench.some_patches(call), runner.stats().hits
        with runner.on_stream():
            # bound: both calls run before the loop goes on
            eager.append(timed(lambda: bench.forward.eager(patches, call)))  # noqa: B023
            graph.append(timed(lambda: runner.run(patches, call)))  # noqa: B023
        hits.append(runner.stats().hits > before)
        few = call.layout.num_images <= 2 and call.layout.max_seqlen < SMALL_PATCHES
        small.append(few)
        images += call.layout.num_images
        runner.idle()
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
    runner = bench.runner(
        graph_mode="budget", admission="gain", precision="invariant", max_patches=16_384
    )
    found_in = time.perf_counter() - started
    floor = runner.stats().invariant_from
    assert floor is not None
    pool = []
    while len(pool) < POOL:
        (size,) = web_sizes(1)
        call = pooled([size])
        if floor <= call.layout.num_patches <= 4096:
            patches = bench.some_patches(call)
            with runner.on_stream():
                pool.append((size, patches, bench.forward.eager(patches, call)))
    images = equal = 0
    for _ in range(batches):
        chosen = random.sample(pool, random.randint(1, 6))
        call = pooled([size for size, _, _ in chosen])
        packed = [chosen[place] for place in call.layout.order]
        rows = runner.run(torch.cat([patches for _, patches, _ in packed]), call)
        with runner.on_stream():
            alike = [
                same_bits(row[None], own) for row, (_, _, own) in zip(rows, packed, strict=True)
            ]
        images, equal = images + len(alike), equal + sum(alike)
        runner.idle()
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
def cold(bench: Bench) -> dict[str, Any]:
    """The share of replays in a hundred batches, warm and with nothing but the profile."""
    settings = {"graph_mode": "budget", "admission": "gain", "max_patches": 16_384}
    calls = [pooled(web_sizes(random.randint(1, 4))) for _ in range(500)]
    warm = bench.runner(**settings)
    feed(bench, warm, calls[:400])
    with tempfile.TemporaryDirectory() as folder:
        profile = GraphProfile(Path(folder) / "hot.json", 0)
        profile.write(warm.hottest())
        other = bench.runner(**settings)
        start = time.perf_counter()
        other.capture_now(profile.read())
        captured_in = time.perf_counter() - start
    captured = other.stats().captures
    shares = [feed(bench, runner, calls[400:]) for runner in (warm, other)]
    return {
        "case": "cold",
        "captured_before_ready": captured,
        "captured_in_seconds": round(captured_in, 2),
        "warm_share": shares[0],
        "cold_share": shares[1],
    }


def feed(bench: Bench, runner: GraphRunner, calls: Sequence[Call]) -> float:
    """Run batches with pauses between; the share that was replayed."""
    before = runner.stats().hits
    for call in calls:
        runner.run(bench.some_patches(call), call)
        runner.idle()
    return (runner.stats().hits - before) / len(calls)


def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--write", type=Path, help="results file without suffix: .md and .json")
    options = parser.parse_args()
    bench, rows = Bench(options.attention), list[dict[str, Any]]()
    for case in (
        lambda: trace(bench, "app", app_sizes, options.batches),
        lambda: trace(bench, "web", web_sizes, options.batches),
        lambda: invariant(bench, 2 * options.batches),
        lambda: cold(bench),
    ):
        random.seed(0)
        rows.append(case())
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    about = conditions(bench.device, "qwen3-vl", bench.forward.backend.name)
    document = json.dumps(about | {"rows": rows})
    if options.write:
        options.write.with_suffix(".md").write_text(markdown(about, rows))
        options.write.with_suffix(".json").write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
