"""The DINOv2 tower against `transformers.Dinov2Model` on the same weights, fp32 on the CPU."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Dinov2Config, Dinov2Model

from encoders import EncoderConfig
from encoders.config import LocalWeights
from encoders.encoder import Encoder
from encoders.errors import ConfigError, WeightsError
from encoders.packing import PackedBatch, Pixels
from encoders.towers import dinov2
from encoders.towers.taps import bicubic_taps, grid_taps
from encoders.weights import resolve

TOLERANCE = {"atol": 2e-5, "rtol": 0.0}
BATCHES = [
    [(16, 16)],
    [(37, 37)],
    [(1, 1)],
    [(16, 24), (16, 24)],
    [(3, 40), (16, 16), (37, 37), (1, 7)],
    [(16, 16), (1, 7), (3, 40), (37, 37)],
]


def image(rows: int, columns: int, seed: int = 0) -> Pixels:
    """A smooth random picture of exactly this many patches, so that nothing is resized."""
    coarse = torch.from_numpy(np.random.default_rng(seed).random((1, 3, 4, 4), np.float32))
    size = (rows * 14, columns * 14)
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic")
    return (smooth[0].permute(1, 2, 0) * 255).clamp(0, 255).byte().numpy()


def batch_of(grids: list[tuple[int, int]]) -> PackedBatch:
    """Images of these grids, each with its own picture."""
    images = [image(rows, columns, seed) for seed, (rows, columns) in enumerate(grids)]
    return PackedBatch.of(images, [(1, rows, columns) for rows, columns in grids], num_prefix=1)


def theirs(model: Dinov2Model, config: EncoderConfig, pixels: Pixels) -> torch.Tensor:
    """One image through transformers: hidden rows [S, D] where our tower stops."""
    unit = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(x).reshape(3, 1, 1) for x in (config.image_mean, config.image_std))
    with torch.inference_mode():
        out = model(((unit - mean) / std).unsqueeze(0), output_hidden_states=True)
    return (
        out.last_hidden_state[0] if config.final_norm else out.hidden_states[config.num_layers][0]
    )


@pytest.fixture(scope="module")
def reference(demo_config: EncoderConfig) -> Dinov2Model:
    return Dinov2Model.from_pretrained(resolve(demo_config.weights)).eval()


@pytest.mark.parametrize("grids", BATCHES, ids=str)
def test_pooled_rows_equal_those_of_transformers(
    demo_config: EncoderConfig, reference: Dinov2Model, grids: list[tuple[int, int]]
) -> None:
    encoder = Encoder.load(demo_config.model_copy(update={"normalize": False}))
    expected = [
        theirs(reference, demo_config, image(rows, columns, seed))[1:].mean(0)
        for seed, (rows, columns) in enumerate(grids)
    ]

    rows = encoder.encode(batch_of(grids))

    torch.testing.assert_close(torch.stack(rows), torch.stack(expected), **TOLERANCE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderConfig, Dinov2Model]:
    """A random two-block checkpoint as transformers saves it, mask token and all."""
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=70,
        patch_size=14,
        layerscale_value=0.7,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny-dinov2")
    Dinov2Model(config).save_pretrained(folder)
    settings = EncoderConfig(
        name="tiny",
        family="dinov2",
        weights=LocalWeights(source="local", path=folder),
        patch_size=14,
        dimensions=64,
        pooling="cls",
        normalize=False,
        resize={"rule": "shortest_edge", "shortest_edge": 70, "max_pixels": 70 * 700},
        image_mean=(0.5, 0.4, 0.3),
        image_std=(0.2, 0.3, 0.4),
    )
    return settings, Dinov2Model.from_pretrained(folder).eval()


@pytest.mark.parametrize("grids", BATCHES, ids=str)
def test_every_row_of_a_whole_checkpoint_equals_transformers(
    tiny: tuple[EncoderConfig, Dinov2Model], grids: list[tuple[int, int]]
) -> None:
    config, model = tiny
    encoder, batch = Encoder.load(config), batch_of(grids)
    expected = [
        theirs(model, config, image(rows, columns, seed))
        for seed, (rows, columns) in enumerate(grids)
    ]

    patch_rows = encoder.encode(batch, "patch")
    class_rows = encoder.encode(batch, "pooled")

    for rows, class_row, whole in zip(patch_rows, class_rows, expected, strict=True):
        torch.testing.assert_close(rows, whole[1:], **TOLERANCE)
        torch.testing.assert_close(class_row, whole[0], **TOLERANCE)


def test_an_image_keeps_its_embedding_in_any_company_and_order(demo_encoder: Encoder) -> None:
    grids = [(16, 16), (30, 9), (16, 24), (5, 5), (37, 37)]
    images = [image(rows, columns, seed) for seed, (rows, columns) in enumerate(grids)]
    packed_grids = [(1, rows, columns) for rows, columns in grids]
    alone = [
        demo_encoder.encode(PackedBatch.of([pixels], [grid], 1))[0]
        for pixels, grid in zip(images, packed_grids, strict=True)
    ]

    for shift in range(len(grids)):
        order = [(i + shift) % len(grids) for i in range(len(grids))]
        rows = demo_encoder.encode(
            PackedBatch.of([images[i] for i in order], [packed_grids[i] for i in order], 1)
        )
        for row, i in zip(rows, order, strict=True):
            np.testing.assert_allclose(row, alone[i], atol=2e-5, rtol=0)


def test_an_embedding_has_unit_length(demo_encoder: Encoder) -> None:
    rows = demo_encoder.encode(batch_of([(16, 16), (3, 40)]))

    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("patch_size", 16, "is 16"), ("dimensions", 128, "is 128"), ("num_layers", 3, "is 3")],
)
def test_settings_that_contradict_the_checkpoint_are_refused(
    tiny: tuple[EncoderConfig, Dinov2Model], field: str, value: int, said: str
) -> None:
    config = tiny[0].model_copy(update={field: value})

    with pytest.raises(ConfigError, match=f"{field} {said}, the checkpoint"):
        Encoder.load(config)


def test_frames_to_fold_are_refused(tiny: tuple[EncoderConfig, Dinov2Model]) -> None:
    with pytest.raises(ConfigError, match="no frames to fold"):
        Encoder.load(tiny[0].model_copy(update={"fold_frames": True}))


def test_the_last_block_computes_class_rows_alone_where_they_are_pooled(
    tiny: tuple[EncoderConfig, Dinov2Model],
) -> None:
    encoder, heights = Encoder.load(tiny[0]), []
    for block in encoder._tower.blocks:
        block.mlp.register_forward_hook(lambda *call: heights.append(len(call[2])))

    encoder.encode(batch_of([(3, 4), (2, 2)]), "pooled")
    encoder.encode(batch_of([(3, 4), (2, 2)]), "patch")

    assert heights == [18, 2, 18, 18]


def test_a_truncated_tower_drops_what_it_cut_off_and_nothing_else(
    tiny: tuple[EncoderConfig, Dinov2Model],
) -> None:
    config, model = tiny
    cut = config.model_copy(update={"num_layers": 1, "final_norm": False})
    batch = batch_of([(5, 5)])

    (rows,) = Encoder.load(cut).encode(batch, "patch")

    torch.testing.assert_close(rows, theirs(model, cut, image(5, 5))[1:], **TOLERANCE)


@pytest.mark.parametrize("lost", ["query.weight", "layer_scale2.lambda1", "position_embeddings"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(
    tiny: tuple[EncoderConfig, Dinov2Model], tmp_path: Path, lost: str
) -> None:
    config, _ = tiny
    folder = config.weights.path
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(lost))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    weights = LocalWeights(source="local", path=tmp_path)

    with pytest.raises(WeightsError, match="missing"):
        Encoder.load(config.model_copy(update={"weights": weights}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_swiglu_ffn", True), ("hidden_act", "relu"), ("hidden_size", None)],
)
def test_a_checkpoint_of_another_kind_is_refused(key: str, value: object) -> None:
    found = Dinov2Config(hidden_size=64).to_dict() | {key: value}

    with pytest.raises(ConfigError, match=key):
        dinov2.Dinov2Config.read(found)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 37, 90])
def test_bicubic_taps_interpolate_as_torch_does(size: int) -> None:
    table = torch.randn(1, 1, 37, 37, generator=torch.Generator().manual_seed(size))
    expected = torch.nn.functional.interpolate(table, size=(size, 2 * size), mode="bicubic")

    index, weight = grid_taps(size, 2 * size, 37, bicubic_taps)

    ours = (table.flatten()[torch.from_numpy(index).long()] * torch.from_numpy(weight)).sum(1)
    torch.testing.assert_close(ours.reshape(size, 2 * size), expected[0, 0], atol=1e-5, rtol=0)
