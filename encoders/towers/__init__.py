"""Families of vision towers: one file each maps a checkpoint to one packed forward.

Shapes: P = patches, C = values of a patch, N = images, R = rows of patch output, D = width.
"""

from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from encoders.attention import Attention, AttentionLayout
from encoders.config import EncoderConfig
from encoders.packing import Output, PackedLayout


class Tower(Protocol):
    """A vision tower on packed patches. It has no batch axis and reads nothing back."""

    patch_size: int
    merge_size: int
    """Patches joined per side after the blocks."""
    frames: int
    """Times that a still's pixels are repeated in one patch."""
    num_prefix: int
    """Rows put before each image's patches: `encoders.sizes.NUM_PREFIX`, which needs no torch."""
    dimensions: int
    """Width of a pooled row."""

    @classmethod
    def from_checkpoint(
        cls, config_json: dict[str, Any], settings: EncoderConfig, attention: Attention
    ) -> Self:
        """An empty tower of a checkpoint's shape. Raises `ConfigError`."""
        ...

    @staticmethod
    def head_size(config_json: dict[str, Any]) -> int:
        """Width of one attention head, which decides the backend."""
        ...

    def wanted(self, name: str) -> bool:
        """Whether the tower uses a checkpoint's tensor; others are not even read."""
        ...

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under a released checkpoint's names -> under ours.

        A name that is not known stays as it is: loading then reports it.
        """
        ...

    def inputs(self, layout: PackedLayout) -> NamedTuple:
        """Everything the forward needs of a layout: host tensors, fp32 or int."""
        ...

    def row_counts(self, layout: PackedLayout) -> tuple[int, ...]:
        """Rows that each image has in patch output, in packed order."""
        ...

    def __call__(
        self, patches_PC: Tensor, inputs: Any, layout: AttentionLayout, output: Output
    ) -> Tensor:
        """Packed patches [P, C] -> fp32 [N, D] (`pooled`) or [R, D'] in the tower's dtype."""
        ...
