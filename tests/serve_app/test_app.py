"""The arguments of `serve_config.yaml`, and the deployments that the app makes of them."""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from encoders.config import EncoderConfig, ImageLimits, ShortestEdge
from encoders.errors import ConfigError
from encoders.sizes import grid_thw

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    from ray.serve._private.build_app import BuiltApplication
    from ray.serve._private.build_app import build_app as unfold
    from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

    from serve_app.app import SLOTS, build_app, resolve_device
    from serve_app.args import AppArgs, check_limits, max_patches
    from serve_app.endpoints import ApiLimits
    from serve_app.sglang.settings import SGLangSettings
    from serve_app.sglang.slots import MAX_CALLS
    from serve_app.waiting import BatchLimits

CONFIG_FILE = Path(__file__).parents[2] / "serve_config.yaml"
CONFIG = EncoderConfig.load("dinov2-demo")
LARGE = BatchLimits(max_patches=65_536)


def read_config_file() -> dict[str, Any]:
    return yaml.safe_load(CONFIG_FILE.read_text(encoding="utf-8"))


def application() -> dict[str, Any]:
    (only,) = read_config_file()["applications"]
    return only


def built(device: str = "cpu") -> BuiltApplication:
    return unfold(build_app(AppArgs(device=device)), name="encoder")


@pytest.mark.parametrize(
    "args",
    [
        {"encodr": "dinov2-demo"},
        {"api": {"max_image": 3}},
        {"batch": {"max_patch": 3}},
        {"queue": {"threads": 3}},
        {"device": "tpu"},
        {"api": {"max_images": 0}},
        {"batch": {"max_bytes": -1}},
        {"queue": {"decode_threads": 0}},
        {"api": {"request_timeout_s": 0}},
        {"sglang": {"receivers": "everywhere"}},
    ],
    ids=repr,
)
def test_an_unknown_key_or_an_impossible_value_is_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AppArgs.model_validate(args)


def test_the_defaults_fit_each_other_and_the_shipped_encoder() -> None:
    admitted = check_limits(AppArgs(), CONFIG)

    assert admitted is None


PIXELS = CONFIG.limits.max_pixels
PATCHES = max_patches(CONFIG)


def args(**changes: dict[str, int]) -> AppArgs:
    return AppArgs.model_validate(changes)


