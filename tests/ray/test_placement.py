"""Where Ray puts the replicas, and which GPUs they see: clusters of their own, no real GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("cluster_child.py")


def cluster(nodes: str, *path: Path, **environment: str) -> dict[str, Any]:
    """What `cluster_child.py` finds out in a cluster that knows nothing of the session's."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"RAY_ADDRESS", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}
    }
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*path, ROOT]))
    result = subprocess.run(
        [sys.executable, CHILD, nodes],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    answer = next(line for line in result.stdout.splitlines() if line.startswith("{"))
    return json.loads(answer)


@pytest.mark.parametrize(
    ("preset", "encoders"), [({}, ["0", "1"]), ({"HIP_VISIBLE_DEVICES": "3,5"}, ["3", "5"])]
)
def test_each_encoder_gets_an_mi355x_of_its_own_and_the_other_tiers_see_none(
    preset: dict[str, str], encoders: list[str]
) -> None:
    found = cluster("one", ROOT / "tests" / "fake_amdsmi", **preset)

    assert found["resources"]["GPU"] == 2
    assert found["labels"]["ray.io/accelerator-type"] == "AMD-Instinct-MI355X-OAM"
    assert found["device"] == "cuda"
    assert found["encoder_options"]["num_gpus"] == 1
    assert found["hip"] == {"Ingress": [""], "Batcher": [""], "Encoder": encoders}


def test_encoders_run_on_labelled_nodes_alone_and_wait_where_there_is_none() -> None:
    # Ray says after so long that it cannot place a replica.
    patience = {f"RAY_SERVE_SLOW_STARTUP_WARNING_{x}S": "1" for x in ("", "PERIOD_")}

    found = cluster("two", **patience)

    assert found["nodes"] == [found["label"]] * 2
    assert found["free_gpus"] == 2, "there is room for the others, but on a node without the label"
    assert found["nowhere"] == ["DEPLOYING", {"STARTING": 2}]
