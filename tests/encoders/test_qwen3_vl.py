"""The Qwen3-VL tower against transformers' on the same random weights, fp32 on the CPU."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    Qwen3_5VisionModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLVisionModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from encoders.attention import sdpa
from encoders.config import EncoderConfig
from encoders.errors import ConfigError, WeightsError
from encoders.packing import GridTHW, PackedBatch, PackedLayout, Pixels
from encoders.preprocess import Preprocessor
from encoders.towers import Output
from encoders.towers.qwen3_vl import Qwen3VL
from encoders.towers.qwen3_vl_tables import turns
from encoders.weights import INDEX_FILE, load_into, read_model_config, read_tensors

TOLERANCE = {"atol": 2e-5, "rtol": 0.0}
PATCH, MERGE, SIDE, WIDTH = 4, 2, 6, 48
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": SIDE**2,
    "initializer_range": 0.1,
}
# What released checkpoints say besides, and transformers takes for granted.
CHECKPOINT = {
    "model_type": "qwen3_vl",
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [0, 2],
}
TEXT = {
    "vocab_size": 99,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
}
NINE = [(2, 2), (8, 6), (2, 20), (6, 6), (14, 10), (8, 6), (4, 2), (30, 2), (12, 12)]
BATCHES = [
    [(6, 6)],
    [(2, 2)],
    [(16, 10)],
    [(4, 8), (4, 8)],
    [(2, 2), (12, 8)],
    NINE,
    NINE[::-1],
    NINE[4:] + NINE[:4],
]


class Pair(NamedTuple):
    """The same weights twice."""

    tower: Qwen3VL
    model: nn.Module


def settings(**changes: Any) -> EncoderConfig:
    """Settings that fit every checkpoint here."""
    return EncoderConfig.model_validate(
        {
            "name": "tiny",
            "family": "qwen3_vl",
            "weights": {"source": "local", "path": "unused"},
            "patch_size": PATCH,
            "merge_size": MERGE,
            "dimensions": WIDTH,
            "pooling": "mean",
            "resize": {"rule": "smart_resize", "min_pixels": 64, "max_pixels": 64 * 64},
            "image_mean": MEAN,
            "image_std": STD,
        }
        | changes
    )


def random_weights(model: nn.Module) -> nn.Module:
    """The model with no weight left at zero or one, where a lost one would not show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def load(folder: Path, **changes: Any) -> Qwen3VL:
    """Our tower with a folder's weights."""
    tower = Qwen3VL.from_checkpoint(read_model_config(folder), settings(**changes), sdpa)
    load_into(tower, tower.convert(read_tensors(folder, tower.wanted)))
    return tower.eval()


