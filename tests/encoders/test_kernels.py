"""The fused kernels in Triton's interpreter against their twins, and towers made of them.

fp32 and fp16: the interpreter cuts bf16 off where a device rounds it (tests/gpu has bf16). Shapes:
T = rows, D = width, H = heads, K = head width, F = MLP width, Q = taps.
"""

import importlib.util
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Dinov2Config
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from encoders import EncoderConfig, kernels
from encoders.attention import sdpa
from encoders.packing import PackedLayout
from encoders.towers.load import FAMILIES
from tests.kernel_cases import near, norm_of, others, random, spoilt, taps, turns

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs tests/gpu/test_kernels_gpu"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
each_width = pytest.mark.parametrize("width", [64, 72, 1152])
each_height = pytest.mark.parametrize("rows", [0, 1, 5])


@pytest.fixture(scope="module")
def launchers() -> ModuleType:
    """`encoders.triton_kernels`, interpreted: tests/conftest.py sets `TRITON_INTERPRET`."""
    from encoders import triton_kernels  # Triton is optional

    return triton_kernels


@each_dtype
@each_width
@each_height
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "LayerScale"])
def test_residual_and_norm_round_where_separate_operations_do(
    launchers: ModuleType, rows: int, width: int, dtype: torch.dtype, scaled: bool
) -> None:
    x, branch = (random(rows, width, dtype=dtype, seed=seed) for seed in (6, 7))
    scale = random(width, dtype=dtype, seed=8) if scaled else None
    norm = norm_of(width, dtype)

    total, y = launchers.add_layer_norm(x, branch, scale, norm.weight, norm.bias, norm.eps)

    expected_total, expected = kernels.plain_add_layer_norm(x, branch, norm, scale)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(y, expected, **near(dtype))


@each_dtype
@each_width
def test_norm_alone_is_torchs_and_leaves_x_as_it_is(
    launchers: ModuleType, width: int, dtype: torch.dtype
) -> None:
    x = random(5, width, dtype=dtype) + 10  # a mean that one-pass moments would suffer from
    before, norm = x.clone(), norm_of(width, dtype)

    same, y = launchers.add_layer_norm(x, None, None, norm.weight, norm.bias, norm.eps)

    assert same is x
    assert torch.equal(x, before)
    torch.testing.assert_close(y, norm(x), **near(dtype) | {"atol": 2e-5})


@each_dtype
@each_height
@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 72), (16, 72), (1, 80)])
def test_rotation_is_in_place_and_leaves_values_alone(
    launchers: ModuleType, rows: int, heads: int, size: int, dtype: torch.dtype
) -> None:
    qkv = random(rows, 3, heads, size, dtype=dtype)
    expected = qkv.clone()
    kernels.plain_rotate_(expected, *turns(rows, size))

    launchers.rotate_(qkv, *turns(rows, size))

    assert torch.equal(qkv[:, 2], expected[:, 2])
    torch.testing.assert_close(qkv, expected, **near(dtype))


@each_dtype
@each_height
@pytest.mark.parametrize("width", [96, 4304])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: exp overflows
def test_gelu_is_torchs_from_end_to_end_of_the_range(
    launchers: ModuleType, rows: int, width: int, approximate: str, dtype: torch.dtype
) -> None:
    x = random(rows, width, dtype=dtype) * 4
    # No infinities: torch's own kernel for the CPU makes NaN of them.
    x[:1, :5] = torch.tensor([0.0, -0.0, 30.0, -30.0, torch.nan])

    y = launchers.gelu(x, tanh=approximate == "tanh")

    torch.testing.assert_close(y, F.gelu(x, approximate=approximate), **near(dtype))


@each_dtype
@each_width
@each_height
@pytest.mark.parametrize("count", [4, 16])
def test_positions_are_a_weighted_bag_of_cells(
    launchers: ModuleType, rows: int, width: int, count: int, dtype: torch.dtype
) -> None:
    x, table = random(rows, width, dtype=dtype), random(49, width, dtype=dtype, seed=9)
    named = taps(rows, 49, count)

    y = launchers.add_positions(x, table, *named)

    # The order of a sum in fp32 may tip its rounding, and with it that of the sum with x.
    expected = kernels.plain_add_positions(x, table, *named)
    torch.testing.assert_close(y, expected, **near(dtype) | {"atol": 8 * torch.finfo(dtype).eps})


