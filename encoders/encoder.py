"""Tower, preprocessing and device together: a packed batch in, one result per image out."""

import logging
import os
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from encoders.config import EncoderConfig
from encoders.forward import Forward
from encoders.graph_profile import GraphProfile
from encoders.graph_runner import GraphRunner
from encoders.packing import Call, Output, PackedBatch
from encoders.preprocess import Preprocessor
from encoders.towers.load import load_forward

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
OutputDtype = Literal["float32", "float16", "bfloat16"]


class Encoder:
    """One tower on one device. Not thread-safe: one engine thread calls it."""

    def __init__(self, config: EncoderConfig, forward: Forward) -> None:
        """Captures what the graph profile names, or else what any traffic will need.

        Raises `ConfigError` if what is promised of bits cannot be kept.
        """
        self.config = config
        graphs = config.graphs.overridden(os.environ)
        self.graphs = GraphRunner.on(forward, graphs)
        self._profile = GraphProfile(graphs.profile, config, forward.tower.num_prefix)
        self.graphs.capture_now(self._profile.read() or self.graphs.usual_calls())
        self._dtype = DTYPES[config.dtype]
        self._device = forward.device
        self._tower = tower = forward.tower
        self._preprocess = Preprocessor(
            config.image_mean,
            config.image_std,
            forward.device,
            patch_size=tower.patch_size,
            merge_size=tower.merge_size,
            frames=tower.frames,
        )

    @classmethod
    def load(cls, config: EncoderConfig, device: str = "cpu") -> "Encoder":
        """Fetch, check and load the configured weights. Raises `ConfigError`."""
        forward = load_forward(config, torch.device(device), DTYPES[config.dtype])
        chosen = f"{forward.backend.name} ({forward.backend.reason})"
        logger.info("%s on %s in %s, attention %s", config.name, device, config.dtype, chosen)
        return cls(config, forward)

    @torch.inference_mode()
    def encode(
        self, batch: PackedBatch, output: Output = "pooled", dtype: OutputDtype = "float32"
    ) -> list[Tensor]:
        """One host tensor per image, in order of arrival, in memory that belongs to the caller.

        `pooled` is [dimensions], of unit length if so configured; `patch` is [rows, width].
        """
        with self.graphs.on_stream():
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
    def forward(self, batch: PackedBatch, output: Output, pixels: Tensor | None = None) -> Tensor:
        """The tower's rows on the device, in packed order. Waits for nothing.

        `pixels` are those of `upload`, if they are there already.
        """
        with self.graphs.on_stream():
            pixels = self.upload(batch) if pixels is None else pixels
            return self.graphs.run(self._patches(batch, pixels), Call(batch.layout, output))

    @torch.inference_mode()
    def upload(self, batch: PackedBatch) -> Tensor:
        """A batch's pixels on the device: uint8, flat. Waits for nothing."""
        # Ray hands over read-only, pageable memory; this copy is torch's own, and pinned.
        pixels = torch.empty(
            batch.pixels.size, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        pixels.numpy()[:] = batch.pixels
        with self.graphs.on_stream():
            return pixels.to(self._device, non_blocking=True)

    def idle(self, *, may_rebuild: bool = True) -> bool:
        """Take one step of what no batch should wait for; whether there is another to take.

        To be called while no batch waits: that is when graphs are captured. Takes about as long as
        two batches; with `may_rebuild`, all graphs may be given up, to be captured anew.
        """
        more = self.graphs.idle(may_rebuild=may_rebuild)
        if not more:
            self._profile.write(self.graphs.hottest())
        return more

    def _patches(self, batch: PackedBatch, pixels: Tensor) -> Tensor:
        side = self.config.patch_size
        targets = [(rows * side, columns * side) for _, rows, columns in batch.layout.grid_thw]
        return self._preprocess(pixels, batch.sizes, targets).to(self._dtype)
