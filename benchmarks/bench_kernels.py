"""What a tower's parts cost one by one on a GPU: memory-bound steps, products, attention, a block.

Memory-bound steps (`encoders.kernels`) are held against their plain twins, against the twins under
`torch.compile(dynamic=True)`, and against the time in which the memory moves their bytes: nothing
can be faster unless a cache holds part of them. Several sets of tensors take turns, so that caches
hold little. Products run at the rate of one large product where their shape fits the hardware's
tiles. Attention is timed on views of a packed qkv, as towers pass them, and on copies with wider
heads, or with heads further apart in memory, without the time that such a copy takes.

Every figure is the time of one call inside a graph of many calls, so launches cost nothing; those
from pixels to patches alone are waited for one by one, with what the host does for them. The last
line of stdout is one JSON document.

usage: python benchmarks/bench_kernels.py [--only block,products] [--write NAME]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench_encoder import MIXED, conditions, table
from encoders import kernels, triton_kernels
from encoders.attention import Attention, AttentionLayout
from encoders.backends import choose_backend
from encoders.errors import BackendUnavailable
from encoders.layers import MLP, Block, PackedAttention
from encoders.pixel_plan import plan_pixels
from encoders.preprocess import Preprocessor

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
WIDTH, HIDDEN, HEADS, SIZE, MERGED, OUT = 1152, 4304, 16, 72, 4608, 5120
BYTES_PER_SECOND = {"NVIDIA H200": 4.8e12, "AMD Instinct MI355X": 8e12}
HEIGHTS = (1024, 4096, 16384)
SETS = 4
SIDE = 128
BLOCKS = 4
LAYOUTS = {
    "1x1024": (1024,),
    "4x1024": (1024,) * 4,
    "16x1024": (1024,) * 16,
    "4x3072": (3072,) * 4,
    "1x12800": (12800,),
    "8mixed": tuple(h // 32 * (w // 32) * 4 for h, w in MIXED),
}
Call = Callable[[], object]
Table = list[list[str]]


def microseconds(calls: Sequence[Call], rounds: int = 5) -> float:
    """Median time of one of these calls, which take turns inside a graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / rounds / len(calls))
    return statistics.median(times[1:])


def turns(rows: int) -> tuple[Tensor, Tensor]:
    """Places of rows in their images, and a table of turns."""
    place = torch.randint(0, SIDE, (rows, 2), dtype=torch.int32, device=CUDA)
    return place, torch.rand(SIDE, 2, SIZE // 4, device=CUDA)


def randn(*shape: int) -> Tensor:
    """bf16 values of unit variance on the GPU."""
    return torch.randn(*shape, device=CUDA).to(BF16)


@contextmanager
def twins() -> Iterator[None]:
    """The plain twins in place of the kernels."""
    fused = kernels.fused
    kernels.fused = lambda x: False
    try:
        yield
    finally:
        kernels.fused = fused


@dataclass(frozen=True)
class Step:
    """One memory-bound step: what is called, with tensors of which shapes, moving how much."""

    function: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]
    moved: int

    def time(self, function: Callable[..., object]) -> float:
        """Microseconds of a call with tensors of these shapes."""
        sets = [[randn(*shape) for shape in self.shapes] for _ in range(SETS)]
        return microseconds([partial(function, *tensors) for tensors in sets])


