"""Random checkpoints of released shapes, for machines that cannot fetch the real ones.

What a forward costs does not depend on the values, as long as they stay finite.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from encoders.config import EncoderConfig
from encoders.errors import ConfigError

QWEN3_VL = {
    "model_type": "qwen3_vl",
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
"""Of Qwen3-VL-8B and -32B, which differ in `out_hidden_size` alone."""
DINOV2_S14 = {
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "image_size": 518,
    "patch_size": 14,
}
WHOLE = {"num_layers": None, "final_norm": True}
"""The demo cuts its DINOv2; a random one is whole."""


def shape(config: EncoderConfig) -> dict[str, Any]:
    """`config.json` of the released checkpoint that an encoder's configuration is of."""
    if config.family == "dinov2" and config.dimensions == DINOV2_S14["hidden_size"]:
        return DINOV2_S14
    if config.name in ("qwen3-vl-8b", "qwen3-vl-32b"):
        return QWEN3_VL | {"out_hidden_size": config.dimensions}
    raise ConfigError(f"--random-weights: the shape of {config.name} is not known here")


def write_random(encoder: str, folder: Path, device: str) -> Path:
    """A random checkpoint for an encoder's configuration, and the YAML that points to it."""
    import torch
    from safetensors.torch import save_file

    from encoders.attention import sdpa
    from encoders.encoder import DTYPES
    from encoders.towers.load import FAMILIES

    config = EncoderConfig.load(encoder)
    dtype = "bfloat16" if device == "cuda" else config.dtype
    settings = config.model_dump(mode="json", exclude_none=True) | {
        "weights": {"source": "local", "path": str(folder)},
        "dtype": dtype,
    }
    if config.family == "dinov2":
        settings = {k: v for k, v in settings.items() if k not in WHOLE}
    config_json = shape(config)
    torch.manual_seed(0)
    with torch.device(device):
        tower = FAMILIES[config.family].from_checkpoint(
            config_json, EncoderConfig.model_validate(settings), sdpa
        )
    assert isinstance(tower, torch.nn.Module)
    tensors = {k: (x + 0.02 * torch.randn_like(x)) for k, x in tower.state_dict().items()}
    if "class_token" in tensors:  # released with an axis more
        tensors["class_token"] = tensors["class_token"].unsqueeze(0)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {k: x.to("cpu", DTYPES[dtype]).contiguous() for k, x in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json))
    path = folder / f"{config.name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path
