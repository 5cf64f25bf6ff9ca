"""Tower, preprocessing and device together: a packed batch in, one result per image out."""

import logging
import os
import time
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from encoders.config import EncoderConfig
from encoders.forward import Forward, Results, WayBack
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
        self._device = forward.device
        self._way_back = WayBack(forward.device)
        self._tower = tower = forward.tower
        self._preprocess = Preprocessor(
            config.image_mean,
            config.image_std,
            forward.device,
            DTYPES[config.dtype],
            patch_size=tower.patch_size,
            merge_size=tower.merge_size,
            frames=tower.frames,
        )

    @classmethod
    def load(cls, config: EncoderConfig, device: str = "cpu") -> "Encoder":
        """Fetch, check and load the configured weights. Raises `ConfigError`."""
        begin = time.perf_counter()
        forward = load_forward(config, torch.device(device), DTYPES[config.dtype])
        chosen = f"{forward.backend.name} ({forward.backend.reason})"
        logger.info("%s on %s in %s, attention %s", config.name, device, config.dtype, chosen)
        loaded = time.perf_counter()
        encoder = cls(config, forward)
        logger.info(
            "weights in %.1f s, kernels and %d graphs in %.1f s",
            loaded - begin,
            encoder.graphs.stats().graphs,
            time.perf_counter() - loaded,
        )
        return encoder

    def encode(
        self, batch: PackedBatch, output: Output = "pooled", dtype: OutputDtype = "float32"
    ) -> list[Tensor]:
        """One host tensor per image, in order of arrival, in memory that belongs to the caller.

        `pooled` is [dimensions], of unit length if so configured; `patch` is [rows, width].
        """
        return self.start(batch, output, dtype).wait()

    @torch.inference_mode()
    def start(
        self, batch: PackedBatch, output: Output = "pooled", dtype: OutputDtype = "float32"
    ) -> Results:
        """`encode` that does not wait for a GPU: the next batch may be started behind it."""
        with self.graphs.on_stream():
            begin = self._way_back.begin()
            rows = self.forward(batch, output)
            if output == "pooled" and self.config.normalize:
                rows = F.normalize(rows, dim=-1)  # fp32: pooling widened them
            counts = None if output == "pooled" else self._tower.row_counts(batch.layout)
            packed = rows.to(DTYPES[dtype])
            return Results(packed, counts, batch.layout.order, begin, self._way_back)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, output: Output, pixels: Tensor | None = None) -> Tensor:
        """The tower's rows on the device, in packed order. Waits for nothing.

        `pixels`: the batch's own where they are on the device already.
        """
        with self.graphs.on_stream():
            return self.graphs.run(self._patches(batch, pixels), Call(batch.layout, output))

    def upload(self, batch: PackedBatch) -> Tensor:
        """The batch's pixels on the device, in memory that belongs to the caller."""
        return torch.from_numpy(batch.pixels.copy()).to(self._device)

    def idle(self, *, may_rebuild: bool = True) -> bool:
        """Take one step of what no batch should wait for; whether there is another to take.

        To be called while no batch waits: that is when graphs are captured. Takes about as long as
        two batches; with `may_rebuild`, all graphs may be given up, to be captured anew.
        """
        more = self.graphs.idle(may_rebuild=may_rebuild)
        if not more:
            self._profile.write(self.graphs.hottest())
        return more

    def _patches(self, batch: PackedBatch, pixels: Tensor | None) -> Tensor:
        if pixels is None:
            with self._preprocess.staging.on_device(batch.pixels) as pixels:
                return self._patches(batch, pixels)
        side = self.config.patch_size
        targets = [(rows * side, columns * side) for _, rows, columns in batch.layout.grid_thw]
        return self._preprocess(pixels, batch.sizes, targets)
