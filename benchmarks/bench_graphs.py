"""What captured graphs cost, what they save, and whether they are exact.

Four cases on the tower of Qwen3-VL-32B with random weights, bf16:

* `sweep`: every layout is captured and replayed with other patches, and its images permuted, while
  a thread allocates, copies and waits on events, and the pool is rebuilt three times in between.
  Each replay is compared with an eager run, as integers.
* `trace`: 1 000 batches of sizes as they come from the web, at a capacity of 32. The largest layout
  is touched first; from then on device memory may not rise.
* `memory`: the 18 layouts of three sizes that one SGLang rank was sized for, and what each graph
  takes of the device beside the 7 KB per patch that its graphs took.
* `replay`: one replay's wall time beside the sum of its kernels' times, and eager's wall time.

The last line of stdout is one JSON document.

usage: python benchmarks/bench_graphs.py [--attention auto] [--only CASE] [--write NAME]
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_encoder import SUBJECTS, build, conditions, milliseconds, publish
from encoders.captured import GraphMaker
from encoders.config import GraphSettings
from encoders.forward import Forward
from encoders.graph_runner import GraphRunner
from encoders.packing import Call, PackedLayout, num_patches
from encoders.recorder import CudaRecorder
from encoders.transfer import same_bits

Size = tuple[int, int]
SEED_SIZES: list[Size] = [(512, 512), (768, 1024), (2048, 1600)]
ODD_SIZES: list[Size] = [
    (32, 32), (64, 96), (224, 224), (320, 480), (352, 1056),
    (416, 608), (1024, 96), (640, 864), (992, 1440), (1184, 800),
]  # fmt: skip
SEED_LAYOUTS = [
    [size] * count for size, most in zip(SEED_SIZES, (8, 8, 2), strict=True)
    for count in range(1, most + 1)
]  # fmt: skip
SEED_BYTES_PER_PATCH = 7 * 1024
LARGEST = 8 * 12_800
MIXES = 100
REBUILDS = 3


class Bench:
    """A runner, and patches to feed it with."""

    def __init__(self, attention: str) -> None:
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        subject = SUBJECTS["qwen3-vl"]()
        tower, backend = build(subject, self.device, attention)
        self.forward = Forward(tower, backend, self.device, torch.bfloat16)
        self.patches = torch.randn(
            LARGEST, 3 * tower.frames * tower.patch_size**2, device=self.device
        ).bfloat16()

    def runner(self, **settings: Any) -> GraphRunner:
        """A fresh one."""
        settings = {
            "graph_mode": "exact",
            "admission": "always",
            "max_patches": LARGEST,
            **settings,
        }
        return GraphRunner.on(self.forward, GraphSettings(**settings))

    def call(self, sizes: Sequence[Size]) -> Call:
        """Images of these sizes, in this order of arrival."""
        grids = [(1, height // 16, width // 16) for height, width in sizes]
        return Call(PackedLayout.of(grids, 0), "patch")

    def some_patches(self, call: Call) -> Tensor:
        """Other ones each time."""
        count = patches_of(call)
        start = random.randrange(LARGEST - count + 1)
        return self.patches[start : start + count]


def settle(runner: GraphRunner) -> None:
    """Let it capture all that it wants to."""
    while runner.idle():
        pass


def patches_of(call: Call) -> int:
    """Patches of a call."""
    return sum(num_patches(grid) for grid in call.layout.grid_thw)


@contextmanager
def busy_thread() -> Iterator[list[int]]:
    """A thread that allocates, copies and waits on events all the while; how often it did."""
    stop, turns = threading.Event(), [0]

    def work() -> None:
        stream = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(stream):
                on_device = torch.ones(random.randrange(1, 1 << 20), device="cuda")
                on_host = on_device.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                event.synchronize()
            assert len(on_host) == len(on_device)
            turns[0] += 1
            time.sleep(1e-4)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield turns
    finally:
        stop.set()
        thread.join()


def sweep_layouts() -> list[list[Size]]:
    """1-8 images of each size, and mixes."""
    sizes = [*SEED_SIZES, *ODD_SIZES]
    uniform = [[size] * count for size in sizes for count in range(1, 9)]
    mixes = [random.choices(sizes, k=random.randint(2, 8)) for _ in range(MIXES)]
    return [*uniform, *mixes]


@torch.inference_mode()
def sweep(bench: Bench) -> dict[str, Any]:
    """Graph against eager, everywhere."""
    runner, layouts = bench.runner(), sweep_layouts()
    checks = equal = replayed = 0
    rebuild_at = {len(layouts) * (i + 1) // (REBUILDS + 1) for i in range(REBUILDS)}
    started = time.perf_counter()
    with busy_thread() as turns:
        for index, sizes in enumerate(layouts):
            runner.run(bench.some_patches(bench.call(sizes)), bench.call(sizes))
            if index in rebuild_at:
                runner.rebuild()
            settle(runner)
            for order in (sizes, sizes[::-1], random.sample(sizes, len(sizes))):
                call, hits = bench.call(order), runner.stats().hits
                patches = bench.some_patches(call)
                rows = runner.run(patches, call)
                with runner.on_stream():
                    equal += same_bits(rows, bench.forward.eager(patches, call))
                checks += 1
                replayed += runner.stats().hits - hits
            if index % 20 == 0:
                sys.stderr.write(f"{index} layouts: {equal} of {checks} equal\n")
    stats = runner.stats()
    return {
        "case": "sweep",
        "checks": checks,
        "equal": equal,
        "replayed": replayed,
        "layouts": len(layouts),
        "captures": stats.captures,
        "rebuilds": stats.rebuilds,
        "evictions": stats.evictions,
        "mismatches": stats.mismatches,
        "failures": stats.failures,
        "turns_of_the_other_thread": turns[0],
        "seconds": round(time.perf_counter() - started, 1),
    }


def web_sizes(count: int) -> list[Size]:
    """Log-normal areas around 0.4 Mpx, aspects from 1:3 to 3:1, whole blocks of 32."""
    sizes = []
    for _ in range(count):
        area = min(max(random.lognormvariate(12.9, 0.9), 64 * 64), 2048 * 1600)
        aspect = 3 ** random.uniform(-1, 1)
        height, width = (area * aspect) ** 0.5, (area / aspect) ** 0.5
        sizes.append((max(1, round(height / 32)) * 32, max(1, round(width / 32)) * 32))
    return sizes


def used_bytes() -> int:
    """Device memory that is taken, by anybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@torch.inference_mode()
