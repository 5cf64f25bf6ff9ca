"""What `python -m serve_app.check_config` finds: mistakes that Ray itself serves in silence."""

import subprocess
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    from serve_app.check_config import check, main

ROOT = Path(__file__).parents[2]
SHIPPED = [ROOT / "serve_config.yaml", *sorted((ROOT / "configs" / "serve").glob("*.yaml"))]
CONFIG: dict[str, Any] = yaml.safe_load(SHIPPED[0].read_text(encoding="utf-8"))

APP = ("applications", 0)
ARGS = (*APP, "args")
INGRESS, BATCHER, ENCODER = ((*APP, "deployments", index) for index in range(3))
SCALING = "autoscaling_config"
POLICY = (*ENCODER, SCALING, "policy")
TARGETS = (*POLICY, "policy_kwargs")


def where(place: tuple[str | int, ...]) -> str:
    """`("applications", 0, "args")` -> `applications[0].args`."""
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in place).lstrip(".")


def problems(folder: Path, *changes: tuple[tuple[str | int, ...], Any]) -> list[str]:
    """What is found in serve_config.yaml after values are put at places; None removes the key."""
    config = deepcopy(CONFIG)
    for (*steps, last), value in changes:
        inner: Any = config
        for step in steps:
            inner = inner[step] if isinstance(step, int) else inner.setdefault(step, {})
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    return check(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_has_no_problem(path: Path) -> None:
    found = check(path)

    assert found == []


@pytest.mark.parametrize(
    ("place", "typo", "meant"),
    [
        ((), "proxy_locatoin", "proxy_location"),
        (("http_options",), "prot", "port"),
        (("logging_config",), "enable_acces_log", "enable_access_log"),
        (("grpc_options",), "prt", "port"),
        (APP, "route_prefx", "route_prefix"),
        ((*APP, "runtime_env"), "env_var", "env_vars"),
        ((*APP, "logging_config"), "log_levl", "log_level"),
        (ARGS, "encodr", "encoder"),
        ((*ARGS, "api"), "max_image", "max_images"),
        ((*ARGS, "queue"), "decode_thread", "decode_threads"),
        ((*ARGS, "sglang"), "receiver", "receivers"),
        (INGRESS, "num_replica", "num_replicas"),
        (INGRESS, "max_ongoing_request", "max_ongoing_requests"),
        ((*INGRESS, SCALING), "target_ongoing_request", "target_ongoing_requests"),
        ((*BATCHER, SCALING), "upscale_delay", "upscale_delay_s"),
        ((*BATCHER, SCALING, "policy"), "policy_kwarg", "policy_kwargs"),
        ((*INGRESS, "ray_actor_options"), "num_gpu", "num_gpus"),
        ((*INGRESS, "ray_actor_options", "runtime_env"), "env_var", "env_vars"),
        ((*INGRESS, "logging_config"), "encodng", "encoding"),
        ((*INGRESS, "request_router_config"), "max_backoff", "max_backoff_s"),
    ],
    ids=lambda x: x if isinstance(x, str) else where(x),
)
def test_a_typo_is_named_with_its_place_and_what_was_meant(
    tmp_path: Path, place: tuple[str | int, ...], typo: str, meant: str
) -> None:
    found = problems(tmp_path, ((*place, typo), 1))

    start = f"{where(place)}: " if place else ""
    assert f"{start}unknown key {typo!r}; perhaps {meant}?" in found


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("proxy_location",), "Everywhere", "proxy_location: Input should be"),
        (("http_options", "port"), "http", "http_options.port: Input should be a valid integer"),
        ((*APP, "import_path"), "serve_app.app:bild", "applications[0].import_path: cannot be imp"),
        ((*APP, "import_path"), "serve_app.app:ingress", "applications[0].import_path: serve_app."),
        ((*ARGS, "device"), "gpu", "applications[0].args.device: Input should be 'auto', 'cpu'"),
        ((*ARGS, "encoder"), "dino", "applications[0].args: no encoder named 'dino'; shipped are"),
        ((*ARGS, "api", "max_images"), 5000, "applications[0].args: api.max_images may be 5000"),
        ((*ARGS, "sglang"), {"dtype": "bf16"}, "applications[0].args.sglang.dtype: Input should"),
        ((*ARGS, "sglang"), {"receivers": ["a"]}, "applications[0].args.sglang.receivers[0]: val"),
        ((*ARGS, "sglang"), {}, "applications[0].args: sglang: SGLang splits no encoder of famil"),
        ((*ARGS, "topology"), "fused", "applications[0].deployments[1].name: topology fused makes"),
        ((*ENCODER, "name"), "Encodr", "applications[0].deployments[2].name: topology split makes"),
        ((*ENCODER, "name"), "Encodr", "applications[0].deployments: Encoder, which topology spl"),
        ((*ENCODER, "name"), "Batcher", "applications[0].deployments[2].name: Batcher is named 2"),
        (ENCODER, {}, "applications[0].deployments[2].name: Field required"),
        ((*APP, "deployments"), {}, "applications[0].deployments: Input should be a valid list"),
        (("applications",), [7], "applications[0]: Input should be a valid dictionary"),
        ((*ENCODER, "num_replicas"), 2, "applications[0].deployments[2]: Value error, Manually"),
        (
            (*ENCODER, "ray_actor_options"),
            {"num_cpus": 1},
            "applications[0].deployments[2].ray_actor_options: would replace the app's own, and "
            "lose num_gpus",
        ),
        (
            (*ENCODER, "ray_actor_options"),
            {"num_gpus": 0, "num_cpus": 1},
            "applications[0].deployments[2].ray_actor_options: would replace the app's own, and "
            "lose num_gpus",
        ),
        (
            (*INGRESS, "ray_actor_options"),
            {"num_cpus": 1},
            "applications[0].deployments[0].ray_actor_options: would replace the app's own, and "
            "lose runtime_env",
        ),
    ],
)
def test_a_value_that_ray_or_the_app_would_stumble_over_is_named_with_its_place(
    tmp_path: Path, place: tuple[str | int, ...], value: Any, said: str
) -> None:
    found = problems(tmp_path, (place, value))

    assert [line for line in found if line.startswith(said)], found


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ((*INGRESS, SCALING, "target_ongoing_requests"), 1024, ".target_ongoing_requests: is 1024"),
        ((*INGRESS, "max_ongoing_requests"), 64, ".target_ongoing_requests: is 64, which a replic"),
        ((*INGRESS, SCALING, "max_replicas"), 0, ".max_replicas: Input should be greater than 0"),
        ((*INGRESS, SCALING, "min_replicas"), 3, ": Value error, max_replicas (2) must be greater"),
        ((*TARGETS, "patches"), 0, ".policy.policy_kwargs.patches: Input should be greater than"),
        ((*TARGETS, "patches"), None, ".policy.policy_kwargs.patches: Field required"),
        ((*TARGETS, "patches"), 32_768, ".policy.policy_kwargs.patches: is 32768, which a replic"),
        ((*TARGETS, "requests"), 2, ".policy.policy_kwargs.requests: is 2, which a replica canno"),
        ((*TARGETS, "patch"), 2, ".policy.policy_kwargs.patch: Extra inputs are not permitted"),
        ((*POLICY, "policy_kwargs"), 3, ".policy.policy_kwargs: Input should be a valid dictiona"),
        (POLICY, {"policy_function": "serve_app.autoscaling:Patch"}, ": module 'serve_app.autosca"),
        (POLICY, {"policy_function": "serve_app.scaling:Policy"}, ": No module named 'serve_app.s"),
        (
            POLICY,
            {"policy_function": "math:floor", "policy_kwargs": {"x": 1}},
            ".policy.policy_kwargs: are not read by math:floor, which is no class",
        ),
        (
            (*ENCODER, SCALING, "target_ongoing_requests"),
            1,
            ".target_ongoing_requests: is not read by a policy of one's own",
        ),
        (
            (*BATCHER, SCALING, "policy"),
            CONFIG["applications"][0]["deployments"][2][SCALING]["policy"],
            ".policy.policy_function: Batcher holds no encoder, so no patches",
        ),
    ],
)
def test_a_deployment_that_could_never_scale_as_it_says_is_refused(
    tmp_path: Path, place: tuple[str | int, ...], value: Any, said: str
) -> None:
    found = problems(tmp_path, (place, value))

    prefix = f"{where(place[:4])}.{SCALING}"
    assert [line for line in found if line.startswith(prefix + said)], found


