"""Other ways to compute a block's parts, each against the one in use: products, attention, norms.

Every figure is the time of one call inside a graph of many calls, as in bench_kernels. The large
product, whose rate gives each limit, is measured in the same run. A deadline cuts what is left.

usage: python benchmarks/bench_candidates.py [--seconds 95]
       [--only products,rotation,norms,attention,blocks,tiles]
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from benchmarks.bench_encoder import table
from benchmarks.bench_kernels import BF16, BYTES_PER_SECOND, CUDA, LAYOUTS, microseconds, randn
from encoders import kernels, triton_kernels

WIDTH, HIDDEN, HEADS, SIZE = 1152, 4304, 16, 72
SECTIONS = ("products", "rotation", "norms", "attention", "blocks", "tiles")
LINES: list[list[str]] = []
START = time.perf_counter()
DEADLINE = [95.0]


def note(section: str, case: str, way: str, ideal: float, measure: Callable[[], float]) -> None:
    """One line: microseconds, the limit, and their ratio; nothing once the deadline has passed."""
    if time.perf_counter() - START > DEADLINE[0]:
        return
    began = time.perf_counter()
    try:
        found = measure()
        shown = [f"{found:.1f}", f"{ideal:.1f}", f"{found / ideal:.2f}"]
    except Exception as error:  # compilers raise their own; the other lines still count
        shown = [(str(error).partition("\n")[0] or type(error).__name__)[:70], f"{ideal:.1f}", "-"]
    LINES.append([section, case, way, *shown])
    print(*LINES[-1], f"({time.perf_counter() - began:.1f} s)", flush=True)


def two(function: Callable[..., object], *makers: Callable[[], Any]) -> Callable[[], float]:
    """A measurement of calls on two sets of tensors that take turns."""

    def measure() -> float:
        sets = [[make() for make in makers] for _ in range(2)]
        return microseconds([partial(function, *tensors) for tensors in sets], rounds=4)

    return measure


def linear(inner: int, outer: int) -> nn.Linear:
    """A linear in bf16 on the GPU."""
    return nn.Linear(inner, outer, device=CUDA, dtype=BF16)


def epilogue(x: Tensor, f: nn.Linear) -> Tensor:
    """The linear and GELU by tanh in BLAS."""
    return torch._addmm_activation(f.bias, x, f.weight.t(), use_gelu=True)


def products(peak: float) -> None:
    """The four linears of a block: widths, bias, where GELU runs, and the residual inside."""
    ways: dict[str, Callable[[Tensor, nn.Linear], object]] = {
        "bias": lambda x, f: f(x),
        "no bias": lambda x, f: x @ f.weight.t(),
    }
    gelus: dict[str, Callable[[Tensor, nn.Linear], object]] = {
        "epilogue GELU": epilogue,
        "our GELU": lambda x, f: triton_kernels.gelu(f(x), tanh=True),
        "torch GELU": lambda x, f: F.gelu(f(x), approximate="tanh"),
    }
    widths = (HIDDEN, 4352, 4608)
    shapes = [("qkv", WIDTH, 3456), ("qkv", WIDTH, 3840), ("proj", WIDTH, WIDTH)]
    shapes += [("proj", 1280, WIDTH)]
    shapes += [("fc1", WIDTH, w) for w in widths] + [("fc2", w, WIDTH) for w in widths]
    limits = {"qkv": 3456 * WIDTH, "proj": WIDTH**2, "fc1": WIDTH * HIDDEN, "fc2": WIDTH * HIDDEN}
    for rows, (name, inner, outer) in product((16384, 12800, 1024), shapes):
        ideal = 2 * rows * limits[name] / peak * 1e6
        make = partial(randn, rows, inner), partial(linear, inner, outer)
        case = f"{name} {inner}->{outer} T={rows}"
        for way, call in (ways | gelus if name == "fc1" else ways).items():
            note("product", case, way, ideal, two(call, *make))
        if outer == WIDTH:  # x += y W^T: BLAS reads the residual stream and writes it
            add = two(lambda x, f, r: r.addmm_(x, f.weight.t()), *make, partial(randn, rows, outer))
            note("product", case, "onto the residual", ideal, add)


def flash(qkv: Tensor, boundaries: Tensor, longest: int, **tiles: Any) -> object:
    """FlashAttention 4 on a packed [T, 3, H, K]; `tiles`: in place of its own choice."""
    forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    return forward(
        *qkv.unbind(1), cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, max_seqlen_q=longest,
        max_seqlen_k=longest, softmax_scale=SIZE**-0.5, **tiles,
    )[0]  # fmt: skip


def dense(qkv: Tensor, images: int) -> Tensor:
    """torch's dense attention by cuDNN over images of one length -> [T, H, K]."""
    q, k, v = (x.unflatten(0, (images, -1)).transpose(1, 2) for x in qkv.unbind(1))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, scale=SIZE**-0.5)
    return out.transpose(1, 2).flatten(0, 1)


