"""Qwen3-VL and Qwen3.5: bilinear positions, axial rotary, merged patches, deepstack features.

Shapes: P = packed patches, C = values of a patch, D = model width, K = head width, N = images,
R = merged rows, O = output width.
"""

from math import isqrt
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn

from encoders.attention import Attention, AttentionLayout
from encoders.config import EncoderConfig
from encoders.errors import ConfigError
from encoders.layers import (
    MLP,
    Block,
    PackedAttention,
    PatchMerger,
    Positions,
    run_blocks,
)
from encoders.packing import Output, PackedLayout, num_patches
from encoders.towers.qwen3_vl_tables import block_tables, turns

EPS = 1e-6  # of every LayerNorm; the checkpoints do not say
LONGEST_SIDE = 65536  # in patches: the padding of a graph may be one strip of nearly all its rows


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

    @property
    def grid_side(self) -> int:
        """Side of the square grid of trained positions."""
        return isqrt(self.num_position_embeddings)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.hidden_size % (4 * self.num_heads):  # two axes, each a pair of halves
            raise ValueError("hidden_size / num_heads is no multiple of 4")
        if self.grid_side**2 != self.num_position_embeddings:
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
    place_P2: Tensor
    """int32: row and column of each patch, by which its queries and keys turn."""
    bounds_N: Tensor
    """int64 [N + 1]: boundaries of the images in merged rows, for pooling."""


class Qwen3VL(nn.Module):
    """Packed patches, block by block, to merged rows. See `encoders.towers.Tower`."""

    num_prefix = 0

    def __init__(
        self,
        config: Qwen3VLConfig,
        attention: Attention,
        prefixes: tuple[str, ...],
        *,
        fold_frames: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.fold_frames = fold_frames
        self.prefixes = prefixes
        self.patch_size = config.patch_size
        self.merge_size = config.spatial_merge_size
        self.frames = 1 if fold_frames else config.temporal_patch_size
        self.dimensions = config.out_hidden_size
        width = config.hidden_size
        # The released convolution's stride is its kernel: it is a product with each flat patch.
        self.patch_embed = nn.Linear(3 * self.frames * self.patch_size**2, width)
        self.positions = Positions(config.num_position_embeddings, width)
        self._turn_S2Q: Tensor | None = None
        self.blocks = nn.ModuleList(
            Block(
                PackedAttention(width, config.num_heads, qkv_bias=True, attention=attention),
                MLP(width, config.intermediate_size, approximate="tanh"),
                width=width,
                eps=EPS,
            )
            for _ in range(config.depth)
        )
        self.merger = self._merger(norm_block=False)
        self.deepstack = nn.ModuleList(
            self._merger(norm_block=True) for _ in config.deepstack_visual_indexes
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
        return cls(config, attention, prefixes, fold_frames=settings.fold_frames)

    def _merger(self, *, norm_block: bool) -> PatchMerger:
        width = self.config.hidden_size
        return PatchMerger(
            width, width * self.merge_size**2, self.dimensions, norm_block=norm_block, eps=EPS
        )

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
        x_PD = self.positions(self.patch_embed(patches_PC), inputs.cell_P4, inputs.weight_P4)
        wanted = self.config.deepstack_visual_indexes if output == "patch" else ()
        y_PD, features = run_blocks(
            self.blocks,
            x_PD,
            self.merger.norm,
            layout,
            rotary=(inputs.place_P2, self._turns_on(patches_PC.device)),
            taps=zip(wanted, self.deepstack, strict=False),
        )
        merged_RO = self.merger.project(y_PD)
        if output == "patch":
            return torch.cat([merged_RO, *features], dim=-1)
        return torch.segment_reduce(
            merged_RO.float(), "mean", offsets=inputs.bounds_N, axis=0, unsafe=True
        )  # unsafe: the check of the offsets would read them back

    def row_counts(self, layout: PackedLayout) -> tuple[int, ...]:
        """Merged rows of each image."""
        return tuple(num_patches(grid) // self.merge_size**2 for grid in layout.grid_thw)

    def inputs(self, layout: PackedLayout) -> Qwen3VLInputs:
        """Host tensors of a layout of stills. A clip's frames would be a segment each."""
        config = self.config
        tables = [
            block_tables(*grid[1:], merge_size=self.merge_size, side=config.grid_side)
            for grid in layout.grid_thw
        ]
        place_P2, cell_P4, weight_P4 = map(np.concatenate, zip(*tables, strict=True))
        if (longest := place_P2.max(initial=0)) >= LONGEST_SIDE:  # a kernel would read past the end
            raise ValueError(f"a side of {longest + 1} patches, the most is {LONGEST_SIDE}")
        bounds_N = np.array(layout.cu_seqlens, np.int64) // self.merge_size**2
        arrays = (cell_P4, weight_P4, place_P2, bounds_N)
        return Qwen3VLInputs(*map(torch.from_numpy, arrays))

    def _turns_on(self, device: torch.device) -> Tensor:
        # No buffer: `.to(dtype)` would round it, and weights come to a tower without memory. The
        # first forward makes it, and that is never under capture.
        if self._turn_S2Q is None or self._turn_S2Q.device != device:
            config = self.config
            table = turns(
                LONGEST_SIDE,
                head_size=config.hidden_size // config.num_heads,
                theta=config.rope_parameters.rope_theta,
            )
            self._turn_S2Q = torch.from_numpy(table).to(device)
        return self._turn_S2Q

    def wanted(self, name: str) -> bool:
        """Whether a checkpoint's tensor is the tower's, not the language model's."""
        return name.startswith(self.prefixes)

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under a released checkpoint's names -> under ours; unknown names stay."""
        own = self.state_dict().keys()
        ours = {new if (new := _renamed(name)) in own else name: tensors[name] for name in tensors}
        if "patch_embed.weight" in ours:
            weight_D3Tpp = ours["patch_embed.weight"]
            if self.fold_frames:  # in fp32, so that loading rounds the sum once
                weight_D3Tpp = weight_D3Tpp.float().sum(2)
            ours["patch_embed.weight"] = weight_D3Tpp.flatten(1)
        return ours


RENAMES = (
    ("patch_embed.proj.", "patch_embed."),
    ("pos_embed.", "positions."),
    (".attn.", ".attention."),
    (".linear_fc", ".fc"),
    ("deepstack_merger_list.", "deepstack."),
)


def _renamed(name: str) -> str:
    name = name.removeprefix("model.").removeprefix("visual.")
    for theirs, our in RENAMES:
        name = name.replace(theirs, our)
    return name
