"""How fast a tower runs, beside transformers and beside what the hardware allows.

Two regimes. A small batch is bound by the host, which launches a few hundred kernels whatever the
size; there `eager_ms` hardly falls with the patches. A large batch is bound by the device: matrix
products, then attention, then memory traffic. `limit_ms` is the time of the products and of
attention alone, at the rate of one large matrix product measured in the same run, so no tower
can be faster and the ratio says how much is left.

Whole forward, from normalised patches on the device to `[merger | deepstack...]` or patch rows;
layout tensors and pixels are ready. Medians of wall time, the device drained before and after.
Weights are random, of the released shape. The last line of stdout is one JSON document.

usage: python benchmarks/bench_encoder.py [--model qwen3-vl|dinov2] [--device cuda]
       [--attention varlen] [--write NAME]
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from encoders import EncoderConfig
from encoders.attention import Backend
from encoders.backends import choose_backend
from encoders.packing import PackedLayout, num_patches
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
    hf_sdpa_ms: float


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
    model = transformers.Dinov2Model(config).to(torch.bfloat16)
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


def released(model: nn.Module) -> dict[str, torch.Tensor]:
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
    tower: Tower, backend: Backend, layout: PackedLayout, device: torch.device
) -> Callable[[], object]:
    """A call of our forward, eager, with everything of the layout on the device."""
    inputs = tower.inputs(layout)
    inputs = inputs._make(tensor.to(device) for tensor in inputs)
    cu_seqlens = torch.tensor(layout.cu_seqlens, dtype=torch.int32)
    if backend.boundaries == "device":
        cu_seqlens = cu_seqlens.to(device)
    patches = random_patches(tower, layout, device)
    return lambda: tower(patches, inputs, [cu_seqlens, layout.max_seqlen], "patch")


def random_patches(tower: Tower, layout: PackedLayout, device: torch.device) -> torch.Tensor:
    """Normalised patches of a batch, of nobody's photos."""
    count = sum(num_patches(grid) for grid in layout.grid_thw)
    width = 3 * tower.frames * tower.patch_size**2
    return torch.randn(count, width, device=device, dtype=torch.bfloat16)


def theirs(
    subject: Subject, tower: Tower, layout: PackedLayout, device: torch.device
) -> Callable[[], object]:
    """A call of transformers' forward with SDPA, as its users make it."""
    model = subject.reference
    if subject.settings.family == "qwen3_vl":
        patches = random_patches(tower, layout, device)
        grid = torch.tensor(layout.grid_thw, device=device)
        return lambda: model(patches, grid_thw=grid)
    _, rows, columns = layout.grid_thw[0]
    side = tower.patch_size
    pixels = torch.randn(
        layout.num_images, 3, rows * side, columns * side, device=device, dtype=torch.bfloat16
    )
    return lambda: model(pixels)


@torch.inference_mode()
def measure(name: str, device: torch.device, attention: str) -> tuple[list[Row], str]:
    """Every case of a model, and the name of the attention backend."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    subject.reference.eval().to(device)
    tower, backend = build(subject, device, attention)
    peak = peak_flops(device, torch.bfloat16)
    rows = []
    for case, sizes in (CASES if device.type == "cuda" else CPU_CASES)[name].items():
        rows.append(measure_case(case, sizes, subject, tower, backend, peak))
        sys.stderr.write(f"{rows[-1]}\n")
    return rows, backend.name


def measure_case(
    case: str, sizes: list[Size], subject: Subject, tower: Tower, backend: Backend, peak: float
) -> Row:
    """One row: our eager forward and transformers' on the same layout."""
    device = next(subject.reference.parameters()).device
    block, merge = tower.patch_size * tower.merge_size, tower.merge_size
    grids = [(1, h // block * merge, w // block * merge) for h, w in sizes]
    layout = PackedLayout.of(grids, NUM_PREFIX[subject.settings.family])
    work = flops(subject, layout)
    eager = milliseconds(ours(tower, backend, layout, device), device)
    reference = milliseconds(theirs(subject, tower, layout, device), device)
    return Row(
        case=case,
        patches=sum(num_patches(grid) for grid in grids),
        flops=work,
        peak_tflops=round(peak / 1e12, 1),
        limit_ms=round(work / peak * 1e3, 3),
        eager_ms=round(eager, 3),
        hf_sdpa_ms=round(reference, 3),
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
        "Times in milliseconds, medians of 10. `limit`: see benchmarks/bench_encoder.py.",
        "",
    ]
    lines += [
        "| case | patches | limit | eager | eager / limit | transformers SDPA | eager / SDPA |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        ratios = row.eager_ms / row.limit_ms, row.eager_ms / row.hf_sdpa_ms
        lines.append(
            f"| {row.case} | {row.patches} | {row.limit_ms:.2f} | {row.eager_ms:.2f} "
            f"| {ratios[0]:.2f}x | {row.hf_sdpa_ms:.2f} | {ratios[1]:.0%} |"
        )
    return "\n".join(lines) + "\n"


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
    document = json.dumps(about | {"rows": [asdict(row) for row in rows]})
    if options.write:
        options.write.with_suffix(".md").write_text(markdown(about, rows))
        options.write.with_suffix(".json").write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