def trace(bench: Bench) -> dict[str, Any]:
    """Memory over a thousand batches, each captured."""
    batches = [bench.call(web_sizes(random.randint(1, 4))) for _ in range(1000)]
    runner = bench.runner(graph_capacity=32, max_patches=max(map(patches_of, batches)))
    for call in [max(batches, key=patches_of), *batches[:1]]:
        runner.run(bench.some_patches(call), call)
        settle(runner)
    before = peak = used_bytes()
    for call in batches:
        runner.run(bench.some_patches(call), call).cpu()
        settle(runner)
        peak = max(peak, used_bytes())
    stats = runner.stats()
    return {
        "case": "trace",
        "batches": len(batches),
        "largest_patches": max(map(patches_of, batches)),
        "used_gib": round(before / 2**30, 3),
        "rise_percent": round((peak / before - 1) * 100, 3),
        "captures": stats.captures,
        "evictions": stats.evictions,
        "hits": stats.hits,
        "longest_capture_ms": round(stats.longest_capture_ms, 1),
        "mean_capture_ms": round(stats.capture_ms / stats.captures, 1),
        "mismatches": stats.mismatches,
    }


@torch.inference_mode()
def memory(bench: Bench) -> dict[str, Any]:
    """Device bytes and milliseconds of each of 18 graphs."""
    calls = sorted(map(bench.call, SEED_LAYOUTS), key=patches_of, reverse=True)
    runner = bench.runner(max_patches=patches_of(calls[0]))
    graphs, before = [], runner.stats()
    for call in calls:
        runner.run(bench.some_patches(call), call)
        settle(runner)
        after = runner.stats()
        pool = after.graph_pool_bytes - before.graph_pool_bytes
        graphs.append(
            {
                "patches": patches_of(call),
                "bytes": after.graph_bytes - before.graph_bytes,
                "of_it_pool": pool,
                "seed_bytes": patches_of(call) * SEED_BYTES_PER_PATCH,
                "capture_ms": round(after.capture_ms - before.capture_ms, 1),
            }
        )
        before = after
    first, rest = graphs[0], graphs[1:]
    own = [first["bytes"] - first["of_it_pool"], *(graph["bytes"] for graph in rest)]
    return {
        "case": "memory",
        "graphs": graphs,
        "scratch_bytes_shared_by_all": first["of_it_pool"],
        "arena_bytes": before.arena_bytes,
        "mean_bytes_per_graph": round(statistics.mean(own)),
        "mean_seed_bytes_per_graph": round(statistics.mean(g["seed_bytes"] for g in graphs)),
        "share_of_seed": round(sum(own) / sum(g["seed_bytes"] for g in graphs), 3),
        "longest_capture_ms": max(graph["capture_ms"] for graph in graphs),
    }


