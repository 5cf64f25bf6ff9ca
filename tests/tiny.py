"""A tower so small that a CPU core encodes hundreds of images a second: for tests of serving."""

import json
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from encoders import EncoderConfig
from encoders.attention import sdpa
from encoders.towers.dinov2 import Dinov2
from encoders.towers.qwen3_vl import Qwen3VL

CHECKPOINT = {
    "model_type": "dinov2",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mlp_ratio": 2,
    "image_size": 56,
    "patch_size": 14,
}


def write_tiny_encoder(folder: Path, *, shortest_edge: int = 28, max_pixels: int = 70 * 70) -> Path:
    """Random weights under released names, and the YAML of an encoder over them."""
    torch.manual_seed(0)
    settings = {
        "name": "tiny",
        "family": "dinov2",
        "weights": {"source": "local", "path": str(folder)},
        "patch_size": 14,
        "dimensions": 32,
        "pooling": "mean",
        "resize": {
            "rule": "shortest_edge",
            "shortest_edge": shortest_edge,
            "max_pixels": max_pixels,
        },
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    tower = Dinov2.from_checkpoint(CHECKPOINT, EncoderConfig.model_validate(settings), sdpa)
    save_file(released_names(tower), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CHECKPOINT))
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def released_names(tower: Dinov2) -> dict[str, torch.Tensor]:
    """The inverse of `Dinov2.convert`, for a tower of one block."""
    ours = {name: tensor.detach().clone() for name, tensor in tower.named_parameters()}
    theirs = {
        "embeddings.cls_token": ours.pop("class_token").unsqueeze(0),
        "embeddings.position_embeddings": torch.cat(
            [ours.pop("class_position"), ours.pop("positions.weight")]
        ).unsqueeze(0),
        "embeddings.patch_embeddings.projection.weight": ours.pop("patch_embed.weight").reshape(
            -1, 3, 14, 14
        ),
        "embeddings.patch_embeddings.projection.bias": ours.pop("patch_embed.bias"),
    }
    for kind in ("weight", "bias"):
        parts = ours.pop(f"blocks.0.attention.qkv.{kind}").chunk(3)
        for part, tensor in zip(("query", "key", "value"), parts, strict=True):
            theirs[f"encoder.layer.0.attention.attention.{part}.{kind}"] = tensor.clone()
        theirs[f"layernorm.{kind}"] = ours.pop(f"norm.{kind}")
    for name, tensor in ours.items():
        name = name.replace("blocks.0.", "encoder.layer.0.")
        name = name.replace("attention.proj", "attention.output.dense")
        name = name.replace("scale1", "layer_scale1.lambda1")
        theirs[name.replace("scale2", "layer_scale2.lambda1")] = tensor
    return theirs


QWEN3_VL = {
    "model_type": "qwen3_vl",
    "hidden_act": "gelu_pytorch_tanh",
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 8,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}
QWEN3_VL_COLUMNS = 8 * (1 + 2)
"""Of a patch row: the merger's, then two deepstack features."""


def write_tiny_qwen3_vl(folder: Path, *, max_pixels: int = 256 * 256) -> Path:
    """The same for a tower with deepstack, whose patch rows SGLang's language models take."""
    torch.manual_seed(0)
    settings = {
        "name": "tiny-qwen3-vl",
        "family": "qwen3_vl",
        "weights": {"source": "local", "path": str(folder)},
        "patch_size": 16,
        "merge_size": 2,
        "dimensions": 8,
        "pooling": "mean",
        "resize": {"rule": "smart_resize", "min_pixels": 32 * 32, "max_pixels": max_pixels},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    tower = Qwen3VL.from_checkpoint(QWEN3_VL, EncoderConfig.model_validate(settings), sdpa)
    # Our own names are accepted too. No weight stays zero, where a lost one would not show.
    weights = {name: 0.2 * torch.randn_like(x) + x for name, x in tower.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(QWEN3_VL))
    path = folder / "tiny-qwen3-vl.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path