def packed(rows: int, size: int, pitch: int) -> Tensor:
    """[T, 3, H, size], heads `pitch` apart, zeros from the 72nd value on."""
    wide = torch.zeros(rows, 3, HEADS, max(size, pitch), device=CUDA, dtype=BF16)
    wide[..., :SIZE] = randn(rows, 3, HEADS, SIZE)
    return wide[..., :size]


FREE = {"mma_pv_is_rs": False, "intra_wg_overlap": True}
Heads = tuple[int, int, dict[str, Any]]


def attention(peak: float) -> None:
    """Head widths, head pitches, and tiles that divide 1024 rows."""
    tile = FREE | {"tile_mn": (192, 128)}
    attentions(peak, (72, 72, {}), (72, 80, {}), (80, 80, {}), (72, 72, tile), (80, 80, tile))


def tiles(peak: float) -> None:
    """Other tiles and wider heads, which are the least likely to win."""
    small, wide = ({**FREE, "tile_mn": (128, n)} for n in (128, 176))
    attentions(peak, (72, 72, small), (80, 80, small), (72, 72, wide), (128, 128, {}), (96, 96, {}))


def attentions(peak: float, *ways: Heads) -> None:
    """Each way on each layout."""
    for (size, pitch, tiles), name in product(ways, ("16x1024", "1x12800", "8mixed", "1x1024")):
        lengths = LAYOUTS[name]
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=CUDA)
        ideal = 4 * WIDTH * sum(n * n for n in lengths) / peak * 1e6
        make = partial(packed, sum(lengths), size, pitch)
        call = partial(flash, boundaries=cu, longest=max(lengths), **tiles)
        way = f"flash {size} of {pitch} {tiles.get('tile_mn', '')}"
        note("attention", name, way, ideal, two(call, make))
        if len(set(lengths)) == 1 and not tiles and size <= 80:
            call = partial(dense, images=len(lengths))
            note("attention", name, f"dense cuDNN {size} of {pitch}", ideal, two(call, make))


@triton.jit
def _norm_part(x, branch, x_out, place, inside):
    stream = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    stream += tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
    stream = stream.to(x.dtype.element_ty)
    tl.store(x_out + place, stream, mask=inside)
    return stream.to(tl.float32)


