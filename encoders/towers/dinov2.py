"""DINOv2: class token as a packed row, bicubic positions, LayerScale.

Shapes: T = packed rows, P = patches, C = values of a patch, D = model width, N = images,
G = cells of the trained position grid.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import BaseModel, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor, nn

from encoders.attention import Attention, AttentionLayout
from encoders.errors import ConfigError
from encoders.layers import MLP, Block, PackedAttention
from encoders.packing import PackedLayout

NUM_TAPS = 16


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

    def to(self, device: torch.device) -> "Dinov2Inputs":
        """The same on a device."""
        return Dinov2Inputs(*(tensor.to(device) for tensor in self))


class Dinov2(nn.Module):
    """Packed patches to packed rows: `forward` gives the last hidden state, `pool` one row each."""

    def __init__(
        self, config: Dinov2Config, attention: Attention, *, num_layers: int, final_norm: bool
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.patch_embed = nn.Linear(3 * config.patch_size**2, width)
        self.class_token = nn.Parameter(torch.zeros(1, width))
        self.positions = nn.Parameter(torch.zeros(1 + config.grid_side**2, width))
        self.blocks = nn.ModuleList(self._block(attention) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if final_norm else nn.Identity()

    def _block(self, attention: Attention) -> Block:
        config, width = self.config, self.config.hidden_size
        return Block(
            PackedAttention(
                width, config.num_attention_heads, qkv_bias=config.qkv_bias, attention=attention
            ),
            MLP(width, width * config.mlp_ratio),
            width=width,
            eps=config.layer_norm_eps,
        )

    def forward(self, patches_PC: Tensor, inputs: Dinov2Inputs, layout: AttentionLayout) -> Tensor:
        """Normalised patches [P, C] -> last hidden state [T, D]."""
        # A weighted bag is the whole interpolation in one kernel, summed in fp32, cast once.
        position_PD = F.embedding_bag(
            inputs.position_P16,
            self.positions[1:].float(),
            per_sample_weights=inputs.weight_P16,
            mode="sum",
        )
        patch_PD = self.patch_embed(patches_PC) + position_PD.to(patches_PC.dtype)
        x_TD = torch.cat([self.class_token + self.positions[:1], patch_PD])[inputs.source_T]
        for block in self.blocks:
            x_TD = block(x_TD, layout)
        return self.norm(x_TD)

    def pool(self, x_TD: Tensor, inputs: Dinov2Inputs, pooling: str) -> Tensor:
        """One fp32 row per image [N, D]: its class row (`cls`) or the mean of its patch rows."""
        x_TD = x_TD.float()
        if pooling == "cls":
            return x_TD[inputs.bounds_2N[:-1:2]]
        means_2ND = torch.segment_reduce(
            x_TD, "mean", offsets=inputs.bounds_2N, axis=0, unsafe=True
        )  # unsafe: the check of the offsets would read them back
        return means_2ND[1::2]

    def inputs(self, layout: PackedLayout) -> Dinov2Inputs:
        """Host tensors of a layout, to be moved to the tower's device."""
        taps = [grid_taps(rows, cols, self.config.grid_side) for _, rows, cols in layout.grid_thw]
        starts = np.asarray(layout.cu_seqlens[:-1])
        source_T = np.arange(layout.num_rows) - np.repeat(
            np.arange(layout.num_images), layout.seqlens
        )
        source_T[starts] = 0
        bounds_2N = np.append(np.stack([starts, starts + 1], axis=1), layout.num_rows)
        return Dinov2Inputs(
            torch.from_numpy(source_T),
            torch.from_numpy(np.concatenate([index for index, _ in taps])),
            torch.from_numpy(np.concatenate([weight for _, weight in taps])),
            torch.from_numpy(bounds_2N),
        )


@lru_cache(maxsize=256)
def grid_taps(
    rows: int, columns: int, side: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Cells of a side x side table and their weights for each patch of a grid: two [P, 16]."""
    row_index, row_weight = bicubic_taps(rows, side)
    column_index, column_weight = bicubic_taps(columns, side)
    index = row_index[:, None, :, None] * side + column_index[None, :, None, :]
    weight = row_weight[:, None, :, None] * column_weight[None, :, None, :]
    flat = (rows * columns, NUM_TAPS)
    return index.reshape(flat).astype(np.int32), weight.reshape(flat).astype(np.float32)


def bicubic_taps(size: int, table: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The 4 table cells around each of `size` half-pixel centres, and their weights: two [size, 4].

    Cubic convolution with a = -0.75 and clamped borders, as `torch.nn.functional.interpolate`
    computes it for `mode="bicubic", align_corners=False`.
    """
    a = -0.75
    centre = (np.arange(size) + 0.5) * table / size - 0.5
    low = np.floor(centre)
    distance = np.abs(centre[:, None] - (low[:, None] + np.arange(-1, 3)))
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    index = low[:, None].astype(np.int64) + np.arange(-1, 3)
    return index.clip(0, table - 1), np.where(distance <= 1, near, far)


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
FLATTENED = (("patch_embed.weight", 1, -1), ("class_token", 0, 1), ("positions", 0, 1))


def wanted(name: str, *, num_layers: int, final_norm: bool) -> bool:
    """Whether the tower uses a checkpoint's tensor: not the mask token, nor what is cut off."""
    if name.startswith("layernorm."):
        return final_norm
    if name.startswith("encoder.layer."):
        return int(name.split(".")[2]) < num_layers
    return name != "embeddings.mask_token"  # used in training only


def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under a released checkpoint's names -> under ours, query, key and value joined.

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
    return ours


def _renamed(name: str) -> str:
    for theirs, our in RENAMES:
        name = name.replace(theirs, our)
    return name