def test_no_wrong_key_or_value_hides_another(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        (("http_options", "prot"), 1),
        ((*ARGS, "device"), "gpu"),
        ((*ENCODER, "num_replica"), 1),
    )

    assert len(found) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("applications: [", "while parsing a flow node"),
        ("- applications", "the file is no mapping"),
        (
            "applications: []\nproxy_location: HeadOnly\napplications: []",
            "line 1: the mapping has ",
        ),
        (
            "applications:\n- {name: a, name: b, import_path: 'a:b'}",
            "line 2: the mapping has 'name",
        ),
        ("proxy_location: HeadOnly", "applications: Field required"),
    ],
)
def test_a_file_that_is_no_application_file_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "serve_config.yaml"
    path.write_text(text)

    found = check(path)

    assert [line for line in found if line.startswith(said)], found


def test_the_command_fails_with_a_line_per_problem_that_begins_with_the_file(
    tmp_path: Path,
) -> None:
    problems(tmp_path, (("http_options", "prot"), 1))
    files = [SHIPPED[0], tmp_path / "serve_config.yaml", tmp_path / "missing.yaml"]

    result = subprocess.run(
        [sys.executable, "-m", "serve_app.check_config", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert result.stderr.splitlines() == [
        f"{tmp_path}/serve_config.yaml: http_options: unknown key 'prot'; perhaps port?",
        f"{tmp_path}/missing.yaml: [Errno 2] No such file or directory: '{tmp_path}/missing.yaml'",
    ]
    assert result.returncode == 1


def test_the_command_succeeds_in_silence_and_wants_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, alone = main([str(SHIPPED[0])]), main([])

    assert (right, alone) == (0, 2)
    assert capsys.readouterr().err == "usage: python -m serve_app.check_config FILE...\n"