PAIRS: dict[str, tuple[AppArgs, AppArgs, str]] = {
    "images": (
        args(api={"max_images": 8}, queue={"max_images": 8}),
        args(api={"max_images": 9}, queue={"max_images": 8}),
        "api.max_images may be 9, over queue.max_images = 8",
    ),
    "bytes": (
        args(api={"max_body_bytes": 800}, queue={"max_bytes": 800}),
        args(api={"max_body_bytes": 801}, queue={"max_bytes": 800}),
        "api.max_body_bytes may be 801, over queue.max_bytes = 800",
    ),
    "pixels in a batch": (
        args(batch={"max_bytes": 3 * PIXELS}),
        args(batch={"max_bytes": 3 * PIXELS - 1}),
        f"a decoded image may be {3 * PIXELS}, over batch.max_bytes = {3 * PIXELS - 1}",
    ),
    "pixels in the queue": (
        args(queue={"max_decoded_bytes": 3 * PIXELS}),
        args(queue={"max_decoded_bytes": 3 * PIXELS - 1}),
        f"a decoded image may be {3 * PIXELS}, over queue.max_decoded_bytes = {3 * PIXELS - 1}",
    ),
    "patches": (
        args(batch={"max_patches": PATCHES}),
        args(batch={"max_patches": PATCHES - 1}),
        f"an image's patches may be {PATCHES}, over batch.max_patches = {PATCHES - 1}",
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_limit_that_admits_just_as_much_as_the_next_holds_is_accepted(pair: str) -> None:
    fits, _, _ = PAIRS[pair]

    admitted = check_limits(fits, CONFIG)

    assert admitted is None


@pytest.mark.parametrize("pair", PAIRS)
def test_a_limit_that_admits_more_than_the_next_holds_is_refused_with_both(pair: str) -> None:
    _, exceeds, message = PAIRS[pair]

    with pytest.raises(ConfigError) as caught:
        check_limits(exceeds, CONFIG)

    assert str(caught.value) == message


def test_an_encoder_that_admits_larger_images_needs_larger_budgets() -> None:
    config = CONFIG.model_copy(update={"limits": ImageLimits(max_pixels=100_000_000)})

    with pytest.raises(ConfigError, match=r"^a decoded image may be 300000000, over batch"):
        check_limits(AppArgs(), config)


def test_building_refuses_limits_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"api\.max_images"):
        build_app(args(api={"max_images": 2000}))


def test_building_refuses_an_encoder_that_is_not_shipped() -> None:
    with pytest.raises(ConfigError, match=r"no encoder named 'dino'; shipped are .*dinov2-demo"):
        build_app(AppArgs(encoder="dino"))


@pytest.mark.parametrize("seed", range(3))
def test_no_image_has_more_patches_than_the_largest_that_is_reckoned_with(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(2000):
        max_pixels = choose.randint(1, 300_000)
        shortest_edge = choose.randint(1, 1000)
        resize = ShortestEdge(
            rule="shortest_edge", shortest_edge=shortest_edge, max_pixels=max_pixels
        )
        config = CONFIG.model_copy(update={"resize": resize})

        frames, rows, columns = grid_thw(config, choose.randint(1, 9000), choose.randint(1, 9000))

        assert frames * rows * columns <= max_patches(config)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_is_named_is_taken_without_asking_a_cluster(device: str) -> None:
    resolved = resolve_device(device)

    assert resolved == device


def test_the_app_is_three_deployments_behind_the_ingress() -> None:
    app = built()

    assert sorted(x.name for x in app.deployments) == ["Batcher", "Encoder", "Ingress"]
    assert app.ingress_deployment_name == "Ingress"


@pytest.mark.parametrize(("device", "num_gpus"), [("cpu", 0), ("cuda", 1)])
def test_only_an_encoder_takes_a_gpu_and_only_on_one(device: str, num_gpus: int) -> None:
    app = built(device)

    gpus = {x.name: (x.ray_actor_options or {}).get("num_gpus", 0) for x in app.deployments}
    assert gpus == {"Ingress": 0, "Batcher": 0, "Encoder": num_gpus}


@pytest.mark.parametrize("topology", ["split", "fused"])
@pytest.mark.parametrize(("device", "patient"), [("cpu", True), ("cuda", False)])
def test_threads_of_an_encoder_on_a_cpu_do_not_spin(
    device: str, patient: bool, topology: str
) -> None:
    app = unfold(
        build_app(AppArgs(encoder="qwen3-vl-2b", device=device, topology=topology, batch=LARGE)),
        name="encoder",
    )

    tier = "Encoder" if topology == "split" else "Ingress"
    (options,) = (x.ray_actor_options or {} for x in app.deployments if x.name == tier)
    variables = options.get("runtime_env", {}).get("env_vars", {})
    assert (variables.get("OMP_WAIT_POLICY") == "PASSIVE") is patient


def test_an_encoder_has_as_many_requests_as_slots_and_the_others_leave_refusing_to_us() -> None:
    app = built()

    ongoing = {x.name: x.max_ongoing_requests for x in app.deployments}
    assert ongoing["Encoder"] == SLOTS == 2
    assert min(ongoing["Ingress"], ongoing["Batcher"]) >= 1024


def test_who_waits_for_a_slot_asks_again_before_a_batch_is_done() -> None:
    (encoder,) = (x for x in built().deployments if x.name == "Encoder")

    router = encoder._deployment_config.request_router_config
    assert router.initial_backoff_s <= router.max_backoff_s <= 0.02


def test_ingress_has_room_for_calls_that_wait_and_for_those_that_they_wait_for() -> None:
    app = unfold(
        build_app(
            AppArgs(encoder="qwen3-vl-2b", device="cpu", batch=LARGE, sglang=SGLangSettings())
        ),
        name="encoder",
    )

    (ingress,) = (x for x in app.deployments if x.name == "Ingress")
    # Two kinds of calls are limited, and the rest is for registrations and health.
    assert ingress.max_ongoing_requests > 2 * MAX_CALLS


def test_building_refuses_sglang_in_front_of_a_tower_that_it_has_no_model_for() -> None:
    with pytest.raises(ConfigError, match="sglang: SGLang splits no encoder of family dinov2 off"):
        build_app(AppArgs(device="cpu", sglang=SGLangSettings()))


def test_building_refuses_a_timeout_at_which_sglang_has_given_up() -> None:
    limits = ApiLimits(request_timeout_s=170)
    args = AppArgs(encoder="qwen3-vl-2b", device="cpu", batch=LARGE, api=limits)
    build_app(args)

    with pytest.raises(ConfigError, match="request_timeout_s is 170, with sglang it has to be be"):
        build_app(args.model_copy(update={"sglang": SGLangSettings()}))


def test_the_shipped_file_has_valid_arguments_that_fit_each_other() -> None:
    arguments = AppArgs.model_validate(application()["args"])

    check_limits(arguments, EncoderConfig.load(arguments.encoder))

    assert arguments.device == "auto"


def test_the_shipped_file_names_exactly_the_deployments_that_the_app_makes() -> None:
    names = [deployment["name"] for deployment in application()["deployments"]]

    made = [deployment.name for deployment in built().deployments]

    assert sorted(names) == sorted(made)


def test_the_shipped_file_leaves_the_actor_options_of_the_encoder_to_the_app() -> None:
    options = {x["name"]: x.get("ray_actor_options") for x in application()["deployments"]}

    assert options["Encoder"] is None


def test_the_shipped_file_has_no_key_that_ray_would_overlook() -> None:
    config = read_config_file()

    parsed = ServeDeploySchema.model_validate(config)

    assert set(config) <= set(ServeDeploySchema.model_fields)
    assert set(application()) <= set(ServeApplicationSchema.model_fields)
    for deployment in application()["deployments"]:
        assert set(deployment) <= set(DeploymentSchema.model_fields)
    assert parsed.applications[0].import_path == f"{build_app.__module__}:{build_app.__name__}"


def test_ray_can_read_the_type_of_the_arguments_from_the_builder() -> None:
    annotation = build_app.__annotations__["args"]

    assert annotation is AppArgs, "as a string, Ray would pass a plain dict"


def test_the_shipped_file_listens_on_this_machine_alone() -> None:
    options = read_config_file()["http_options"]

    assert options["host"] == "127.0.0.1"