@torch.inference_mode()
def replay(bench: Bench, count: int) -> dict[str, Any]:
    """Wall time of one replay, its kernels' own time, eager's wall time."""
    runner, call = bench.runner(max_patches=16_384), bench.call([(512, 512)] * count)
    patches = bench.some_patches(call)
    runner.run(patches, call)
    settle(runner)
    maker = GraphMaker(bench.forward, GraphSettings(), CudaRecorder(bench.device))
    with runner.on_stream(), maker.recorder.on_stream():
        captured = maker.record(maker.planner.exact_plan(call), call)
        wall = milliseconds(captured.graph.replay, bench.device, repeats=30)
        eager = milliseconds(lambda: bench.forward.eager(patches, call), bench.device)
        whole = milliseconds(lambda: runner.run(patches, call), bench.device)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(10):
                captured.graph.replay()
            torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    kernels = sum(event.device_time_total for event in events) / 10 / 1e3
    return {
        "case": f"replay {count}x512x512",
        "replay_ms": round(wall, 3),
        "kernels_ms": round(kernels, 3),
        "replay_over_kernels": round(wall / kernels, 3),
        "kernels": len(events) // 10,
        "eager_ms": round(eager, 3),
        "run_with_inputs_ms": round(whole, 3),
    }


def markdown(about: dict[str, str], rows: Sequence[dict[str, Any]]) -> str:
    """The results file for people."""
    lines = [f"# Captured graphs on {about['hardware']}", ""]
    lines += [f"* {key}: {value}" for key, value in about.items()]
    for row in rows:
        lines += ["", f"## {row['case']}", ""]
        lines += [
            f"* {key}: {value}" for key, value in row.items() if key not in ("case", "graphs")
        ]
        if graphs := row.get("graphs"):
            lines += ["", "| " + " | ".join(graphs[0]) + " |", "|---" * len(graphs[0]) + "|"]
            lines += ["| " + " | ".join(map(str, graph.values())) + " |" for graph in graphs]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--only", choices=["replay", "memory", "sweep", "trace"])
    parser.add_argument("--write", type=Path, help="results file without suffix: .md and .json")
    options = parser.parse_args()
    bench, rows = Bench(options.attention), list[dict[str, Any]]()
    cases = [
        *(("replay", partial(replay, bench, count)) for count in (1, 2, 4)),
        *((case.__name__, partial(case, bench)) for case in (memory, sweep, trace)),
    ]
    for name, case in cases:
        if options.only not in (None, name):
            continue
        random.seed(0)
        rows.append(case())
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
        torch.cuda.empty_cache()
    about = conditions(bench.device, "qwen3-vl", bench.forward.backend.name)
    publish(about | {"rows": rows}, markdown(about, rows), options.write)


if __name__ == "__main__":
    main()
