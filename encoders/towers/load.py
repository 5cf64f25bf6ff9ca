"""From settings to a tower with its checkpoint's weights. The only file that knows every family."""

import torch
from torch import nn

from encoders.backends import choose_backend
from encoders.config import EncoderConfig
from encoders.forward import Forward
from encoders.towers import Tower
from encoders.towers.dinov2 import Dinov2
from encoders.towers.qwen3_vl import Qwen3VL
from encoders.weights import load_into, read_model_config, read_tensors, resolve

FAMILIES: dict[str, type[Tower]] = {"dinov2": Dinov2, "qwen3_vl": Qwen3VL}


def load_forward(settings: EncoderConfig, device: torch.device, dtype: torch.dtype) -> Forward:
    """Fetch, check and load the configured checkpoint. Raises `ConfigError`."""
    folder = resolve(settings.weights)
    config_json = read_model_config(folder)
    family = FAMILIES[settings.family]
    head_size = family.head_size(config_json)
    backend = choose_backend(settings.attention, device, dtype, head_size)
    with torch.device("meta"):  # without memory: random values would only be overwritten
        tower = family.from_checkpoint(config_json, settings, backend.attention)
    settings.agree_with(
        patch_size=tower.patch_size, merge_size=tower.merge_size, dimensions=tower.dimensions
    )
    assert isinstance(tower, nn.Module)
    tower.eval().to(dtype).to_empty(device=device)
    load_into(tower, tower.convert(read_tensors(folder, tower.wanted)))
    return Forward(tower, backend, device, dtype)
