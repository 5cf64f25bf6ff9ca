"""Weights are found, read and loaded exactly, or refused in plain words."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from encoders.config import LocalWeights
from encoders.errors import ConfigError, WeightsError
from encoders.weights import load_into, read_model_config, read_tensors, resolve

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE_FROM_HUB = """
import sys
from encoders.config import HubWeights
from encoders.errors import WeightsError
from encoders.weights import resolve

try:
    print(resolve(HubWeights(source="hub", repo_id=sys.argv[1], revision=sys.argv[2])))
except WeightsError as error:
    print(f"WeightsError: {error}")
"""

SHARDS = {
    "model-00001-of-00002.safetensors": {"vision.a": torch.ones(2), "vision.b": torch.ones(3)},
    "model-00002-of-00002.safetensors": {"vision.c": torch.zeros(4), "text.d": torch.zeros(5)},
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for shard, tensors in SHARDS.items():
        save_file(tensors, tmp_path / shard)
    places = {name: shard for shard, tensors in SHARDS.items() for name in tensors}
    write_index(tmp_path, places)
    return tmp_path


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in module.state_dict().items()}


def resolve_from_hub(repo_id: str, revision: str, cache: Path) -> str:
    """What an offline process prints; the Hub client reads its environment on import only."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    command = [sys.executable, "-c", RESOLVE_FROM_HUB, repo_id, revision]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def test_a_local_folder_is_used_where_it_is(tmp_path: Path) -> None:
    assert resolve(LocalWeights(source="local", path=tmp_path)) == tmp_path


def test_a_missing_local_folder_is_named(tmp_path: Path) -> None:
    absent = tmp_path / "absent"

    with pytest.raises(WeightsError, match=f"no folder {absent}"):
        resolve(LocalWeights(source="local", path=absent))


def test_a_hub_snapshot_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "tiny"}')
    save_file({"a": torch.arange(3.0)}, snapshot / "model.safetensors")

    folder = Path(resolve_from_hub("acme/tiny", COMMIT, tmp_path))

    assert folder.samefile(snapshot)
    assert read_model_config(folder) == {"model_type": "tiny"}
    torch.testing.assert_close(read_tensors(folder), {"a": torch.arange(3.0)})


@pytest.mark.parametrize("repo_id", ["acme/unknown", "not//a//repository"])
def test_an_unavailable_hub_repository_is_a_weights_error(repo_id: str, tmp_path: Path) -> None:
    printed = resolve_from_hub(repo_id, COMMIT, tmp_path)

    assert printed.startswith(f"WeightsError: cannot fetch {repo_id} at {COMMIT}")


@pytest.mark.parametrize("content", [None, "{", "[1]"], ids=["missing", "broken", "a list"])
def test_an_unreadable_model_config_is_a_config_error(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        read_model_config(tmp_path)


def test_shards_are_read_as_one_checkpoint(sharded: Path) -> None:
    tensors = read_tensors(sharded)

    expected = {name: tensor for shard in SHARDS.values() for name, tensor in shard.items()}
    torch.testing.assert_close(tensors, expected)


def test_only_wanted_tensors_are_read(sharded: Path) -> None:
    assert read_tensors(sharded, lambda name: name == "vision.c").keys() == {"vision.c"}


def test_a_shard_without_wanted_tensors_is_never_opened(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").write_bytes(b"no safetensors at all")

    tensors = read_tensors(sharded, lambda name: name in {"vision.a", "vision.b"})

    assert tensors.keys() == {"vision.a", "vision.b"}


def remove_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_a_shard_short(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])


def hold_a_tensor_twice(folder: Path) -> None:
    save_file(
        {"vision.a": torch.zeros(2)} | SHARDS["model-00002-of-00002.safetensors"],
        folder / "model-00002-of-00002.safetensors",
    )


def promise_too_much(folder: Path) -> None:
    places = {"vision.z": "model-00002-of-00002.safetensors"}
    places |= {name: shard for shard, tensors in SHARDS.items() for name in tensors}
    write_index(folder, places)


def empty_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def remove_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_a_shard, "cannot read .*model-00002-of-00002"),
        (cut_a_shard_short, "cannot read .*model-00002-of-00002"),
        (hold_a_tensor_twice, r"places elsewhere \(1\): vision\.a$"),
        (promise_too_much, r"no shard holds \(1\): vision\.z$"),
        (empty_the_index, "weight_map"),
        (remove_the_index, "neither model.safetensors nor"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Path], None], message: str, sharded: Path
) -> None:
    damage(sharded)

    with pytest.raises(WeightsError, match=message):
        read_tensors(sharded)


def test_loading_fills_parameters_and_buffers_in_the_dtype_of_the_module() -> None:
    module = nn.BatchNorm1d(4).to(torch.bfloat16)
    tensors = {name: torch.full_like(own, 3).float() for name, own in module.state_dict().items()}

    load_into(module, tensors)

    assert {own.dtype for own in module.state_dict().values()} == {torch.bfloat16, torch.int64}
    assert all((own == 3).all() for own in module.state_dict().values())
    assert module.weight.requires_grad
    assert module.weight.grad_fn is None


def test_a_missing_an_unused_and_a_misshapen_tensor_are_each_named() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    before = {name: own.clone() for name, own in module.state_dict().items()}
    tensors = tensors_of(module)
    del tensors["1.bias"]
    tensors["2.bias"] = torch.zeros(2)
    tensors["0.weight"] = tensors["0.weight"].T

    with pytest.raises(WeightsError) as caught:
        load_into(module, tensors)

    assert "missing (1): 1.bias" in str(caught.value)
    assert "unused (1): 2.bias" in str(caught.value)
    assert "misshapen (1): 0.weight is (2, 3), not (3, 2)" in str(caught.value)
    torch.testing.assert_close(dict(module.state_dict()), before)


def test_a_long_list_of_tensors_is_cut_but_counted() -> None:
    module = nn.Linear(2, 2)
    extra = {f"extra.{n}": torch.zeros(1) for n in range(8)}

    with pytest.raises(WeightsError, match=r"unused \(8\): extra\.0, .*extra\.4, \.\.\.$"):
        load_into(module, tensors_of(module) | extra)
