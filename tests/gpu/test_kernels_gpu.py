"""The fused kernels on a real GPU: against their twins, in graphs, and how often they compile.

Shapes: T = rows, D = width, H = heads, K = head width, F = MLP width, G = cells, Q = taps.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoders import kernels
from tests.gpu.sync import no_sync
from tests.kernel_cases import near, norm_of, others, random, spoilt, taps, turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.filterwarnings("ignore"),  # the sync detector's own
]

BF16 = torch.bfloat16
WIDTH, HEADS, SIZE, CELLS = 1152, 16, 72, 2304
# One row, the edges of Triton's specialisations (1, multiples of 16), odd ones, many.
HEIGHTS = (1, 2, 15, 16, 17, 100, 1023, 1024, 4099, 16384)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
NAMES = ("_add_layer_norm", "_rotate", "_gelu", "_add_positions")
Step = Callable[[int], tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def on_gpu(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Values of unit variance on the GPU."""
    return random(*shape, dtype=dtype, device="cuda", seed=seed)


def bits(x: Tensor) -> Tensor:
    """Values to be compared as integers, so that NaN and -0 count."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


@each_dtype
@pytest.mark.parametrize("width", [384, WIDTH, 4608])
@pytest.mark.parametrize("rows", [0, 1, 1000])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "LayerScale"])
def test_residual_and_norm_round_where_separate_operations_do(
    rows: int, width: int, dtype: torch.dtype, scaled: bool
) -> None:
    x, branch = on_gpu(rows, width, dtype=dtype), on_gpu(rows, width, dtype=dtype, seed=1)
    scale = on_gpu(width, dtype=dtype, seed=2) if scaled else None
    norm = norm_of(width, dtype, "cuda")

    total, y = kernels.add_layer_norm(x, branch, norm, scale)

    expected_total, expected = kernels.plain_add_layer_norm(x, branch, norm, scale)
    assert torch.equal(bits(total), bits(expected_total))
    torch.testing.assert_close(y, expected, **near(dtype) | {"atol": 1e-5})


@each_dtype
@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_rotation_is_in_place_and_leaves_values_alone(rows: int, dtype: torch.dtype) -> None:
    qkv = on_gpu(rows, 3, HEADS, SIZE, dtype=dtype)
    expected = qkv.clone()
    kernels.plain_rotate_(expected, *turns(rows, SIZE, "cuda"))

    kernels.rotate_(qkv, *turns(rows, SIZE, "cuda"))

    assert torch.equal(bits(qkv[:, 2]), bits(expected[:, 2]))
    torch.testing.assert_close(qkv, expected, **near(dtype))


@each_dtype
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_a_linear_is_within_two_roundings_of_exact(
    approximate: str, dtype: torch.dtype
) -> None:
    linear = nn.Linear(WIDTH, 4304).to("cuda", dtype)
    x = on_gpu(1000, WIDTH, dtype=dtype)

    y = kernels.linear_gelu(x, linear, approximate)

    wide = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    exact = F.gelu(wide, approximate=approximate)
    eps = torch.finfo(dtype).eps
    # The twin rounds the product, whose error GELU passes on at most 1.13-fold, and the result.
    # fp32: sums of 1152 terms. BLAS's own tanh adds 2**-11 of the value at most.
    atol = 1e-5 if dtype is torch.float32 else 2**-10
    torch.testing.assert_close(y.double(), exact, rtol=2 * eps, atol=atol)
    assert (y.double() - exact).norm() <= 1.05 * (
        kernels.plain_linear_gelu(x, linear, approximate).double() - exact
    ).norm()


@each_dtype
@pytest.mark.parametrize(("width", "count"), [(WIDTH, 4), (384, 16)])
def test_positions_are_a_weighted_bag_of_cells(width: int, count: int, dtype: torch.dtype) -> None:
    x, table = on_gpu(1000, width, dtype=dtype), on_gpu(CELLS, width, dtype=dtype, seed=1)
    named = taps(1000, CELLS, count, "cuda")

    y = kernels.add_positions(x, table, *named)

    # `size`: what the terms of a position add up to without their signs. fp32 sums of it in any two
    # orders are within `count` units of it; then one rounding of the position, one with x.
    expected = kernels.plain_add_positions(x, table, *named).double()
    cell, share = named
    size = (table.double()[cell] * share.double()[..., None]).abs().sum(1)
    roundings = torch.finfo(dtype).eps * (size + expected.abs())
    bound = roundings + count * torch.finfo(torch.float32).eps * size
    assert ((y.double() - expected).abs() <= bound).all()


def test_a_row_that_is_not_finite_keeps_to_itself() -> None:
    norm = norm_of(WIDTH, BF16, "cuda")
    x, branch = on_gpu(100, WIDTH), on_gpu(100, WIDTH, seed=1)
    qkv, turning = on_gpu(100, 3, HEADS, SIZE), turns(100, SIZE, "cuda")
    spoilt_qkv = spoilt(qkv.flatten(1)).view_as(qkv)
    clean = kernels.add_layer_norm(x, branch, norm)
    kernels.rotate_(qkv, *turning)

    dirty = kernels.add_layer_norm(spoilt(x), branch, norm)
    kernels.rotate_(spoilt_qkv, *turning)

    for out, expected in zip((*dirty, spoilt_qkv), (*clean, qkv), strict=True):
        assert torch.equal(bits(others(out)), bits(others(expected)))
    assert dirty[1][1].isnan().all()


def steps() -> dict[str, Step]:
    """Every kernel at the width of a real tower, on the first rows of the same tensors."""
    norm, linear = norm_of(WIDTH, BF16, "cuda"), nn.Linear(WIDTH, 4304).to("cuda", BF16)
    most = HEIGHTS[-1]
    table, x, branch = on_gpu(CELLS, WIDTH), on_gpu(most, WIDTH), on_gpu(most, WIDTH, seed=1)
    qkv, (place, table_of_turns) = on_gpu(most, 3, HEADS, SIZE), turns(most, SIZE, "cuda")
    cell, share = taps(most, CELLS, 4, "cuda")

    def rotate(rows: int) -> tuple[Tensor, ...]:
        turned = qkv[:rows].clone()
        kernels.rotate_(turned, place[:rows], table_of_turns)
        return (turned,)

    return {
        "_add_layer_norm": lambda rows: kernels.add_layer_norm(x[:rows], branch[:rows], norm),
        "_rotate": rotate,
        "_gelu": lambda rows: (kernels.linear_gelu(x[:rows], linear, "none"),),
        "_add_positions": lambda rows: (
            kernels.add_positions(x[:rows], table, cell[:rows], share[:rows]),
        ),
    }


@pytest.mark.parametrize("name", NAMES)
def test_rows_never_make_a_kernel_compile_again(name: str) -> None:
    from encoders import triton_kernels  # Triton comes with torch for GPUs

    step, kernel = steps()[name], getattr(triton_kernels, name)
    step(HEIGHTS[-1])
    compiled = len(kernel.device_caches[torch.cuda.current_device()][0])
    assert compiled > 0

    for rows in HEIGHTS:
        step(rows)

    assert len(kernel.device_caches[torch.cuda.current_device()][0]) == compiled


@pytest.mark.parametrize("name", sorted({*NAMES} - {"_gelu"}))  # BLAS picks by the rows
def test_a_row_has_the_same_bits_among_many_and_among_few(name: str) -> None:
    step = steps()[name]

    few = step(17)

    for out, expected in zip(few, step(16384), strict=True):
        assert torch.equal(bits(out), bits(expected[:17]))


def test_offsets_beyond_32_bits_are_reached() -> None:
    rows = 2**31 // WIDTH + 2
    x = torch.zeros(rows, WIDTH, dtype=BF16, device="cuda")
    x[-1] = on_gpu(WIDTH)
    norm = norm_of(WIDTH, BF16, "cuda")

    y = kernels.layer_norm(x, norm)

    torch.testing.assert_close(y[-1], norm(x[-1]), **near(BF16) | {"atol": 1e-5})


def test_a_replay_gives_the_bits_of_eager_for_other_values() -> None:
    rows = 1000
    shapes = (rows, WIDTH), (rows, WIDTH), (rows, 3, HEADS, SIZE)
    contents = [
        [*(on_gpu(*shape, seed=seed) for shape in shapes), *turns(rows, SIZE, "cuda")]
        for seed in range(3)
    ]
    norm = norm_of(WIDTH, BF16, "cuda")

    def forward(x: Tensor, branch: Tensor, qkv: Tensor, *turns: Tensor) -> Tensor:
        turned = qkv.clone()
        kernels.rotate_(turned, *turns)
        x, y = kernels.add_layer_norm(x, branch, norm)
        return torch.cat([x, kernels.layer_norm(y, norm), turned.flatten(1)], dim=1)

    inputs = [tensor.clone() for tensor in contents[0]]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(*inputs)  # compiles
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = forward(*inputs)

    replays = []
    for content in contents:
        for static, fresh in zip(inputs, content, strict=True):
            static.copy_(fresh)
        graph.replay()
        replays.append(out.clone())

    for content, replay in zip(contents, replays, strict=True):
        assert torch.equal(bits(replay), bits(forward(*content)))


def test_a_launch_waits_for_nothing() -> None:
    norm, x = norm_of(WIDTH, BF16, "cuda"), on_gpu(100, WIDTH)
    qkv, turning = on_gpu(100, 3, HEADS, SIZE), turns(100, SIZE, "cuda")
    kernels.add_layer_norm(x, x, norm)
    kernels.rotate_(qkv, *turning)

    with no_sync():
        kernels.add_layer_norm(x, x, norm)
        kernels.rotate_(qkv, *turning)
