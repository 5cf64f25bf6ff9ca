"""How fast and how exact a tower is, beside transformers and beside what the hardware allows.

Two regimes. A small batch is bound by the host, which launches a few hundred kernels whatever the
size; there `eager_ms` hardly falls with the patches, and a graph (`replay_ms`) is many times
faster. A large batch is bound by the device: matrix products, then attention, then memory traffic.
`limit_ms` is the time of the products and of attention alone, at the rate of one large matrix
product measured in the same run, so no tower can be faster and the ratio says how much is left.

Whole forward, from normalised patches on the device to `[merger | deepstack...]` or patch rows;
layout tensors and pixels are ready. Medians of wall time, the device drained before and after.
transformers runs as its users make it (SDPA), and at its best: captured, with every tensor of the
layout made before, for Qwen3-VL with torch's varlen attention, which can be captured. Errors are
relative norms against transformers' own fp32 run on the same weights and patches, rounded to bf16.
Weights are random, of the released shape. On a GPU each row also holds where a replay's time goes,
kernel by kernel as the profiler saw it. The last line of stdout is one JSON document.

usage: python benchmarks/bench_encoder.py [--model qwen3-vl|dinov2] [--device cuda]
       [--attention varlen] [--write NAME]
"""

import argparse
import copy
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import vision_utils

from encoders import EncoderConfig
from encoders.attention import Backend
from encoders.backends import choose_backend
from encoders.packing import PackedLayout, num_patches
from encoders.preprocess import patchify
from encoders.sizes import NUM_PREFIX
from encoders.towers import Tower
from encoders.towers.load import FAMILIES
from encoders.weights import load_into

Size = tuple[int, int]
MIXED: list[Size] = [
    (512, 512), (768, 1024), (480, 640), (256, 256),
    (1024, 1024), (512, 768), (320, 480), (224, 224),
]  # fmt: skip
CASES: dict[str, dict[str, list[Size]]] = {
    "qwen3-vl": {
        "1x512x512": [(512, 512)],
        "4x512x512": [(512, 512)] * 4,
        "8x512x512": [(512, 512)] * 8,
        "16x512x512": [(512, 512)] * 16,
        "1x768x1024": [(768, 1024)],
        "4x768x1024": [(768, 1024)] * 4,
        "1x2048x1600": [(2048, 1600)],
        "4x2048x1600": [(2048, 1600)] * 4,
        "8mixed": MIXED,
    },
    "dinov2": {
        "1x224x224": [(224, 224)],
        "64x224x224": [(224, 224)] * 64,
        "1x518x518": [(518, 518)],
        "64x518x518": [(518, 518)] * 64,
    },
}
CPU_CASES = {
    "qwen3-vl": {"1x256x256": [(256, 256)]},
    "dinov2": {"1x224x224": [(224, 224)], "8x224x224": [(224, 224)] * 8},
}


TARGETS = {
    "1x512x512": 2.2, "4x512x512": 1.7, "16x512x512": 1.4, "1x2048x1600": 1.55, "8mixed": 1.5,
}  # fmt: skip
"""Case -> the most that a replay may take, in units of the limit."""
GROUPS = {
    "attention": "flash|fmha|attention|sdpa",
    "norms": "layer_norm|LayerNorm",
    "rotary": "_rotate",
    "gelu": "_gelu|GeluCUDA|gelu",
    "products": "gemm|nvjet|gemv|cutlass|xmma|splitK|cublas|Cijk",
}
"""Group -> what its kernels' names hold; the first that fits counts, the rest is `other`."""
VARLEN = "flash-by-varlen"  # "flash" in the name makes transformers pass boundaries


@dataclass(frozen=True)
class Subject:
    """A random checkpoint of a released shape: transformers' model, and how we are told of it."""

    reference: nn.Module
    settings: EncoderConfig
    config_json: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One case. Times in milliseconds, `peak_tflops` from the product measured in this run."""

    case: str
    patches: int
    flops: float
    peak_tflops: float
    limit_ms: float
    eager_ms: float
    replay_ms: float | None
    hf_sdpa_ms: float
    hf_graph_ms: float | None
    error: float
    hf_error: float
    parts_ms: dict[str, float]
    """Kernel time of one replay by group, and `between`: the replay's time without a kernel."""


def qwen3_vl() -> Subject:
    """The tower of Qwen3-VL-32B: 27 blocks, 1152 wide, 16 heads of 72, three deepstack mergers."""
    config = transformers.models.qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig(
        out_hidden_size=5120
    )
    model = transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel._from_config(
        config, attn_implementation="sdpa", dtype=torch.bfloat16
    )
    return Subject(model, EncoderConfig.load("qwen3-vl-32b"), config.to_dict())


