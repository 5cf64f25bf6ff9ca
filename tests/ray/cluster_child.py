"""A cluster of its own, beside the session's: `python cluster_child.py one|two` prints JSON.

`one`: the GPUs that Ray finds on this machine, and what replicas with the app's own options see of
them. `two`: the same app on a head and a second node, of which that one alone carries a label.
"""

import json
import os
import sys
import tempfile
import time
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve._private.build_app import build_app as unfold

from serve_app.app import build_app, resolve_device
from serve_app.args import AppArgs

STORE = 80_000_000  # Ray's least is 75 MB
Json = dict[str, Any]


class Probe:
    """Says which replica this is, where it runs, and what it would see of the GPUs."""

    async def __call__(self) -> Json:
        return {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "node": ray.get_runtime_context().get_node_id(),
            "hip": os.environ.get("HIP_VISIBLE_DEVICES"),
        }


def actor_options(args: AppArgs) -> dict[str, Any]:
    """What the real app asks Ray for, by deployment."""
    made = unfold(build_app(args), name="real").deployments
    return {deployment.name: deployment.ray_actor_options for deployment in made}


def start(*apps: tuple[str, Any, int], wait: bool = True) -> None:
    """Deploy apps by name, actor options and replicas; none needs a GPU to run."""
    targets = []
    for name, options, num_replicas in apps:
        probe = serve.deployment(
            Probe, name=name, num_replicas=num_replicas, ray_actor_options=options
        )
        targets.append(serve.RunTarget(probe.bind(), name=name, route_prefix=None))
    serve.run_many(targets, wait_for_applications_running=wait)


def ask(name: str, num_replicas: int) -> list[Json]:
    """What each replica says."""
    handle, answers = serve.get_app_handle(name), dict[str, Json]()
    while len(answers) < num_replicas:
        answer = handle.remote().result(timeout_s=30)
        answers[answer["replica"]] = answer
    return list(answers.values())


def one_node(temp_dir: str) -> Json:
    """This machine with the GPUs that Ray finds, for `device: auto`."""
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=STORE,
        _temp_dir=temp_dir,
    )
    options = actor_options(AppArgs(device="auto"))
    replicas = {"Ingress": 1, "Batcher": 1, "Encoder": 2}
    serve.start(proxy_location="Disabled")
    start(*((tier, options[tier], num_replicas) for tier, num_replicas in replicas.items()))
    (node,) = ray.nodes()
    return {
        "device": resolve_device("auto"),
        "encoder_options": options["Encoder"],
        "resources": node["Resources"],
        "labels": node["Labels"],
        "hip": {tier: sorted(str(x["hip"]) for x in ask(tier, n)) for tier, n in replicas.items()},
    }


def two_nodes(temp_dir: str) -> Json:
    """Two nodes with two GPUs each, and a label on the second."""
    common = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": STORE}
    cluster = Cluster(
        initialize_head=True,
        connect=True,
        head_node_args={**common, "include_dashboard": False, "temp_dir": temp_dir},
    )
    labelled = cluster.add_node(**common, labels={"gpu": "mi355x"})
    serve.start(proxy_location="Disabled")
    start(("labelled", encoder_options("mi355x"), 2))
    start(("nowhere", encoder_options("mi300x"), 2), wait=False)
    while "to be scheduled" not in pending()[0]:  # it has been tried for a second
        assert pending()[1] == "DEPLOYING"
        time.sleep(0.1)
    return {
        "label": labelled.node_id,
        "nodes": [answer["node"] for answer in ask("labelled", 2)],
        "free_gpus": ray.available_resources().get("GPU"),
        "nowhere": pending()[1:],
    }


def encoder_options(gpu: str) -> Json:
    """The Encoder's actor options in an app whose encoders want that label."""
    return actor_options(AppArgs(device="cuda", encoder_labels={"gpu": gpu}))["Encoder"]


def pending() -> tuple[str, str, dict[str, int]]:
    """Of the app that no node can hold: the message, its status, and its replicas by state."""
    app = serve.status().applications["nowhere"]
    deployment = app.deployments["nowhere"]
    return deployment.message, app.status, deployment.replica_states


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ray-") as temp_dir:
        found = {"one": one_node, "two": two_nodes}[sys.argv[1]](temp_dir)
        sys.stdout.write(json.dumps(found) + "\n")
        ray.shutdown()
