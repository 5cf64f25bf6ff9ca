"""DINOv2: class token as a packed row, bicubic positions, LayerScale.

Shapes: T = packed rows, P = patches, C = values of a patch, D = model width, N = images,
G = cells of the trained position grid.
"""

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from pydantic import BaseModel, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor, nn

from encoders.attention import Attention, AttentionLayout
from encoders.config import EncoderConfig
from encoders.errors import ConfigError
from encoders.layers import MLP, Block, PackedAttention, Positions, run_blocks
from encoders.packing import Output, PackedLayout, num_patches
from encoders.towers.taps import bicubic_taps, grid_taps


class Dinov2Config(BaseModel, frozen=True):
    """What this tower reads of a checkpoint's `config.json`; other keys are left alone."""

    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    mlp_ratio: PositiveInt = 4
    image_size: PositiveInt
    patch_size: PositiveInt
    layer_norm_eps: PositiveFloat = 1e-6
    qkv_bias: bool = True
    hidden_act: str = "gelu"
    use_swiglu_ffn: bool = False

    @classmethod
    def read(cls, config_json: dict[str, Any]) -> "Dinov2Config":
        """Check a checkpoint's `config.json`. Raises `ConfigError`."""
        try:
            config = cls.model_validate(config_json)
        except ValidationError as error:
            raise ConfigError(f"config.json is not DINOv2's: {error}") from error
        if config.use_swiglu_ffn or config.hidden_act != "gelu":
            raise ConfigError(
                f"DINOv2 with hidden_act={config.hidden_act!r} and use_swiglu_ffn="
                f"{config.use_swiglu_ffn} is not supported, only 'gelu' and False"
            )
        return config

    @property
    def grid_side(self) -> int:
        """Side of the square grid of trained positions."""
        return self.image_size // self.patch_size


class Dinov2Inputs(NamedTuple):
    """Everything the tower needs of a layout, as tensors: a forward derives nothing itself."""

    source_T: Tensor
    """int64: 0 takes the class token, 1 + p takes patch p."""
    position_P16: Tensor
    """int32: the 16 cells of the trained grid around each patch."""
    weight_P16: Tensor
    """float32: their bicubic weights."""
    bounds_2N: Tensor
    """int64 [2 N + 1]: boundaries between class rows and patch rows, for pooling."""
    patch_row_P: Tensor
    """int64: the packed row of each patch."""