def dinov2() -> Subject:
    """DINOv2 ViT-S/14, whole: 12 blocks, 384 wide, 6 heads of 64."""
    config = transformers.Dinov2Config(
        hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14
    )
    model: nn.Module = transformers.Dinov2Model(config)
    model.to(torch.bfloat16)
    whole = {"num_layers": None, "final_norm": True, "dtype": "bfloat16"}
    settings = EncoderConfig.load("dinov2-demo").model_copy(update=whole)
    return Subject(model, settings, config.to_dict())


SUBJECTS: dict[str, Callable[[], Subject]] = {"qwen3-vl": qwen3_vl, "dinov2": dinov2}


def build(subject: Subject, device: torch.device, attention: str) -> tuple[Tower, Backend]:
    """Our tower with the reference's weights."""
    family = FAMILIES[subject.settings.family]
    head_size = family.head_size(subject.config_json)
    backend = choose_backend(attention, device, torch.bfloat16, head_size)
    tower = family.from_checkpoint(subject.config_json, subject.settings, backend.attention)
    assert isinstance(tower, nn.Module)
    state = {k: v for k, v in released(subject.reference).items() if tower.wanted(k)}
    load_into(tower, tower.convert(state))
    tower.eval().to(device, torch.bfloat16)
    return tower, backend


def released(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors under the names that `save_pretrained` would write."""
    state = model.state_dict()
    if not isinstance(model, transformers.Dinov2Model):
        return state
    parts = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
    parts |= {"o_proj": "output.dense"}
    renamed = {}
    for name, tensor in state.items():
        for ours, theirs in parts.items():
            name = name.replace(f"attention.{ours}", f"attention.{theirs}")
        renamed[name] = tensor
    return renamed


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Median wall time of a call after warm-up."""
    drain = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        drain()
        start = time.perf_counter()
        run()
        drain()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large square product."""
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / milliseconds(lambda: a @ b, device) * 1e3


def flops(subject: Subject, layout: PackedLayout) -> float:
    """Matrix products and attention of one forward.

    A block: 2 T (4 d^2 + 2 d f) for its linears, 4 d sum(s^2) for attention over segments of s
    rows. A merger over m = merge_size^2 patches: 2 (P / m) ((m d)^2 + m d out).
    """
    config, merge = subject.config_json, subject.settings.merge_size**2
    width = config["hidden_size"]
    hidden = config.get("intermediate_size") or width * config["mlp_ratio"]
    depth = config.get("depth") or config["num_hidden_layers"]
    linears = 2 * layout.num_rows * (4 * width**2 + 2 * width * hidden)
    attention = 4 * width * sum(length**2 for length in layout.seqlens)
    mergers = 1 + len(config["deepstack_visual_indexes"]) if merge > 1 else 0
    patches = sum(num_patches(grid) for grid in layout.grid_thw)
    merged = (merge * width) ** 2 + merge * width * config.get("out_hidden_size", 0)
    return depth * (linears + attention) + mergers * 2 * (patches / merge) * merged


def ours(
    tower: Tower, backend: Backend, layout: PackedLayout, patches: Tensor
) -> Callable[[], Tensor]:
    """A call of our forward, with everything of the layout on the device."""
    inputs = tower.inputs(layout)
    inputs = inputs._make(tensor.to(patches.device) for tensor in inputs)
    cu_seqlens = torch.tensor(layout.cu_seqlens, dtype=torch.int32)
    if backend.boundaries == "device":
        cu_seqlens = cu_seqlens.to(patches.device)
    return lambda: tower(patches, inputs, [cu_seqlens, layout.max_seqlen], "patch")


def content(subject: Subject, tower: Tower, layout: PackedLayout, device: torch.device) -> Tensor:
    """What transformers reads: patches for Qwen3-VL, equal images [N, 3, H, W] for DINOv2."""
    generator = torch.Generator(device).manual_seed(0)
    if subject.settings.family == "qwen3_vl":
        count = sum(num_patches(grid) for grid in layout.grid_thw)
        shape: tuple[int, ...] = (count, 3 * tower.frames * tower.patch_size**2)
    else:
        _, rows, columns = layout.grid_thw[0]
        shape = (layout.num_images, 3, rows * tower.patch_size, columns * tower.patch_size)
    return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)


def packed(content: Tensor, tower: Tower) -> Tensor:
    """The same as our patches."""
    if content.dim() == 2:
        return content
    return torch.cat([patchify(image, tower.patch_size, 1, 1) for image in content])


def theirs(model: nn.Module, content: Tensor, layout: PackedLayout) -> Callable[[], Tensor]:
    """A call of transformers' forward as its users make it -> rows laid out as ours."""
    if content.dim() == 4:
        return lambda: model(content).last_hidden_state[:, 1:].flatten(0, 1)
    grid = torch.tensor(layout.grid_thw, device=content.device)
    return lambda: side_by_side(model(content, grid_thw=grid))


def theirs_capturable(model: Any, content: Tensor, layout: PackedLayout) -> Callable[[], Tensor]:
    """The same call with nothing left to derive: reading a layout back stops a capture."""
    if content.dim() == 4:
        return theirs(model, content, layout)
    grid = torch.tensor(layout.grid_thw, device=content.device)
    merge = model.spatial_merge_size
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=model.num_grid_per_side,
        mode=model.interpolation_mode,
        align_corners=model.interpolation_align_corners,
        spatial_merge_size=merge,
    )
    ready = {
        "position_ids": vision_utils.get_vision_position_ids(grid, merge),
        "interp_indices": indices,
        "interp_weights": weights,
        "cu_seqlens": torch.tensor(layout.cu_seqlens, dtype=torch.int32, device=content.device),
        "max_seqlen": layout.max_seqlen,
    }

    def run() -> Tensor:
        model.config._attn_implementation = VARLEN
        try:
            return side_by_side(model(content, grid_thw=grid, **ready))
        finally:
            model.config._attn_implementation = "sdpa"

    return run