@pytest.fixture(scope="module", params=["deepstack", "no deepstack", "Qwen3.5"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tower as transformers saves it alone, and ours read from that folder."""
    taps = [0, 2] if request.param == "deepstack" else []
    kind = Qwen3_5VisionModel if request.param == "Qwen3.5" else Qwen3VLVisionModel
    extra = {} if request.param == "Qwen3.5" else {"deepstack_visual_indexes": taps}
    model = random_weights(kind(kind.config_class(**VISION, **extra)))
    folder = tmp_path_factory.mktemp("tower")
    model.save_pretrained(folder)
    return Pair(load(folder), model)


@pytest.fixture(scope="module")
def whole_model() -> nn.Module:
    """A tower with deepstack in front of a language model."""
    vision = VISION | {"deepstack_visual_indexes": [0, 2]}
    config = Qwen3VLConfig(vision_config=vision, text_config=TEXT)
    return random_weights(Qwen3VLForConditionalGeneration(config))


@pytest.fixture(scope="module")
def sharded(whole_model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the whole model in many shards."""
    folder = tmp_path_factory.mktemp("sharded")
    whole_model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def image(rows: int, columns: int, seed: int) -> Pixels:
    """Random pixels of exactly this many patches, so that nothing is resized."""
    size = (rows * PATCH, columns * PATCH, 3)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def images_of(sides: list[tuple[int, int]]) -> list[Pixels]:
    """One image per pair of rows and columns, each with its own pixels."""
    return [image(rows, columns, seed) for seed, (rows, columns) in enumerate(sides)]


def grids_of(images: list[Pixels]) -> list[GridTHW]:
    """Frames, rows and columns of images that need no resize."""
    return [(1, pixels.shape[0] // PATCH, pixels.shape[1] // PATCH) for pixels in images]


def our_patches(batch: PackedBatch, frames: int = 2) -> Tensor:
    """Patches of a batch through the project's own preprocessing."""
    preprocess = Preprocessor(
        MEAN,
        STD,
        torch.device("cpu"),
        torch.float32,
        patch_size=PATCH,
        merge_size=MERGE,
        frames=frames,
    )
    return preprocess(torch.from_numpy(batch.pixels), batch.sizes, batch.sizes)


def ours(tower: Qwen3VL, images: list[Pixels], output: Output) -> list[Tensor]:
    """Rows of each image, in order of arrival."""
    batch = PackedBatch.of(images, grids_of(images), num_prefix=0)
    layout = batch.layout
    attention_layout = [torch.tensor(layout.cu_seqlens, dtype=torch.int32), layout.max_seqlen]
    patches = our_patches(batch, tower.frames).to(tower.positions.weight.dtype)
    with torch.inference_mode():
        rows = tower(patches, tower.inputs(layout), attention_layout, output)
    counts = [1] * len(images) if output == "pooled" else list(tower.row_counts(layout))
    packed = dict(zip(layout.order, rows.split(counts), strict=True))
    return [packed[arrival] for arrival in range(len(images))]


def their_patches(images: list[Pixels]) -> tuple[Tensor, Tensor]:
    """Patches and grids through transformers' preprocessing, in order of arrival."""
    process = Qwen2VLImageProcessorPil(
        image_mean=MEAN, image_std=STD, patch_size=PATCH, merge_size=MERGE, do_resize=False
    )
    found = process(images, input_data_format="channels_last", return_tensors="pt")
    return found["pixel_values"], found["image_grid_thw"]


def theirs(model: nn.Module, images: list[Pixels]) -> list[Tensor]:
    """Rows of each image, merger and deepstack features side by side, in order of arrival."""
    patches, grids = their_patches(images)
    with torch.inference_mode():
        out = model(patches, grid_thw=grids)
    features = getattr(out, "deepstack_features", None) or []
    rows = torch.cat([out.pooler_output, *features], dim=-1)
    return list(rows.split((grids.prod(-1) // MERGE**2).tolist()))


@pytest.mark.parametrize("sides", BATCHES, ids=str)
def test_patch_rows_equal_merger_and_deepstack_of_transformers(
    pair: Pair, sides: list[tuple[int, int]]
) -> None:
    expected = theirs(pair.model, images_of(sides))

    rows = ours(pair.tower, images_of(sides), "patch")

    assert [tuple(image_rows.shape) for image_rows in rows] == [
        (height * width // MERGE**2, WIDTH * (1 + len(pair.tower.deepstack)))
        for height, width in sides
    ]
    for image_rows, image_expected in zip(rows, expected, strict=True):
        torch.testing.assert_close(image_rows, image_expected, **TOLERANCE)


@pytest.mark.parametrize("sides", BATCHES, ids=str)
def test_a_pooled_row_is_the_mean_of_the_merger_rows_of_transformers(
    pair: Pair, sides: list[tuple[int, int]]
) -> None:
    expected = [rows[:, :WIDTH].mean(0) for rows in theirs(pair.model, images_of(sides))]

    rows = ours(pair.tower, images_of(sides), "pooled")

    torch.testing.assert_close(torch.cat(rows), torch.stack(expected), **TOLERANCE)


def test_the_random_tower_tells_images_and_places_apart(pair: Pair) -> None:
    # Else the tests above would pass whatever the order of patches or images.
    (rows,) = ours(pair.tower, [image(8, 8, seed=0)], "patch")
    other, turned = ours(
        pair.tower, [image(8, 8, seed=1), image(8, 8, seed=0).swapaxes(0, 1).copy()], "patch"
    )

    assert (rows - other).abs().mean() > 0.05
    assert (rows - turned).abs().mean() > 0.05
    assert (rows - rows.roll(1, 0)).abs().mean() > 0.05


@pytest.mark.parametrize("output", ["patch", "pooled"])
def test_an_image_keeps_its_rows_in_any_company_and_order(pair: Pair, output: Output) -> None:
    images = images_of(NINE)
    alone = [ours(pair.tower, [pixels], output)[0] for pixels in images]

    for shift in range(0, len(images), 2):
        rows = ours(pair.tower, images[shift:] + images[:shift], output)
        for image_rows, expected in zip(rows, alone[shift:] + alone[:shift], strict=True):
            torch.testing.assert_close(image_rows, expected, **TOLERANCE)


def test_deepstack_mergers_run_for_patch_rows_alone(sharded: Path) -> None:
    tower, ran = load(sharded), []
    for merger in tower.deepstack:
        merger.register_forward_hook(lambda *_: ran.append(1))

    ours(tower, [image(4, 4, 0)], "pooled")
    for_pooled = len(ran)
    ours(tower, [image(4, 4, 0)], "patch")

    assert (for_pooled, len(ran)) == (0, 2)


def test_a_bfloat16_tower_stays_as_close_as_transformers_does(sharded: Path) -> None:
    images = images_of(NINE)
    model = Qwen3VLForConditionalGeneration.from_pretrained(sharded).eval().model.visual
    exact = torch.cat(theirs(model, images))
    their_error = (torch.cat(theirs(model.bfloat16(), images)) - exact).abs().mean()

    rows = torch.cat(ours(load(sharded).bfloat16(), images, "patch"))
    pooled = ours(load(sharded).bfloat16(), images, "pooled")

    assert rows.dtype == torch.bfloat16
    assert (rows - exact).abs().mean() < 1.1 * their_error
    assert {row.dtype for row in pooled} == {torch.float32}


def test_folded_frames_give_the_rows_of_repeated_ones(sharded: Path) -> None:
    folded = load(sharded, fold_frames=True)
    expected = ours(load(sharded), images_of(NINE), "patch")

    rows = ours(folded, images_of(NINE), "patch")

    assert folded.patch_embed.in_features == 3 * PATCH**2
    torch.testing.assert_close(torch.cat(rows), torch.cat(expected), **TOLERANCE)


def test_folded_weights_are_summed_in_fp32_and_rounded_once(sharded: Path) -> None:
    with torch.device("meta"):
        empty = Qwen3VL.from_checkpoint(
            read_model_config(sharded), settings(fold_frames=True), sdpa
        )
    name = "model.visual.patch_embed.proj.weight"
    weight = read_tensors(sharded, name.__eq__)[name].bfloat16()

    folded = empty.convert({name: weight})["patch_embed.weight"]

    assert torch.equal(folded, (weight[:, :, 0].float() + weight[:, :, 1].float()).flatten(1))


@pytest.mark.parametrize("output", ["patch", "pooled"])
def test_a_forward_reads_no_value_and_makes_no_tensor_on_the_host(
    sharded: Path, output: Output
) -> None:
    # On the meta device there are no values to read, and another device's tensor is refused.
    tower, layout = load(sharded).to("meta"), PackedLayout.of([(1, 4, 6), (1, 8, 8)], 0)
    inputs = tower.inputs(layout)
    meta = inputs._make(tensor.to("meta") for tensor in inputs)
    patches = torch.empty(layout.num_rows, 3 * 2 * PATCH**2, device="meta")
    cu_seqlens = torch.tensor(layout.cu_seqlens, dtype=torch.int32)  # sdpa's own, on the host

    rows = tower(patches, meta, [cu_seqlens, layout.max_seqlen], output)

    assert rows.is_meta
    assert len(rows) == (2 if output == "pooled" else sum(tower.row_counts(layout)))


@pytest.mark.parametrize("sides", [*BATCHES, [(2, 400)]], ids=str)
def test_inputs_are_those_of_transformers(pair: Pair, sides: list[tuple[int, int]]) -> None:
    layout = PackedLayout.of([(1, *grid) for grid in sides], 0)
    grids = torch.tensor(layout.grid_thw)
    cells, weights = get_vision_interpolation_indices_and_weights(
        grids, SIDE, align_corners=True, spatial_merge_size=MERGE
    )
    cos, sin = pair.model.rotary_pos_emb(weights, get_vision_position_ids(grids, MERGE))

    inputs = pair.tower.inputs(layout)

    assert torch.equal(inputs.cell_P4.long(), cells)
    assert torch.equal(inputs.weight_P4, weights)
    size = cos.shape[1]
    table = turns(
        int(inputs.place_P2.max()) + 1,
        head_size=size,
        theta=pair.tower.config.rope_parameters.rope_theta,
    )
    half_turns = torch.from_numpy(table)[inputs.place_P2].transpose(1, 2).flatten(2)  # [P, 2, K/2]
    for ours, theirs in zip(half_turns.unbind(1), (cos, sin), strict=True):
        torch.testing.assert_close(ours.repeat(1, 2), theirs, atol=5e-6, rtol=0)


def test_inputs_lie_on_the_host_as_fp32_or_integers(pair: Pair) -> None:
    inputs = pair.tower.bfloat16().inputs(PackedLayout.of([(1, 4, 6), (1, 8, 8)], 0))
    pair.tower.float()

    dtypes = {name: tensor.dtype for name, tensor in inputs._asdict().items()}
    assert dtypes == {
        "cell_P4": torch.int32,
        "weight_P4": torch.float32,
        "place_P2": torch.int32,
        "bounds_N": torch.int64,
    }
    assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in inputs)


def test_patches_and_grids_equal_those_of_transformers() -> None:
    images = images_of([(8, 6), (2, 10), (4, 4)])  # longest first, as they are packed
    patches, grids = their_patches(images)

    batch = PackedBatch.of(images, grids_of(images), num_prefix=0)

    torch.testing.assert_close(our_patches(batch), patches, atol=1e-6, rtol=0)
    assert batch.layout.grid_thw == tuple(map(tuple, grids.tolist()))


def test_a_whole_model_in_shards_gives_its_tower(whole_model: nn.Module, sharded: Path) -> None:
    expected = theirs(whole_model.model.visual, images_of(NINE))

    rows = ours(load(sharded), images_of(NINE), "patch")

    torch.testing.assert_close(torch.cat(rows), torch.cat(expected), **TOLERANCE)


def test_older_names_without_model_are_read(whole_model: nn.Module, tmp_path: Path) -> None:
    expected = theirs(whole_model.model.visual, images_of(NINE))
    assert isinstance(whole_model.model, Qwen3VLModel)
    whole_model.model.save_pretrained(tmp_path)  # `visual.*` beside `language_model.*`

    rows = ours(load(tmp_path), images_of(NINE), "patch")

    torch.testing.assert_close(torch.cat(rows), torch.cat(expected), **TOLERANCE)


def test_files_of_the_language_model_need_not_even_exist(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "copy")
    owned = {
        shard
        for name, shard in json.loads((folder / INDEX_FILE).read_text())["weight_map"].items()
        if name.startswith("model.visual.")
    }
    others = [path for path in folder.glob("*.safetensors") if path.name not in owned]
    for path in others:
        path.unlink()

    tensors = read_tensors(folder, load(folder).wanted)

    assert others
    assert all(name.startswith("model.visual.") for name in tensors)


def edited(source: Path, folder: Path, *, drop: str = "", add: str = "") -> Path:
    """A copy of a checkpoint of one file, without one tensor and with another."""
    tensors = load_file(source / "model.safetensors")
    if drop:
        del tensors[drop]
    if add:
        tensors[add] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(source / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def one_file(whole_model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the whole model in one file."""
    folder = tmp_path_factory.mktemp("one-file")
    whole_model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("theirs", "our"),
    [
        ("pos_embed.weight", "positions.weight"),
        ("patch_embed.proj.bias", "patch_embed.bias"),
        ("blocks.3.attn.qkv.bias", "blocks.3.attention.qkv.bias"),
        ("deepstack_merger_list.1.norm.weight", "deepstack.1.norm.weight"),
        ("merger.linear_fc2.weight", "merger.fc2.weight"),
    ],
)
def test_a_missing_tensor_is_named(one_file: Path, tmp_path: Path, theirs: str, our: str) -> None:
    folder = edited(one_file, tmp_path, drop=f"model.visual.{theirs}")

    with pytest.raises(WeightsError, match=rf"missing \(1\): {our}$"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.visual.head.weight", "model.visual.blocks.4.norm1.bias", "visual.odd"]
)
def test_an_unknown_tensor_of_the_tower_is_named_as_in_the_file(
    one_file: Path, tmp_path: Path, name: str
) -> None:
    folder = edited(one_file, tmp_path, add=name)

    with pytest.raises(WeightsError, match=rf"unused \(1\): {name}$"):
        load(folder)


def test_an_unknown_tensor_beside_a_tower_alone_is_named(pair: Pair, tmp_path: Path) -> None:
    source = tmp_path / "source"
    pair.model.save_pretrained(source)
    folder = edited(source, tmp_path, add="lm_head.weight")

    with pytest.raises(WeightsError, match=r"unused \(1\): lm_head.weight$"):
        load(folder)


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_vl_vision", "qwen3_5_vision"],
)
def test_the_types_of_released_and_of_saved_checkpoints_are_read(model_type: str) -> None:
    vision = VISION | CHECKPOINT | {"model_type": model_type}

    tower = Qwen3VL.from_checkpoint({"vision_config": vision}, settings(), sdpa)

    found = (tower.patch_size, tower.merge_size, tower.frames, tower.dimensions)
    assert found == (PATCH, MERGE, 2, WIDTH)
    assert Qwen3VL.head_size({"vision_config": vision}) == 16


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen2_5_vl"),
        ("model_type", "qwen3_vl_text"),
        ("hidden_act", "gelu"),
        ("hidden_size", None),
        ("patch_size", [4, 4]),
        ("num_heads", 32),
        ("num_position_embeddings", 35),
        ("deepstack_visual_indexes", [2, 0]),
        ("deepstack_visual_indexes", [1, 4]),
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_parameters", {"rope_type": "axial", "partial_rotary_factor": 0.5}),
        ("rope_parameters", {"rope_type": "axial", "rope_theta": 0}),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_kind_is_refused(key: str, value: object) -> None:
    vision = VISION | CHECKPOINT | {key: value}

    with pytest.raises(ConfigError, match=key):
        Qwen3VL.from_checkpoint({"vision_config": vision}, settings(), sdpa)


def test_a_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_type"):
        Qwen3VL.from_checkpoint({"model_type": "qwen3", "hidden_size": 64}, settings(), sdpa)


@pytest.mark.parametrize(
    ("key", "value"), [("pooling", "cls"), ("num_layers", 2), ("final_norm", False)]
)
def test_settings_that_would_cut_the_tower_are_refused(key: str, value: object) -> None:
    checkpoint = {"vision_config": VISION | CHECKPOINT}

    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        Qwen3VL.from_checkpoint(checkpoint, settings(**{key: value}), sdpa)


@pytest.mark.parametrize("rope", [None, {"rope_type": "axial", "rope_theta": 50.0}], ids=str)
def test_theta_is_the_checkpoints_or_ten_thousand(
    sharded: Path, tmp_path: Path, rope: dict[str, Any] | None
) -> None:
    folder = shutil.copytree(sharded, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]["rope_parameters"]  # released checkpoints have none
    if rope:
        config["vision_config"]["rope_parameters"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval().model.visual
    expected = theirs(model, images_of(NINE))

    rows = ours(load(folder), images_of(NINE), "patch")

    torch.testing.assert_close(torch.cat(rows), torch.cat(expected), **TOLERANCE)