@triton.jit
def _norm_rows(
    x, branch, weight, bias, x_out, y, rows, D: tl.constexpr, ROWS: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    # A row in two powers of two, so that few lanes are masked: 1152 = 1024 + 128.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, HEAD)[None, :]
    in_head = (row < rows) & (head < D)
    first = _norm_part(x, branch, x_out, row * D + head, in_head)
    total = tl.sum(first, axis=1)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        in_tail = (row < rows) & (tail < D)
        second = _norm_part(x, branch, x_out, row * D + tail, in_tail)
        total += tl.sum(second, axis=1)
    mean = (total / D)[:, None]
    first = tl.where(head < D, first - mean, 0.0)
    square = tl.sum(first * first, axis=1)
    if TAIL > 0:
        second = tl.where(tail < D, second - mean, 0.0)
        square += tl.sum(second * second, axis=1)
    scale = 1.0 / tl.sqrt(square / D + 1e-6)[:, None]
    gain = tl.load(weight + head, mask=head < D, other=0.0).to(tl.float32)
    shift = tl.load(bias + head, mask=head < D, other=0.0).to(tl.float32)
    out = first * scale * gain + shift
    tl.store(y + row * D + head, out.to(y.dtype.element_ty), mask=in_head)
    if TAIL > 0:
        gain = tl.load(weight + tail, mask=tail < D, other=0.0).to(tl.float32)
        shift = tl.load(bias + tail, mask=tail < D, other=0.0).to(tl.float32)
        out = second * scale * gain + shift
        tl.store(y + row * D + tail, out.to(y.dtype.element_ty), mask=in_tail)


def norm_rows(
    x: Tensor, branch: Tensor, norm: nn.LayerNorm, split: bool, rows: int, warps: int
) -> tuple[Tensor, Tensor]:
    """Launch of the other norm."""
    height, width = x.shape
    out, y = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    head = block // 2 if split else block
    tail = triton.next_power_of_2(width - head) if split else 0
    tensors = (x, branch, norm.weight, norm.bias, out, y, height)
    _norm_rows[(triton.cdiv(height, rows),)](
        *tensors, D=width, ROWS=rows, HEAD=head, TAIL=tail, num_warps=warps
    )
    return out, y


def norms(speed: float) -> None:
    """Rows per program, warps, and a row in one or two powers of two."""
    sweeps = {
        (16384, 1152): [
            *((True, rows, warps) for rows, warps in product((1, 2, 4), (2, 4, 8)) if rows < warps),
            (True, 1, 1), (False, 1, 2), (False, 1, 4), (False, 1, 8), (False, 2, 8),
        ],
        (16384, 384): [
            (True, 1, 1), (True, 2, 2), (True, 4, 4), (True, 8, 4), (False, 1, 1), (False, 4, 4),
            (False, 2, 4),
        ],
    }  # fmt: skip
    for (height, width), choices in sweeps.items():
        norm = nn.LayerNorm(width, eps=1e-6, device=CUDA, dtype=BF16)
        make, ideal = partial(randn, height, width), 8 * height * width / speed * 1e6
        case = f"residual, norm {height}x{width}"
        now = two(lambda x, b, n=norm: kernels.add_layer_norm(x, b, n), make, make)
        note("norm", case, "now", ideal, now)
        alone = two(lambda x, n=norm: kernels.layer_norm(x, n), make)
        note("norm", case, "now, without a residual", ideal / 2, alone)
        for split, rows, warps in choices:
            call = partial(norm_rows, norm=norm, split=split, rows=rows, warps=warps)
            way = f"{'split' if split else 'whole'}, {rows} rows, {warps} warps"
            note("norm", case, way, ideal, two(call, make, make))


@triton.jit(do_not_specialize=["rows"])
def _rotate_flat(
    qkv, cos, sin, rows, HEADS: tl.constexpr, HALF: tl.constexpr, PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Fours of values, of any row and head; no lane is left without one.
    four = tl.program_id(0).to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[:, None]
    FOURS: tl.constexpr = HALF // 4
    row = four // (2 * HEADS * FOURS)
    head = four // FOURS % (2 * HEADS)
    column = four % FOURS * 4 + tl.arange(0, 4)[None, :]
    inside = (row < rows) & (column < HALF)
    place = qkv + row * (3 * HEADS * PITCH) + head * PITCH + column
    turn = row * (2 * HALF) + column
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_first = first * tl.load(cos + turn, mask=inside) + second * tl.load(
        sin + turn, mask=inside
    )
    turned_second = second * tl.load(cos + turn + HALF, mask=inside) + first * tl.load(
        sin + turn + HALF, mask=inside
    )
    tl.store(place, turned_first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(place + HALF, turned_second.to(qkv.dtype.element_ty), mask=inside)


def rotate_flat(qkv: Tensor, turn: Tensor, block: int = 1024, warps: int = 4) -> None:
    """Launch of the other rotation; heads may be further apart than they are wide."""
    rows, pitch = qkv.shape[0], qkv.stride(2)
    count = triton.cdiv(rows * HEADS * SIZE, block)
    constants = {"HEADS": HEADS, "HALF": SIZE // 2, "PITCH": pitch, "BLOCK": block}
    _rotate_flat[(count,)](qkv, turn, turn, rows, **constants, num_warps=warps)


def rotation(speed: float) -> None:
    """The present kernel by warps, and one whose lanes are all in use."""
    rows = 16384
    turn, chosen = torch.rand(rows, SIZE, device=CUDA) / 2, triton_kernels._warps
    ideal = (8 * rows * WIDTH + 8 * rows * SIZE) / speed * 1e6
    now = two(lambda x: kernels.rotate_(x, turn, turn), partial(packed, rows, 72, 72))
    for warps in (2, 4, 8):
        triton_kernels._warps = lambda values, warps=warps: warps
        note("rotation", f"T={rows}", f"now, {warps} warps", ideal, now)
    triton_kernels._warps = chosen
    for pitch, block, warps in (
        (72, 512, 4), (72, 1024, 4), (72, 1024, 8), (72, 2048, 4), (72, 2048, 8), (72, 512, 2),
        (80, 1024, 4), (80, 2048, 8),
    ):  # fmt: skip
        call = partial(rotate_flat, turn=turn, block=block, warps=warps)
        way = f"flat, heads {pitch} apart, block {block}, {warps} warps"
        note("rotation", f"T={rows}", way, ideal, two(call, partial(packed, rows, 72, pitch)))
    x, twin = packed(rows, 72, 72), packed(rows, 72, 72)
    twin.copy_(x)
    rotate_flat(x, turn)
    kernels.rotate_(twin, turn, turn)
    print("flat rotation differs by", float((x - twin).abs().max()))


@dataclass(frozen=True)
class Way:
    """How a block is computed."""

    hidden: int = HIDDEN
    gelu: str = "epilogue"
    size: int = 72
    pitch: int = 72
    tile: tuple[int, int] | None = None
    cudnn: bool = False
    flat: bool = False
    split: tuple[int, int] | None = None
    onto: bool = False


WAYS = {
    "now": Way(),
    "hidden 4352": Way(hidden=4352),
    "hidden 4352, our GELU": Way(hidden=4352, gelu="ours"),
    "heads 80 apart": Way(pitch=80, flat=True),
    "heads of 80": Way(pitch=80, size=80, flat=True),
    "tile 192x128": Way(tile=(192, 128)),
    "cuDNN": Way(cudnn=True),
    "flat rotation, split norm": Way(flat=True, split=(1, 2)),
    "residual in the products": Way(onto=True),
    "4352, flat, split": Way(hidden=4352, flat=True, split=(1, 2)),
    "4352, flat, split, heads of 80": Way(hidden=4352, flat=True, split=(1, 2), size=80, pitch=80),
    "4352, flat, onto": Way(hidden=4352, flat=True, onto=True),
    "4352, flat, onto, heads of 80": Way(hidden=4352, flat=True, onto=True, size=80, pitch=80),
    "4352, flat, onto, cuDNN": Way(hidden=4352, flat=True, onto=True, cudnn=True),
}


def block(way: Way, lengths: tuple[int, ...]) -> Callable[[], float]:
    """A measurement of four blocks in a row, per block."""

    def measure() -> float:
        rows = sum(lengths)
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=CUDA)
        turn = torch.rand(rows, SIZE, device=CUDA) / 2
        norm = nn.LayerNorm(WIDTH, eps=1e-6, device=CUDA, dtype=BF16)
        inner = HEADS * (way.size if way.pitch == way.size else SIZE)
        shapes = [(WIDTH, 3 * HEADS * way.pitch), (inner, WIDTH), (WIDTH, way.hidden)]
        sets = [[linear(*s) for s in (*shapes, (way.hidden, WIDTH))] for _ in range(4)]
        first = randn(rows, WIDTH)

        def run() -> None:
            x, y = first.clone(), kernels.layer_norm(first, norm)
            for linears in sets:
                x, y = step(way, linears, norm, x, y, turn, cu, lengths)

        return microseconds([run], rounds=2) / len(sets)

    return measure


def step(
    way: Way, linears: list[nn.Linear], norm: nn.LayerNorm, x: Tensor, y: Tensor, turn: Tensor,
    cu: Tensor, lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One block."""
    qkv_linear, proj, fc1, fc2 = linears
    qkv = qkv_linear(y).unflatten(-1, (3, HEADS, way.pitch))[..., : way.size]
    if way.flat:
        rotate_flat(qkv, turn)
    else:
        kernels.rotate_(qkv, turn, turn)
    tiles: dict[str, Any] = {}
    if way.tile:
        tiles = {"tile_mn": way.tile, "mma_pv_is_rs": False, "intra_wg_overlap": True}
    out = dense(qkv, len(lengths)) if way.cudnn else flash(qkv, cu, max(lengths), **tiles)
    assert isinstance(out, Tensor)
    x, y = joined(way, x, out.flatten(1), proj, norm)
    hidden = epilogue(y, fc1) if way.gelu == "epilogue" else triton_kernels.gelu(fc1(y), tanh=True)
    return joined(way, x, hidden, fc2, norm)


def joined(way: Way, x: Tensor, y: Tensor, f: nn.Linear, norm: nn.LayerNorm) -> Any:
    """`x + f(y)` and its norm."""
    if way.onto:
        x.addmm_(y, f.weight.t())
        return x, kernels.layer_norm(x, norm)
    if way.split:
        return norm_rows(x, f(y), norm, True, *way.split)
    return kernels.add_layer_norm(x, f(y), norm)


def blocks(peak: float) -> None:
    """Whole blocks."""
    for name, (title, way) in product(("16x1024", "1x12800", "8mixed"), WAYS.items()):
        lengths = LAYOUTS[name]
        if way.cudnn and len(set(lengths)) > 1:
            continue
        work = 2 * sum(lengths) * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN)
        work += 4 * WIDTH * sum(n * n for n in lengths)
        note("block", name, title, work / peak * 1e6, block(way, lengths))


@torch.inference_mode()
def main() -> None:
    """Measure until the deadline, print one table and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--only", default=",".join(SECTIONS))
    options = parser.parse_args()
    DEADLINE[0] = options.seconds
    torch.manual_seed(0)
    a, b = randn(8192, 8192), randn(8192, 8192)
    peak = 2 * 8192**3 / microseconds([lambda: a @ b], rounds=10) * 1e6
    speed = BYTES_PER_SECOND[torch.cuda.get_device_name()]
    for section in options.only.split(","):
        globals()[section](speed if section in ("norms", "rotation") else peak)
    head = ["part", "case", "way", "us", "limit", "ratio"]
    print("\n".join(table(*head, rows=LINES)))
    about = {"peak_tflops": peak / 1e12, "seconds": time.perf_counter() - START}
    print(json.dumps(about | {"rows": LINES}))


if __name__ == "__main__":
    main()
