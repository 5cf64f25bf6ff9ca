"""Weights, tower and device together: a packed batch in, one embedding per image out."""

import logging
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from encoders.attention import AttentionLayout, sdpa
from encoders.config import EncoderConfig
from encoders.errors import ConfigError
from encoders.packing import PackedBatch, PackedLayout
from encoders.preprocess import Preprocessor
from encoders.towers import dinov2
from encoders.weights import load_into, read_model_config, read_tensors, resolve

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.float32]
"""float32 [images, dimensions]."""


class Encoder:
    """One tower on one device. Not thread-safe: one engine thread calls it."""

    def __init__(self, config: EncoderConfig, tower: dinov2.Dinov2, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._tower = tower.eval().to(device, self.dtype)
        self._preprocess = Preprocessor(
            config.patch_size, config.image_mean, config.image_std, device
        )

    @classmethod
    def load(cls, config: EncoderConfig, device: str = "cpu") -> "Encoder":
        """Fetch, check and load the configured weights. Raises `ConfigError`."""
        folder = resolve(config.weights)
        checkpoint = dinov2.Dinov2Config.read(read_model_config(folder))
        num_layers = check_against(config, checkpoint)
        tower = dinov2.Dinov2(checkpoint, sdpa, num_layers=num_layers, final_norm=config.final_norm)
        wanted = partial(dinov2.wanted, num_layers=num_layers, final_norm=config.final_norm)
        load_into(tower, dinov2.convert(read_tensors(folder, wanted)))
        logger.info("%s: %d blocks on %s, %s", config.name, num_layers, device, config.dtype)
        return cls(config, tower, torch.device(device))

    def encode(self, batch: PackedBatch) -> Rows:
        """One row per image, in order of arrival, in memory that belongs to the caller."""
        packed = self.pooled(batch).cpu().numpy()  # the batch's one wait for the device
        rows = np.empty_like(packed)
        rows[list(batch.layout.order)] = packed
        return rows

    @torch.inference_mode()
    def pooled(self, batch: PackedBatch) -> Tensor:
        """One fp32 row per image [N, D], in packed order, on the device."""
        inputs = self._inputs(batch.layout)
        rows_ND = self._tower.pool(self._hidden(batch, inputs), inputs, self.config.pooling)
        return F.normalize(rows_ND, dim=-1) if self.config.normalize else rows_ND

    @torch.inference_mode()
    def last_hidden_state(self, batch: PackedBatch) -> Tensor:
        """Every row of the batch [T, D], in packed order, on the device."""
        return self._hidden(batch, self._inputs(batch.layout))

    def _hidden(self, batch: PackedBatch, inputs: dinov2.Dinov2Inputs) -> Tensor:
        return self._tower(self._patches(batch), inputs, self._attention_layout(batch.layout))

    def _inputs(self, layout: PackedLayout) -> dinov2.Dinov2Inputs:
        return self._tower.inputs(layout).to(self.device)

    def _patches(self, batch: PackedBatch) -> Tensor:
        # Ray hands over read-only pages; torch wants memory that it may write to, hence a copy.
        pixels = torch.from_numpy(batch.pixels.copy()).to(self.device)
        side = self.config.patch_size
        targets = [(rows * side, columns * side) for _, rows, columns in batch.layout.grid_thw]
        return self._preprocess(pixels, batch.sizes, targets).to(self.dtype)

    def _attention_layout(self, layout: PackedLayout) -> AttentionLayout:
        # In host memory: `sdpa` reads the boundaries there.
        return [torch.tensor(layout.cu_seqlens, dtype=torch.int32), layout.max_seqlen]


def check_against(config: EncoderConfig, checkpoint: dinov2.Dinov2Config) -> int:
    """Number of blocks to load, once settings and checkpoint agree. Raises `ConfigError`."""
    for ours, theirs in (("patch_size", "patch_size"), ("dimensions", "hidden_size")):
        said, found = getattr(config, ours), getattr(checkpoint, theirs)
        if said != found:
            raise ConfigError(f"{config.name}: {ours} is {said}, the checkpoint's is {found}")
    num_layers = config.num_layers or checkpoint.num_hidden_layers
    if num_layers > checkpoint.num_hidden_layers:
        raise ConfigError(
            f"{config.name}: num_layers is {num_layers}, the checkpoint has "
            f"{checkpoint.num_hidden_layers}"
        )
    return num_layers