def steps(rows: int) -> dict[str, Step]:
    """Every step by name, at the widths of the tower."""
    norm = nn.LayerNorm(WIDTH, eps=1e-6).to(CUDA, BF16)
    merger_norm = nn.LayerNorm(MERGED, eps=1e-6).to(CUDA, BF16)
    table_GD, scale = randn(2304, WIDTH), randn(WIDTH)
    cell = torch.randint(0, 2304, (rows, 4), device=CUDA, dtype=torch.int32)
    share, turning = torch.rand(rows, 4, device=CUDA), turns(rows)
    plane = 2 * rows * WIDTH
    flat, qkv, mlp = (rows, WIDTH), (rows, 3, HEADS, SIZE), (rows, HIDDEN)
    add = kernels.add_layer_norm
    return {
        "norm": Step(lambda x: kernels.layer_norm(x, norm), (flat,), 2 * plane),
        "residual, norm": Step(lambda x, b: add(x, b, norm), (flat, flat), 4 * plane),
        "LayerScale, residual, norm": Step(
            lambda x, b: add(x, b, norm, scale), (flat, flat), 4 * plane
        ),
        "norm of merged patches": Step(
            lambda x: kernels.layer_norm(x, merger_norm), ((rows // 4, MERGED),), 2 * plane
        ),
        "rotation": Step(lambda x: kernels.rotate_(x, *turning), (qkv,), 4 * plane + 8 * rows),
        # An identity for the product, which so costs nothing.
        "exact GELU": Step(
            lambda x: kernels.linear_gelu(x, cast(nn.Linear, nn.Identity()), "none"),
            (mlp,),
            4 * rows * HIDDEN,
        ),
        "positions": Step(
            lambda x: kernels.add_positions(x, table_GD, cell, share), (flat,), 2 * plane
        ),
    }


def memory_bound(bytes_per_second: float) -> tuple[list[str], Table]:
    """Each step, fused, plain and compiled."""
    lines = []
    for rows in HEIGHTS:
        for name, step in steps(rows).items():
            ours = step.time(step.function)
            torch._dynamo.reset()
            with twins():
                plain = step.time(step.function)
                compiled = attempt(partial(step.time, torch.compile(step.function, dynamic=True)))
            ideal = step.moved / bytes_per_second * 1e6
            shown = [f"{ours:.1f}", f"{plain:.1f}", compiled, f"{ideal:.1f}", f"{ideal / ours:.0%}"]
            lines.append([name, str(rows), *shown])
            sys.stderr.write(f"{lines[-1]}\n")
    return ["step", "rows", "fused", "plain", "compiled", "ideal", "of ideal"], lines


def launch_sweep() -> tuple[list[str], Table]:
    """The same kernels with other numbers of warps, to see what `_warps` should say."""
    chosen, lines = triton_kernels._warps, []
    warps = (1, 2, 4, 8)
    for rows in (HEIGHTS[0], HEIGHTS[-1]):
        for name in ("residual, norm", "norm of merged patches", "rotation", "positions"):
            figures = []
            for count in warps:
                triton_kernels._warps = lambda values, count=count: count
                step = steps(rows)[name]
                figures.append(step.time(step.function))
            lines.append([name, str(rows), *(f"{us:.1f}" for us in figures)])
            sys.stderr.write(f"{lines[-1]}\n")
    triton_kernels._warps = chosen
    return ["step", "rows", *(f"{count} warps" for count in warps)], lines


def gelus() -> tuple[list[str], Table]:
    """fc1 with its GELU: in BLAS's epilogue, by our kernel, by torch's; and the product alone."""
    linear = nn.Linear(WIDTH, HIDDEN).to(CUDA, BF16)
    lines = []
    for rows, form in product(HEIGHTS, ("tanh", "none")):
        lines.append([form, str(rows), *gelu_ways(linear, rows, form)])
        sys.stderr.write(f"{lines[-1]}\n")
    head = ["GELU", "rows", "product alone", "our kernel", "torch's", "epilogue", "errors"]
    return head, lines


def gelu_ways(linear: nn.Linear, rows: int, form: str) -> list[str]:
    """Microseconds of each way, and how far the last three are from exact."""
    ways: list[Callable[[Tensor], Tensor]] = [
        linear,
        lambda x: triton_kernels.gelu(linear(x), tanh=form == "tanh"),
        lambda x: F.gelu(linear(x), approximate=form),
    ]
    if form == "tanh":  # BLAS has no other
        ways.append(lambda x: kernels.linear_gelu(x, linear, "tanh"))
    inputs = [randn(rows, WIDTH) for _ in range(SETS)]
    shown = [f"{microseconds([partial(way, x) for x in inputs]):.1f}" for way in ways]
    wide = F.linear(inputs[0].double(), linear.weight.double(), linear.bias.double())
    exact = F.gelu(wide, approximate=form)
    errors = [float((way(inputs[0]) - exact).norm() / exact.norm()) for way in ways[1:]]
    return [*shown, *["-"] * (4 - len(shown)), ", ".join(f"{error:.2e}" for error in errors)]


def products(peak: float) -> tuple[list[str], Table]:
    """Each linear of a block and a merger, with its bias and without, and padded qkv."""
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH, 1), "qkv, v padded to 80": (WIDTH, 2 * WIDTH + 1280, 1),
        "qkv, all padded to 80": (WIDTH, 3 * 1280, 1), "proj": (WIDTH, WIDTH, 1),
        "proj of padded": (1280, WIDTH, 1), "fc1": (WIDTH, HIDDEN, 1), "fc2": (HIDDEN, WIDTH, 1),
        "patches": (1536, WIDTH, 1), "patches, folded": (768, WIDTH, 1),
        "merger fc1": (MERGED, MERGED, 4), "merger fc2": (MERGED, OUT, 4),
    }  # fmt: skip
    lines = []
    for rows in HEIGHTS:
        for name, (inner, outer, merge) in shapes.items():
            linears = [nn.Linear(inner, outer).to(CUDA, BF16) for _ in range(SETS)]
            inputs = [randn(rows // merge, inner) for _ in range(SETS)]
            pairs = list(zip(linears, inputs, strict=True))
            biased = microseconds([lambda f=f, x=x: f(x) for f, x in pairs])
            bare = microseconds([lambda f=f, x=x: x @ f.weight.t() for f, x in pairs])
            ideal = 2 * rows / merge * inner * outer / peak * 1e6
            figures = [biased, bare, ideal]
            shown = [f"{us:.1f}" for us in figures]
            lines.append([name, str(rows), *shown, f"{ideal / min(biased, bare):.0%}"])
            sys.stderr.write(f"{lines[-1]}\n")
    return ["product", "rows", "with bias", "without", "limit", "of limit"], lines


def heads(qkv_T3HK: Tensor, size: int, pitch: int) -> Tensor:
    """A copy whose heads hold `size` values, zeros behind the real ones, every `pitch` values."""
    rows, _, count, real = qkv_T3HK.shape
    wide = torch.zeros(rows, 3, count, max(size, pitch), device=CUDA, dtype=BF16)
    wide[..., :real] = qkv_T3HK
    return wide[..., :size]


def attend(
    attention: Attention, sets: Sequence[Tensor], layout: AttentionLayout
) -> Callable[[], float]:
    """A measurement of attention over these packed qkv."""
    return lambda: microseconds(
        [lambda x=x: attention(x[:, 0], x[:, 1], x[:, 2], layout) for x in sets], rounds=2
    )


def dense(sets: Sequence[Tensor], images: int, backend: Any) -> Callable[[], float]:
    """A measurement of torch's dense attention over images of one length."""

    def call(qkv_T3HK: Tensor) -> object:
        q, k, v = (x.unflatten(0, (images, -1)).transpose(1, 2) for x in qkv_T3HK.unbind(1))
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return lambda: microseconds([lambda x=x: call(x) for x in sets], rounds=2)


def attentions() -> tuple[list[str], Table]:
    """Each kernel, layout by layout; a dash is one that cannot run here."""
    backends = {name: loaded(name) for name in ("varlen", "flash", "aiter")}
    sdp = torch.nn.attention.SDPBackend
    lines = []
    for name, lengths in LAYOUTS.items():
        packed = [randn(sum(lengths), 3, HEADS, SIZE) for _ in range(2)]
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=CUDA)
        layout: AttentionLayout = [cu_seqlens, max(lengths)]
        found: dict[str, Callable[[], float]] = {}
        for backend, attention in backends.items():
            if attention is not None:
                found[backend] = attend(attention, packed, layout)
        if (flash := backends["flash"]) is not None:
            for size, pitch in ((72, 80), (72, 128), (80, 80), (96, 96), (128, 128)):
                wide = [heads(x, size, pitch) for x in packed]
                found[f"flash {size} of {pitch}"] = attend(flash, wide, layout)
        if len(set(lengths)) == 1:
            found["dense cuDNN"] = dense(packed, len(lengths), sdp.CUDNN_ATTENTION)
            found["dense flash"] = dense(packed, len(lengths), sdp.FLASH_ATTENTION)
        for kind, measure in found.items():
            lines.append([name, kind, attempt(measure)])
            sys.stderr.write(f"{lines[-1]}\n")
    return ["layout", "attention", "us"], lines


def loaded(name: str) -> Attention | None:
    """A backend, or None where it cannot run."""
    try:
        return choose_backend(name, CUDA, BF16, SIZE).attention
    except BackendUnavailable:
        return None


def attempt(measure: Callable[[], float]) -> str:
    """The figure, or the first line of what prevents it: some kernels refuse some shapes."""
    try:
        return f"{measure():.1f}"
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        return str(error).partition("\n")[0][:60] or type(error).__name__


def block() -> tuple[list[str], Table]:
    """One block with torch's attention: fused, plain, and plain under torch.compile."""
    attention = loaded("varlen")
    assert attention is not None
    module = Block(
        PackedAttention(WIDTH, HEADS, qkv_bias=True, attention=attention),
        MLP(WIDTH, HIDDEN, approximate="tanh"), width=WIDTH, eps=1e-6,
    ).to(CUDA, BF16)  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(module, dynamic=True)
    lines = []
    for images in (1, 4, 16):
        call = partial(block_in_a_row, images)
        fused = microseconds([call(module)]) / BLOCKS
        with twins():
            plain = microseconds([call(module)]) / BLOCKS
            whole = attempt(lambda call=call: microseconds([call(compiled)]) / BLOCKS)
        lines.append([f"{images}x1024", f"{fused:.1f}", f"{plain:.1f}", whole])
        sys.stderr.write(f"{lines[-1]}\n")
    return ["rows", "fused", "plain", "compiled"], lines


def block_in_a_row(images: int, module: Callable[..., Any]) -> Call:
    """A few calls of a block, each with the norm of the next."""
    cu_seqlens = torch.arange(images + 1, dtype=torch.int32, device=CUDA) * 1024
    turning = turns(images * 1024)
    first = randn(images * 1024, WIDTH)
    then = nn.LayerNorm(WIDTH, eps=1e-6).to(CUDA, BF16)

    def run() -> None:
        x, y = first, kernels.layer_norm(first, then)
        for _ in range(BLOCKS):
            x, y = module(x, y, then, [cu_seqlens, 1024], rotary=turning)

    return run


def preprocessing() -> tuple[list[str], Table]:
    """A batch's pixels on the GPU to patches in bf16, by the two kernels and by their twin."""
    mixed = [(height // 32 * 32, width // 32 * 32) for height, width in MIXED]
    off = [(height + 9, width - 7) for height, width in mixed]
    batches = {
        "16 of 512x512, as they are": ([(512, 512)] * 16, [(512, 512)] * 16),
        "8 mixed, each resized a little": (off, mixed),
        "1 of 3000x4000 to 224x224": ([(3000, 4000)], [(224, 224)]),
        "1 of 3000x4000 to 2976x3968": ([(3000, 4000)], [(2976, 3968)]),
    }
    run = Preprocessor((0.5,) * 3, (0.5,) * 3, CUDA, BF16, patch_size=16, merge_size=2)
    lines = []
    for name, (sizes, targets) in batches.items():
        values = sum(3 * height * width for height, width in sizes)
        pixels = torch.randint(0, 256, (values,), dtype=torch.uint8, device=CUDA)
        call = partial(run, pixels, sizes, targets)
        ours = waited_for(call)
        with patch("encoders.preprocess.fused", return_value=False):
            plain = waited_for(call)
        plan = statistics.median(timed(partial(plan_pixels, sizes, targets, 16, 2)))
        lines.append([name, *(f"{us:.0f}" for us in (ours, plan, plain))])
        sys.stderr.write(f"{lines[-1]}\n")
    return ["batch", "fused", "of it the plan, on the host", "plain"], lines


def waited_for(call: Call) -> float:
    """Median microseconds until a call's result is there: its work on the host counts."""

    def whole() -> None:
        call()
        torch.cuda.synchronize()

    return statistics.median(timed(whole))


def timed(call: Call, rounds: int = 20) -> list[float]:
    """Microseconds of each call, after two that are not counted."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times[2:]


@torch.inference_mode()
def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="results file without suffix: .md and .json")
    parser.add_argument("--only", help="some of the sections, with commas between them")
    options = parser.parse_args()
    torch.manual_seed(0)
    side = 8192
    a, b = randn(side, side), randn(side, side)
    peak = 2 * side**3 / microseconds([lambda: a @ b], rounds=10) * 1e6
    about = conditions(CUDA, "parts of a tower 1152 wide", "see the tables")
    about["one large product"] = f"{peak / 1e12:.0f} TFLOP/s"
    speed = BYTES_PER_SECOND[torch.cuda.get_device_name()]
    about["memory"] = f"{speed / 1e12} TB/s"
    sections: dict[str, tuple[str, Callable[[], tuple[list[str], Table]]]] = {
        "block": ("A block of the tower, us", block),
        "memory": ("Memory-bound steps, us", partial(memory_bound, speed)),
        "warps": ("The same by number of warps, us", launch_sweep),
        "gelu": ("GELU behind its product, us", gelus),
        "products": ("Products, us", partial(products, peak)),
        "attention": ("Attention, 16 heads of 72, us", attentions),
        "pixels": ("From pixels to patches, us", preprocessing),
    }
    wanted = options.only.split(",") if options.only else sections
    measured = {sections[name][0]: sections[name][1]() for name in wanted}
    lines = [f"# Parts of a tower on {about['hardware']}", ""]
    lines += [f"* {key}: {value}" for key, value in about.items()]
    for title, (head, rows) in measured.items():
        lines += ["", f"## {title}", "", *table(*head, rows=rows)]
    text = "\n".join(lines) + "\n"
    document = json.dumps(about | {title: [h, *rows] for title, (h, rows) in measured.items()})
    if options.write:
        options.write.with_suffix(".md").write_text(text)
        options.write.with_suffix(".json").write_text(document + "\n")
    sys.stdout.write(text)
    print(document)


if __name__ == "__main__":
    main()