class Dinov2(nn.Module):
    """Packed patches to packed rows. See `encoders.towers.Tower`."""

    merge_size = 1
    frames = 1
    num_prefix = 1

    def __init__(
        self,
        config: Dinov2Config,
        attention: Attention,
        *,
        num_layers: int,
        final_norm: bool,
        pooling: str,
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.patch_size = config.patch_size
        self.dimensions = width
        self.num_layers = num_layers
        self.pooling = pooling
        self.patch_embed = nn.Linear(3 * config.patch_size**2, width)
        self.class_token = nn.Parameter(torch.zeros(1, width))
        self.class_position = nn.Parameter(torch.zeros(1, width))
        self.positions = Positions(config.grid_side**2, width)
        self.blocks = nn.ModuleList(self._block(attention) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if final_norm else None

    @classmethod
    def from_checkpoint(
        cls, config_json: dict[str, Any], settings: EncoderConfig, attention: Attention
    ) -> Self:
        """An empty tower of a checkpoint's shape. Raises `ConfigError`."""
        config = Dinov2Config.read(config_json)
        if settings.fold_frames:
            raise ConfigError("fold_frames is true, but DINOv2's patches have no frames to fold")
        num_layers = settings.num_layers or config.num_hidden_layers
        if num_layers > config.num_hidden_layers:
            raise ConfigError(
                f"num_layers is {num_layers}, the checkpoint has {config.num_hidden_layers}"
            )
        return cls(
            config,
            attention,
            num_layers=num_layers,
            final_norm=settings.final_norm,
            pooling=settings.pooling,
        )

    @staticmethod
    def head_size(config_json: dict[str, Any]) -> int:
        """Width of one attention head."""
        config = Dinov2Config.read(config_json)
        return config.hidden_size // config.num_attention_heads

    def _block(self, attention: Attention) -> Block:
        config, width = self.config, self.config.hidden_size
        return Block(
            PackedAttention(
                width, config.num_attention_heads, qkv_bias=config.qkv_bias, attention=attention
            ),
            MLP(width, width * config.mlp_ratio),
            width=width,
            eps=config.layer_norm_eps,
            layer_scale=True,
        )

    def forward(
        self, patches_PC: Tensor, inputs: Dinov2Inputs, layout: AttentionLayout, output: Output
    ) -> Tensor:
        """Normalised patches [P, C] -> fp32 [N, D] (`pooled`) or [P, D] (`patch`)."""
        patch_PD = self.positions(
            self.patch_embed(patches_PC), inputs.position_P16, inputs.weight_P16
        )
        x_TD = torch.cat([self.class_token + self.class_position, patch_PD])[inputs.source_T]
        only_class = output == "pooled" and self.pooling == "cls"
        last_rows = inputs.bounds_2N[:-1:2] if only_class else None
        y_TD, _ = run_blocks(self.blocks, x_TD, self.norm, layout, last_rows=last_rows)
        if output == "patch":
            return y_TD[inputs.patch_row_P]
        return y_TD.float() if only_class else self._mean(y_TD.float(), inputs)

    def _mean(self, x_TD: Tensor, inputs: Dinov2Inputs) -> Tensor:
        means_2ND = torch.segment_reduce(
            x_TD, "mean", offsets=inputs.bounds_2N, axis=0, unsafe=True
        )  # unsafe: the check of the offsets would read them back
        return means_2ND[1::2]

    def row_counts(self, layout: PackedLayout) -> tuple[int, ...]:
        """Patch rows of each image: all but the class row."""
        return tuple(num_patches(grid) for grid in layout.grid_thw)

    def inputs(self, layout: PackedLayout) -> Dinov2Inputs:
        """Host tensors of a layout, to be moved to the tower's device."""
        side = self.config.grid_side
        taps = [grid_taps(rows, cols, side, bicubic_taps) for _, rows, cols in layout.grid_thw]
        starts = np.asarray(layout.cu_seqlens[:-1])
        source_T = np.arange(layout.num_rows) - np.repeat(
            np.arange(layout.num_images), layout.seqlens
        )
        source_T[starts] = 0
        patch_row_P = np.flatnonzero(source_T)
        bounds_2N = np.append(np.stack([starts, starts + 1], axis=1), layout.num_rows)
        return Dinov2Inputs(
            torch.from_numpy(source_T),
            torch.from_numpy(np.concatenate([index for index, _ in taps])),
            torch.from_numpy(np.concatenate([weight for _, weight in taps])),
            torch.from_numpy(bounds_2N),
            torch.from_numpy(patch_row_P),
        )

    def wanted(self, name: str) -> bool:
        """Whether the tower uses a checkpoint's tensor: not the mask token, nor what is cut off."""
        if name.startswith("layernorm."):
            return self.norm is not None
        if name.startswith("encoder.layer."):
            return int(name.split(".")[2]) < self.num_layers
        return name != "embeddings.mask_token"  # used in training only

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under a released checkpoint's names -> under ours, query, key, value joined.

        A name that is not known, or whose companions are missing, stays: loading then reports it.
        """
        ours = {_renamed(name): tensor for name, tensor in tensors.items()}
        for query in [name for name in ours if ".attention.attention.query." in name]:
            qkv = [query.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
            if all(name in ours for name in qkv):
                joined = torch.cat([ours.pop(name) for name in qkv])
                ours[query.replace("attention.attention.query", "attention.qkv")] = joined
        for name, first, last in FLATTENED:
            if name in ours:
                ours[name] = ours[name].flatten(first, last)
        if "positions" in ours:
            rows = ours.pop("positions").flatten(0, 1)
            ours["class_position"], ours["positions.weight"] = rows[:1], rows[1:]
        return ours


RENAMES = (
    ("embeddings.patch_embeddings.projection", "patch_embed"),
    ("embeddings.cls_token", "class_token"),
    ("embeddings.position_embeddings", "positions"),
    ("encoder.layer.", "blocks."),
    ("attention.output.dense", "attention.proj"),
    ("layer_scale1.lambda1", "scale1"),
    ("layer_scale2.lambda1", "scale2"),
    ("layernorm.", "norm."),
)
FLATTENED = (("patch_embed.weight", 1, -1), ("class_token", 0, 1))


def _renamed(name: str) -> str:
    for theirs, our in RENAMES:
        name = name.replace(theirs, our)
    return name
