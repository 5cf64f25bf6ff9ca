"""Qwen3-VL and Qwen3.5: bilinear positions, axial rotary, merged patches, deepstack features.

Shapes: P = packed patches, C = values of a patch, D = model width, K = head width, Q = K / 4,
S = a side in patches, N = images, R = merged rows, B = values of a merged row, O = output width.
"""

from math import isqrt
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn

from encoders.attention import Attention, AttentionLayout
from encoders.config import EncoderConfig
from encoders.errors import ConfigError
from encoders.layers import MLP, Block, PackedAttention
from encoders.packing import PackedLayout, num_patches
from encoders.towers import Output
from encoders.towers.taps import bilinear_taps, grid_taps

EPS = 1e-6  # of every LayerNorm; the checkpoints do not say


class AxialRope(BaseModel, frozen=True, extra="forbid"):
    """Rotation by row and column; a key that is not known would mean another rotation."""

    rope_type: Literal["axial"] = "axial"
    rope_theta: PositiveFloat = 10_000.0


class Qwen3VLConfig(BaseModel, frozen=True):
    """What this tower reads of a checkpoint's `vision_config`; other keys are left alone."""

    # Released checkpoints repeat the whole model's type here, newly saved ones add `_vision`.
    model_type: str = Field(pattern=r"^qwen3_(vl|5)(_moe)?(_vision)?$")
    depth: PositiveInt
    hidden_size: PositiveInt
    hidden_act: Literal["gelu_pytorch_tanh"]
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    patch_size: PositiveInt
    spatial_merge_size: PositiveInt
    temporal_patch_size: PositiveInt
    out_hidden_size: PositiveInt
    num_position_embeddings: PositiveInt
    deepstack_visual_indexes: tuple[int, ...] = ()
    rope_parameters: AxialRope = AxialRope()

    @classmethod
    def read(cls, config_json: dict[str, Any]) -> "Qwen3VLConfig":
        """Check the `config.json` of a whole model or of a tower alone. Raises `ConfigError`."""
        try:
            return cls.model_validate(config_json.get("vision_config", config_json))
        except ValidationError as error:
            raise ConfigError(f"config.json is not Qwen3-VL's: {error}") from error

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.hidden_size % (4 * self.num_heads):  # two axes, each a pair of halves
            raise ValueError("hidden_size / num_heads is no multiple of 4")
        if isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError("num_position_embeddings is no square")
        taps = self.deepstack_visual_indexes
        if list(taps) != sorted(set(range(self.depth)).intersection(taps)):
            raise ValueError(f"deepstack_visual_indexes do not rise within depth {self.depth}")
        return self


class Qwen3VLInputs(NamedTuple):
    """Everything the tower needs of a layout, as tensors: a forward derives nothing itself."""

    cell_P4: Tensor
    weight_P4: Tensor
    """int32 and float32: the 4 cells of the trained grid around each patch, bilinear weights."""
    cos_PK: Tensor
    sin_PK: Tensor
    """float32: how each patch's queries and keys turn."""
    bounds_N: Tensor
    """int64 [N + 1]: boundaries of the images in merged rows, for pooling."""


class PatchMerger(nn.Module):
    """Each block of merge_size^2 patches -> one row, normalised per patch or per block."""

    def __init__(self, config: Qwen3VLConfig, *, norm_block: bool) -> None:
        super().__init__()
        self.block_width = config.hidden_size * config.spatial_merge_size**2
        self.norm_width = self.block_width if norm_block else config.hidden_size
        self.norm = nn.LayerNorm(self.norm_width, eps=EPS)
        self.fc1 = nn.Linear(self.block_width, self.block_width)
        self.fc2 = nn.Linear(self.block_width, config.out_hidden_size)

    def forward(self, x_PD: Tensor) -> Tensor:
        """[P, D] -> [R, O]."""
        x_RB = self.norm(x_PD.reshape(-1, self.norm_width)).reshape(-1, self.block_width)
        return self.fc2(F.gelu(self.fc1(x_RB)))  # exact, unlike the blocks' GELU


