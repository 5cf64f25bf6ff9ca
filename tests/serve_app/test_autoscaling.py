"""What the policies ask for, from what Ray would hand them."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from encoders.config import EncoderConfig
from tests.tiny import write_tiny_encoder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

    from serve_app.args import AppArgs
    from serve_app.autoscaling import PatchPolicy, QueueAgePolicy
    from serve_app.local import fused_service

NAME = DeploymentID("Encoder", "app")


def context(
    stat: str = "", values: tuple[float, ...] = (), requests: float = 0.0
) -> AutoscalingContext:
    """Of as many running replicas as there are values."""
    replicas = [ReplicaID(f"replica{i}", NAME) for i in range(len(values) or 1)]
    stats = {stat: dict(zip(replicas, values, strict=True))} if values else {}
    return AutoscalingContext(
        deployment_id=NAME,
        deployment_name=NAME.name,
        app_name=NAME.app_name,
        current_num_replicas=len(replicas),
        target_num_replicas=len(replicas),
        running_replicas=replicas,
        total_num_requests=lambda: requests,
        total_queued_requests=lambda: 0.0,
        aggregated_metrics=lambda: stats,  # as Ray does, who reckons only what is asked for
        raw_metrics=dict,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=AutoscalingConfig(max_replicas=8),
    )


@pytest.mark.parametrize(
    ("patches", "requests", "wanted"),
    [
        ((0.0,), 0.0, 0.0),
        ((8000.0,), 0.4, 1.0),
        ((24_000.0,), 0.4, 3.0),  # a few huge images: hardly a request, three replicas' work
        (
            (4000.0, 12_000.0),
            1.5,
            2.0,
        ),  # what one replica has too much, another may have too little
        ((100.0,), 3.0, 2.0),  # many small ones: two in its slots, one that waits
        ((16_000.0,), 6.0, 4.0),
    ],
)
def test_encoders_are_wanted_by_patches_or_requests_whichever_are_more(
    patches: tuple[float, ...], requests: float, wanted: float
) -> None:
    policy = PatchPolicy(patches=8000)

    answer, state = policy(context("outstanding_patches", patches, requests))

    assert answer == wanted
    assert state == {}


def test_a_replica_that_has_not_reported_yet_is_no_reason_to_fail() -> None:
    for policy in (PatchPolicy(patches=8000), QueueAgePolicy(age_s=0.2)):
        answer, _ = policy(context(requests=0.0))

        assert answer == 0


@pytest.mark.parametrize(
    ("ages", "requests", "wanted"),
    [
        ((0.1,), 0.0, 0.0),
        ((0.2,), 0.0, 0.0),
        ((0.3,), 0.0, 2.0),
        ((0.0, 0.3), 0.0, 3.0),  # one is late: an average would hide it
        ((9.0, 9.0), 0.0, 3.0),  # one more at a time, however late
        ((0.0,), 96.0, 1.5),
        ((0.3,), 320.0, 5.0),
    ],
)
def test_batchers_are_wanted_by_the_oldest_image_or_by_calls_whichever_are_more(
    ages: tuple[float, ...], requests: float, wanted: float
) -> None:
    policy = QueueAgePolicy(age_s=0.2, requests=64)

    answer, state = policy(context("queue_age_s", ages, requests))

    assert answer == wanted
    assert state == {}


@pytest.mark.parametrize(
    ("policy", "targets"),
    [
        (PatchPolicy, {}),
        (PatchPolicy, {"patches": 0}),
        (PatchPolicy, {"patches": 1, "requests": 0}),
        (PatchPolicy, {"patches": 1, "age_s": 1}),
        (QueueAgePolicy, {}),
        (QueueAgePolicy, {"age_s": -1}),
        (QueueAgePolicy, {"age_s": 1, "patches": 1}),
    ],
)
def test_a_target_that_is_missing_unknown_or_not_positive_is_refused(
    policy: type, targets: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        policy(**targets)


def test_ray_makes_one_policy_of_the_class_and_the_arguments_that_yaml_names() -> None:
    named = AutoscalingPolicy(
        policy_function="serve_app.autoscaling:PatchPolicy", policy_kwargs={"patches": 8000}
    )

    policy = _resolve_policy_callable(named)

    answer, _ = policy(context("outstanding_patches", (24_000.0,)))
    assert answer == 3.0


def test_a_fused_replica_reports_what_either_policy_reads(tmp_path: Path) -> None:
    encoder = str(write_tiny_encoder(tmp_path))
    service = fused_service(AppArgs(encoder=encoder, device="cpu"), EncoderConfig.load(encoder), 2)

    stats = service.record_autoscaling_stats()

    assert stats == {"queue_age_s": 0.0, "outstanding_patches": 0}