def side_by_side(out: Any) -> Tensor:
    """[merger | deepstack...]"""
    return torch.cat([out.pooler_output, *out.deepstack_features], dim=-1)


def register_varlen() -> None:
    """Teach transformers torch's varlen attention, under the name that `VARLEN` holds."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        cu, longest = options["cu_seq_lens_q"], options["max_length_q"]
        out: Any = varlen_attn(q, k, v, cu_seq_q=cu, cu_seq_k=cu, max_q=longest, max_k=longest)
        return out.unsqueeze(0), None

    transformers.AttentionInterface.register(VARLEN, attend)


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call's graph. Its output is overwritten by every replay."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def parts(replay: Callable[[], Tensor], whole_ms: float, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of kernels in one replay, by group, and of the time between them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(repeats):
            replay()
        torch.cuda.synchronize()
    spent = dict.fromkeys((*GROUPS, "other"), 0.0)
    for event in profiler.events():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            spent[group_of(event.name)] += event.time_range.elapsed_us() / 1e3 / repeats
    spent["between"] = max(0.0, whole_ms - sum(spent.values()))
    return {group: round(milliseconds, 3) for group, milliseconds in spent.items()}


def group_of(kernel: str) -> str:
    """Which of `GROUPS` a kernel's name belongs to."""
    fits = (group for group, pattern in GROUPS.items() if re.search(pattern, kernel))
    return next(fits, "other")