@pytest.mark.parametrize("where", ["x", "branch"])
def test_a_row_that_is_not_finite_keeps_to_itself(launchers: ModuleType, where: str) -> None:
    tensors = {name: random(4, 72, dtype=torch.float32, seed=len(name)) for name in ("x", "branch")}
    norm = norm_of(72, torch.float32)
    clean = launchers.add_layer_norm(*tensors.values(), None, norm.weight, norm.bias, norm.eps)
    tensors[where] = spoilt(tensors[where])

    dirty = launchers.add_layer_norm(*tensors.values(), None, norm.weight, norm.bias, norm.eps)

    for out, expected in zip(dirty, clean, strict=True):
        assert torch.equal(others(out), others(expected))
    expected = kernels.plain_add_layer_norm(tensors["x"], tensors["branch"], norm)[1]
    torch.testing.assert_close(dirty[1], expected, **near(torch.float32))


def test_views_into_a_slab_give_the_results_of_tensors_of_their_own(launchers: ModuleType) -> None:
    norm, (place, table) = norm_of(72, torch.float32), turns(5, 72)
    slab = torch.empty(table.numel() + 1)
    slab_table = slab[1:].view_as(table).copy_(table)  # begins 4 bytes after a multiple of 16
    wide = random(5, 144, dtype=torch.float32)
    qkv = random(5, 3, 2, 72, dtype=torch.float32)
    expected = qkv.clone()
    launchers.rotate_(expected, place, table)

    launchers.rotate_(qkv, place, slab_table)
    strided = launchers.add_layer_norm(
        wide[:, ::2], wide[:, 1::2], None, norm.weight, norm.bias, norm.eps
    )

    assert torch.equal(qkv, expected)
    twin = kernels.plain_add_layer_norm(wide[:, ::2], wide[:, 1::2], norm)
    torch.testing.assert_close(strided, twin, **near(torch.float32))


def test_a_rotation_that_could_not_be_in_place_is_refused(launchers: ModuleType) -> None:
    qkv = random(5, 6, 2, 72, dtype=torch.float32)[:, ::2]

    with pytest.raises(AssertionError, match="in place"):
        launchers.rotate_(qkv, *turns(5, 72))


def test_the_cpu_gets_the_twins() -> None:
    assert not kernels.fused(torch.empty(1))


def tower_and_layout(family: str, pooling: str) -> tuple[nn.Module, PackedLayout]:
    """A small tower with no weight at zero or one, and three images for it."""
    shapes = {
        "qwen3_vl": Qwen3VLVisionConfig(
            depth=3, hidden_size=144, intermediate_size=100, num_heads=2, out_hidden_size=48,
            num_position_embeddings=36, deepstack_visual_indexes=[0, 2],
        ),
        "dinov2": Dinov2Config(
            hidden_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=70,
            patch_size=14, mlp_ratio=2,
        ),
    }  # fmt: skip
    name = {"qwen3_vl": "qwen3-vl-2b", "dinov2": "dinov2-demo"}[family]
    whole = {"num_layers": None, "final_norm": True, "pooling": pooling}
    settings = EncoderConfig.load(name).model_copy(update=whole)
    tower = FAMILIES[family].from_checkpoint(shapes[family].to_dict(), settings, sdpa)
    assert isinstance(tower, nn.Module)
    for seed, parameter in enumerate(tower.parameters()):
        parameter.data = 0.1 * random(*parameter.shape, dtype=torch.float32, seed=seed)
    grids = [(1, 4, 6), (1, 2, 2), (1, 6, 2)]
    return tower.eval(), PackedLayout.of(grids, int(family == "dinov2"))


@pytest.mark.parametrize("output", ["pooled", "patch"])
@pytest.mark.parametrize(
    ("family", "pooling"), [("qwen3_vl", "mean"), ("dinov2", "mean"), ("dinov2", "cls")]
)
def test_a_tower_of_fused_kernels_is_the_tower_of_twins(
    launchers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    pooling: str,
    output: str,
) -> None:
    tower, layout = tower_and_layout(family, pooling)
    patches = random(40, 3 * tower.frames * tower.patch_size**2, dtype=torch.float32)
    boundaries = [torch.tensor(layout.cu_seqlens, dtype=torch.int32), layout.max_seqlen]
    with torch.inference_mode():
        expected = tower(patches, tower.inputs(layout), boundaries, output)
        monkeypatch.setattr(kernels, "fused", lambda x: True)

        rows = tower(patches, tower.inputs(layout), boundaries, output)

    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(rows, expected), "the same bits: were the kernels called at all?"
