"""Tower, preprocessing and device together: a packed batch in, one result per image out."""

import logging
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from encoders.attention import AttentionLayout, Backend
from encoders.config import EncoderConfig
from encoders.packing import PackedBatch, PackedLayout
from encoders.preprocess import Preprocessor
from encoders.towers import Output, Tower
from encoders.towers.load import load_tower

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
OutputDtype = Literal["float32", "float16", "bfloat16"]


class Encoder:
    """One tower on one device. Not thread-safe: one engine thread calls it."""

    def __init__(
        self, config: EncoderConfig, tower: Tower, backend: Backend, device: torch.device
    ) -> None:
        self.config = config
        self.backend = backend
        self.device = device
        self._dtype = DTYPES[config.dtype]
        self._pinned = device.type == "cuda"
        self._tower = tower
        self._preprocess = Preprocessor(
            config.image_mean,
            config.image_std,
            device,
            patch_size=tower.patch_size,
            merge_size=tower.merge_size,
            frames=tower.frames,
        )

    @classmethod
    def load(cls, config: EncoderConfig, device: str = "cpu") -> "Encoder":
        """Fetch, check and load the configured weights. Raises `ConfigError`."""
        where = torch.device(device)
        tower, backend = load_tower(config, where, DTYPES[config.dtype])
        chosen = f"{backend.name} ({backend.reason})"
        logger.info("%s on %s in %s, attention %s", config.name, device, config.dtype, chosen)
        return cls(config, tower, backend, where)

    @torch.inference_mode()
    def encode(
        self, batch: PackedBatch, output: Output = "pooled", dtype: OutputDtype = "float32"
    ) -> list[Tensor]:
        """One host tensor per image, in order of arrival, in memory that belongs to the caller.

        `pooled` is [dimensions], of unit length if so configured; `patch` is [rows, width].
        """
        rows = self.forward(batch, output)
        if output == "pooled" and self.config.normalize:
            rows = F.normalize(rows, dim=-1)  # fp32: pooling widened them
        packed = rows.to(DTYPES[dtype]).cpu()  # the batch's one wait for the device
        if output == "pooled":
            results = list(packed)
        else:
            results = list(torch.split(packed, list(self._tower.row_counts(batch.layout))))
        arrived = sorted(zip(batch.layout.order, results, strict=True), key=lambda pair: pair[0])
        return [result for _, result in arrived]

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, output: Output) -> Tensor:
        """The tower's rows on the device, in packed order. Waits for nothing."""
        host_inputs = self._tower.inputs(batch.layout)
        inputs = host_inputs._make(self._upload(tensor) for tensor in host_inputs)
        layout = self._attention_layout(batch.layout)
        return self._tower(self._patches(batch), inputs, layout, output)

    def _patches(self, batch: PackedBatch) -> Tensor:
        # Ray hands over read-only, pageable memory; this copy is torch's own, and pinned.
        pixels = torch.empty(batch.pixels.size, dtype=torch.uint8, pin_memory=self._pinned)
        pixels.numpy()[:] = batch.pixels
        side = self.config.patch_size
        targets = [(rows * side, columns * side) for _, rows, columns in batch.layout.grid_thw]
        return self._preprocess(pixels.to(self.device, non_blocking=True), batch.sizes, targets).to(
            self._dtype
        )

    def _attention_layout(self, layout: PackedLayout) -> AttentionLayout:
        cu_seqlens = torch.tensor(layout.cu_seqlens, dtype=torch.int32)
        if self.backend.boundaries == "device":
            cu_seqlens = self._upload(cu_seqlens)
        return [cu_seqlens, layout.max_seqlen]

    def _upload(self, tensor: Tensor) -> Tensor:
        # From pageable memory the copy would wait for the device.
        tensor = tensor.pin_memory() if self._pinned else tensor
        return tensor.to(self.device, non_blocking=True)