class Qwen3VL(nn.Module):
    """Packed patches, block by block, to merged rows. See `encoders.towers.Tower`."""

    num_prefix = 0

    def __init__(self, config: Qwen3VLConfig, attention: Attention, prefixes: tuple[str, ...]):
        super().__init__()
        self.config = config
        self.prefixes = prefixes
        self.patch_size = config.patch_size
        self.merge_size = config.spatial_merge_size
        self.frames = config.temporal_patch_size
        self.dimensions = config.out_hidden_size
        width = config.hidden_size
        # The released convolution's stride is its kernel: it is a product with each flat patch.
        self.patch_embed = nn.Linear(3 * self.frames * self.patch_size**2, width)
        self.positions = nn.Parameter(torch.zeros(config.num_position_embeddings, width))
        self.blocks = nn.ModuleList(
            Block(
                PackedAttention(width, config.num_heads, qkv_bias=True, attention=attention),
                MLP(width, config.intermediate_size, approximate="tanh"),
                width=width,
                eps=EPS,
            )
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, norm_block=False)
        self.deepstack = nn.ModuleList(
            PatchMerger(config, norm_block=True) for _ in config.deepstack_visual_indexes
        )

    @classmethod
    def from_checkpoint(
        cls, config_json: dict[str, Any], settings: EncoderConfig, attention: Attention
    ) -> Self:
        """An empty tower of a checkpoint's shape. Raises `ConfigError`."""
        config = Qwen3VLConfig.read(config_json)
        uncut = settings.num_layers in (None, config.depth) and settings.final_norm
        if not uncut or settings.pooling != "mean":
            raise ConfigError(
                f"num_layers={settings.num_layers}, final_norm={settings.final_norm}, pooling="
                f"{settings.pooling!r}: only None, True and 'mean' fit Qwen3-VL, whose merger "
                f"follows all {config.depth} blocks and which has no class token"
            )
        # A whole model's files hold the language model too; a tower's own, nothing else.
        prefixes = ("model.visual.", "visual.") if "vision_config" in config_json else ("",)
        return cls(config, attention, prefixes)

    @staticmethod
    def head_size(config_json: dict[str, Any]) -> int:
        """Width of one attention head."""
        config = Qwen3VLConfig.read(config_json)
        return config.hidden_size // config.num_heads

    def forward(
        self, patches_PC: Tensor, inputs: Qwen3VLInputs, layout: AttentionLayout, output: Output
    ) -> Tensor:
        """Normalised patches [P, C] -> fp32 [N, O] (`pooled`) or [R, O * (1 + taps)] (`patch`).

        A patch row is the merger's, then each deepstack feature's from the first tap on; a pooled
        row is the mean of the merger's alone, and the deepstack mergers do not run for it.
        """
        # A weighted bag is the whole interpolation in one kernel, summed in fp32, cast once.
        position_PD = F.embedding_bag(
            inputs.cell_P4, self.positions.float(), mode="sum", per_sample_weights=inputs.weight_P4
        )
        x_PD = self.patch_embed(patches_PC) + position_PD.to(patches_PC.dtype)
        rotary = inputs.cos_PK[:, None, None], inputs.sin_PK[:, None, None]
        taps = self.config.deepstack_visual_indexes if output == "patch" else ()
        features: list[Tensor] = []
        for depth, block in enumerate(self.blocks):
            x_PD = block(x_PD, layout, rotary)
            if depth in taps:
                features.append(self.deepstack[len(features)](x_PD))
        if output == "patch":
            return torch.cat([self.merger(x_PD), *features], dim=-1)
        return torch.segment_reduce(
            self.merger(x_PD).float(), "mean", offsets=inputs.bounds_N, axis=0, unsafe=True
        )  # unsafe: the check of the offsets would read them back

    def row_counts(self, layout: PackedLayout) -> tuple[int, ...]:
        """Merged rows of each image."""
        return tuple(num_patches(grid) // self.merge_size**2 for grid in layout.grid_thw)

    def inputs(self, layout: PackedLayout) -> Qwen3VLInputs:
        """Host tensors of a layout of stills. A clip's frames would be a segment each."""
        tables = [block_tables(*grid[1:], self.config) for grid in layout.grid_thw]
        place_P2, cell_P4, weight_P4 = map(np.concatenate, zip(*tables, strict=True))
        bounds_N = np.array(layout.cu_seqlens, np.int64) // self.merge_size**2
        arrays = (cell_P4, weight_P4, *rotations(place_P2, self.config), bounds_N)
        return Qwen3VLInputs(*map(torch.from_numpy, arrays))

    def wanted(self, name: str) -> bool:
        """Whether a checkpoint's tensor is the tower's, not the language model's."""
        return name.startswith(self.prefixes)

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under a released checkpoint's names -> under ours; unknown names stay."""
        own = self.state_dict().keys()
        ours = {new if (new := _renamed(name)) in own else name: tensors[name] for name in tensors}
        if "patch_embed.weight" in ours:
            ours["patch_embed.weight"] = ours["patch_embed.weight"].flatten(1)
        return ours


RENAMES = (
    ("patch_embed.proj.", "patch_embed."),
    ("pos_embed.weight", "positions"),
    (".attn.", ".attention."),
    (".linear_fc", ".fc"),
    ("deepstack_merger_list.", "deepstack."),
)


def _renamed(name: str) -> str:
    name = name.removeprefix("model.").removeprefix("visual.")
    for theirs, our in RENAMES:
        name = name.replace(theirs, our)
    return name


def block_tables(
    rows: int, columns: int, config: Qwen3VLConfig
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Row and column [P, 2], table cells [P, 4] and weights [P, 4] of a grid's packed patches."""
    # They are packed block by block, and row by row within a block.
    merge, side = config.spatial_merge_size, isqrt(config.num_position_embeddings)
    grid = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    order_P = grid.swapaxes(1, 2).reshape(-1)
    cell_P4, weight_P4 = grid_taps(rows, columns, side, bilinear_taps)
    return np.stack(np.divmod(order_P, columns), 1), cell_P4[order_P], weight_P4[order_P]


def rotations(place_P2: npt.NDArray[np.int64], config: Qwen3VLConfig) -> npt.NDArray[np.float32]:
    """Cosines and signed sines [2, P, K] of patches at these places, in fp32 as transformers."""
    half = config.hidden_size // config.num_heads // 2
    exponent_Q = np.arange(0, half, 2, dtype=np.float32) / half
    inverse_Q = 1 / np.float32(config.rope_parameters.rope_theta) ** exponent_Q
    angle_SQ = np.arange(place_P2.max() + 1, dtype=np.float32)[:, None] * inverse_Q
    turn_2SQ = np.stack([np.cos(angle_SQ), np.sin(angle_SQ)], dtype=np.float32)
    # Both halves of a head turn alike: Q channels by the row, then Q by the column.
    turn_2PK = turn_2SQ.take(np.tile(place_P2, 2), axis=1).reshape(2, len(place_P2), 2 * half)
    turn_2PK[1, :, :half] *= -1  # see `encoders.layers.Rotary`
    return turn_2PK