def relative_error(rows: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact rows."""
    return float((rows.float() - exact).norm() / exact.norm())


@torch.inference_mode()
def measure(name: str, device: torch.device, attention: str) -> tuple[list[Row], str]:
    """Every case of a model, and the name of the attention backend."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    subject.reference.eval().to(device)
    exact = copy.deepcopy(subject.reference).float()
    tower, backend = build(subject, device, attention)
    peak = peak_flops(device, torch.bfloat16)
    if device.type == "cuda":
        register_varlen()
    rows = []
    for case, sizes in (CASES if device.type == "cuda" else CPU_CASES)[name].items():
        rows.append(measure_case(case, sizes, subject, exact, tower, backend, peak))
        sys.stderr.write(f"{rows[-1]}\n")
    return rows, backend.name


def measure_case(
    case: str,
    sizes: list[Size],
    subject: Subject,
    exact: nn.Module,
    tower: Tower,
    backend: Backend,
    peak: float,
) -> Row:
    """One row: our forward and transformers' on the same patches."""
    device = next(subject.reference.parameters()).device
    block, merge = tower.patch_size * tower.merge_size, tower.merge_size
    grids = [(1, h // block * merge, w // block * merge) for h, w in sizes]
    layout = PackedLayout.of(grids, NUM_PREFIX[subject.settings.family])
    work = flops(subject, layout)
    read = content(subject, tower, layout, device)
    run = ours(tower, backend, layout, packed(read, tower))
    reference = theirs(subject.reference, read, layout)
    whole = theirs(exact, read.float(), layout)()
    row = Row(
        case=case,
        patches=sum(num_patches(grid) for grid in grids),
        flops=work,
        peak_tflops=round(peak / 1e12, 1),
        limit_ms=round(work / peak * 1e3, 3),
        eager_ms=round(milliseconds(run, device), 3),
        replay_ms=None,
        hf_sdpa_ms=round(milliseconds(reference, device), 3),
        hf_graph_ms=None,
        error=relative_error(run(), whole),
        hf_error=relative_error(reference(), whole),
        parts_ms={},
    )
    if device.type != "cuda" or not backend.capturable:
        return row
    return with_replays(row, run, theirs_capturable(subject.reference, read, layout), device)


def with_replays(
    row: Row, run: Callable[[], Tensor], reference: Callable[[], Tensor], device: torch.device
) -> Row:
    """The row with its columns for graphs. A replay that differs from eager in a bit raises."""
    replay = captured(run)
    if not torch.equal(replay().view(torch.int8), run().view(torch.int8)):
        raise RuntimeError(f"{row.case}: a replay is not the eager forward")
    replay_ms = milliseconds(replay, device)
    spent = parts(replay, replay_ms)
    del replay  # its pool, before the other graph's
    hf_graph_ms = milliseconds(captured(reference), device)
    return replace(
        row,
        replay_ms=round(replay_ms, 3),
        hf_graph_ms=round(hf_graph_ms, 3),
        parts_ms=spent,
    )


def conditions(device: torch.device, model: str, backend: str) -> dict[str, str]:
    """What a figure has to be read with."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "model": model,
        "hardware": f"{hardware}, {os.cpu_count()} CPU cores ({platform.machine()})",
        "dtype": "bfloat16",
        "attention": backend,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }


def markdown(about: dict[str, str], rows: Sequence[Row]) -> str:
    """The results file for people."""
    lines = [f"# {about['model']} on {about['hardware']}", ""]
    lines += [f"* {key}: {value}" for key, value in about.items()]
    lines += [
        "",
        "Times in milliseconds, medians of 10. What each column is: benchmarks/bench_encoder.py.",
        "",
    ]
    lines += table(
        "case", "patches", "limit", "eager", "replay", "replay / limit", "at most",
        "transformers SDPA", "transformers graph", "error", "transformers' error",
        rows=[cells(row) for row in rows],
    )  # fmt: skip
    if late := [row for row in rows if late_by(row) > 0]:
        lines += ["", "Where the time of the rows goes that take more than they should:", ""]
        spent = [
            [row.case, *(f"{ms:.2f}" for ms in row.parts_ms.values()), f"{row.limit_ms:.2f}"]
            for row in late
        ]
        lines += table("case", *late[0].parts_ms, "limit", rows=spent)
    return "\n".join(lines) + "\n"


def cells(row: Row) -> list[str]:
    """A row of the table for people."""
    figures = row.limit_ms, row.eager_ms, row.replay_ms
    ratio = f"{row.replay_ms / row.limit_ms:.2f}x" if row.replay_ms else "-"
    most = f"{TARGETS[row.case]}x" if row.case in TARGETS else "-"
    return [
        row.case,
        str(row.patches),
        *map(shown, figures),
        ratio,
        most,
        shown(row.hf_sdpa_ms),
        shown(row.hf_graph_ms),
        f"{row.error:.2e}",
        f"{row.hf_error:.2e}",
    ]


def shown(milliseconds: float | None) -> str:
    """Two decimals, or a dash for what was not measured."""
    return "-" if milliseconds is None else f"{milliseconds:.2f}"


def late_by(row: Row) -> float:
    """Milliseconds by which a replay exceeds its target; negative within it or without one."""
    most = TARGETS.get(row.case)
    return row.replay_ms - most * row.limit_ms if most and row.replay_ms else -1.0


def table(*head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def publish(document: dict[str, Any], text: str, path: Path | None) -> None:
    """Write both results files if a path is given; the last line of stdout is the document."""
    line = json.dumps(document)
    if path:
        path.with_suffix(".md").write_text(text)
        path.with_suffix(".json").write_text(line + "\n")
    print(line)


def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SUBJECTS), default="qwen3-vl")
    parser.add_argument("--device", default=default)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--write", type=Path, help="results file without suffix: .md and .json")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows, backend = measure(options.model, device, options.attention)
    about = conditions(device, options.model, backend)
    publish(about | {"rows": [asdict(row) for row in rows]}, markdown(about, rows), options.write)


if __name__ == "__main__":
    main()
