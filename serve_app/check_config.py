"""`python -m serve_app.check_config FILE...`: what is wrong with files for `serve run`, strictly.

Ray itself takes unknown keys of most kinds without a word, and so serves something else.
"""

import inspect
import sys
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from ray._common.utils import import_attr
from ray.runtime_env import RuntimeEnv
from ray.serve import Deployment
from ray.serve._private.build_app import build_app as unfold  # the only way to see its deployments
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from encoders.errors import ConfigError
from serve_app.app import SLOTS, build_app
from serve_app.args import AppArgs
from serve_app.autoscaling import AgeTargets, PatchTargets

Problems = Iterator[str]
UNREADABLE = (ImportError, AttributeError, TypeError, ValueError)
"""What Ray's models and ours raise; Ray imports policies while it validates."""


def check(path: Path) -> list[str]:
    """One line per problem of a file; none if Ray serves what it says."""
    try:
        text = path.read_text(encoding="utf-8")
        config, nodes = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, yaml.YAMLError) as error:
        return [" ".join(str(error).split())]
    if not isinstance(config, dict):
        return ["the file is no mapping"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray deprecates `metrics_interval_s`, and reads it still
        problems = [
            *repeated_keys(nodes),
            *unknown_keys(ServeDeploySchema, config, ""),
            *invalid(ServeDeploySchema, config, ""),
        ]
        for place, app in _mappings(config.get("applications"), "applications"):
            problems += application(app, place)
    return list(dict.fromkeys(problems))  # some are noticed at two levels


def repeated_keys(node: yaml.Node | None) -> Problems:
    """Keys that stand twice in one mapping: the last would win in silence."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from repeated_keys(item)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        line = node.start_mark.line + 1
        for key in {key for key in keys if keys.count(key) > 1}:
            yield f"line {line}: the mapping has {key!r} {keys.count(key)} times"
        for _, value in node.value:
            yield from repeated_keys(value)


def unknown_keys(model: type[BaseModel], values: dict[str, Any], place: str) -> Problems:
    """Keys that Ray would overlook, at any depth, as far as its own models reach."""
    for key, value in values.items():
        where = f"{place}.{key}".lstrip(".")
        if key not in model.model_fields:
            yield from unknown(key, list(model.model_fields), place)
        elif key == "runtime_env" and isinstance(value, dict):
            for name in sorted(value.keys() - RuntimeEnv.known_fields, key=str):
                yield from unknown(name, list(RuntimeEnv.known_fields), where)
        else:
            for inner in _models(model.model_fields[key].annotation):
                for there, item in _mappings(value, where):
                    yield from unknown_keys(inner, item, there)


def unknown(key: Any, known: list[str], place: str) -> Problems:
    """The line about an unknown key, with a guess at what was meant."""
    meant = get_close_matches(str(key), known, 1)
    guess = f"; perhaps {meant[0]}?" if meant else f"; known are {', '.join(sorted(known))}"
    yield f"{place}: ".lstrip(": ") + f"unknown key {key!r}{guess}"


def invalid(model: type[BaseModel], values: Any, place: str) -> Problems:
    """What pydantic says of the values, one line each."""
    try:
        model.model_validate(values)
    except UNREADABLE as error:
        yield from said(error, place, but="extra_forbidden")  # `unknown_keys` says it better


def said(error: Exception, place: str, but: str = "") -> Problems:
    """What an error says: pydantic's holds many, of which one type is left out."""
    if not isinstance(error, ValidationError):
        yield f"{place}: {error}"
        return
    for problem in error.errors():
        if problem["type"] != but:
            steps = (f"[{x}]" if isinstance(x, int) else f".{x}" for x in problem["loc"])
            yield f"{(place + ''.join(steps)).lstrip('.')}: {problem['msg']}".lstrip(": ")


def application(app: dict[str, Any], place: str) -> Problems:
    """What is wrong with one application besides its keys."""
    try:
        builder = import_attr(str(app.get("import_path")))
    except UNREADABLE as error:
        yield f"{place}.import_path: cannot be imported: {error}"
        return
    if builder is not build_app:
        yield f"{place}.import_path: {app['import_path']} is not serve_app.app:build_app"
        return
    values = app.get("args") or {}
    problems = [*unknown_keys(AppArgs, values, f"{place}.args")]
    if problems := [*problems, *invalid(AppArgs, values, f"{place}.args")]:
        yield from problems
        return
    args = AppArgs.model_validate(values)
    try:
        # Devices are the cluster's business; which deployments there are does not depend on them.
        made = unfold(build_app(args.model_copy(update={"device": "cpu"})), name="checked")
    except ConfigError as error:
        yield f"{place}.args: {error}"
        return
    yield from deployments(app, args, {x.name: x for x in made.deployments}, place)


def deployments(
    app: dict[str, Any], args: AppArgs, made: dict[str, Deployment], place: str
) -> Problems:
    """Whether the file names what the topology makes, and leaves what must be left to the app."""
    listed = list(_mappings(app.get("deployments"), f"{place}.deployments"))
    named = [values.get("name") for _, values in listed]
    for missing in sorted(made.keys() - set(named)):
        yield f"{place}.deployments: {missing}, which topology {args.topology} makes, is not named"
    for where, values in listed:
        name = values.get("name")
        if name not in made:
            names = ", ".join(sorted(made))
            yield f"{where}.name: topology {args.topology} makes {names}; not {name!r}"
            continue
        if named.count(name) > 1:
            yield f"{where}.name: {name} is named {named.count(name)} times"
        yield from actor_options(made[name], values.get("ray_actor_options"), where)
        if isinstance(values.get("autoscaling_config"), dict):
            yield from autoscaling(made[name], args, values, where)


def actor_options(deployment: Deployment, options: Any, place: str) -> Problems:
    """Ray replaces the app's options by the file's, so these must not lose any."""
    ours = deployment.ray_actor_options or {}
    if options is None:
        return
    lost = [key for key, value in ours.items() if options.get(key) != value and key != "num_cpus"]
    if _has_encoder(deployment):
        lost = ["num_gpus", *(key for key in lost if key != "num_gpus")]  # it depends on `device`
    if lost:
        yield f"{place}.ray_actor_options: would replace the app's own, and lose {', '.join(lost)}"


def autoscaling(
    deployment: Deployment, args: AppArgs, values: dict[str, Any], place: str
) -> Problems:
    """Whether the policy exists, takes its arguments, and can ever ask for a replica more."""
    config = values["autoscaling_config"]
    place = f"{place}.autoscaling_config"
    if problems := list(invalid(AutoscalingConfig, config, place)):
        yield from problems
        return
    parsed = AutoscalingConfig.model_validate(config)
    ongoing = values.get("max_ongoing_requests", deployment.max_ongoing_requests)
    if parsed.policy.is_default_policy_function():
        target = parsed.target_ongoing_requests or 0
        yield from below("target_ongoing_requests", target, ongoing, place)
        return
    if "target_ongoing_requests" in config:
        yield f"{place}.target_ongoing_requests: is not read by a policy of one's own"
    place = f"{place}.policy"
    function, kwargs = str(parsed.policy.policy_function), parsed.policy.policy_kwargs
    policy = import_attr(function)
    if not inspect.isclass(policy):
        if kwargs:
            yield f"{place}.policy_kwargs: are not read by {function}, which is no class"
        return
    try:
        targets = getattr(policy(**kwargs), "targets", None)
    except UNREADABLE as error:
        yield from said(error, f"{place}.policy_kwargs")
        return
    if isinstance(targets, PatchTargets | AgeTargets):
        yield from below("policy_kwargs.requests", targets.requests, ongoing, place)
    if isinstance(targets, PatchTargets):
        most = SLOTS * args.batch.max_patches
        yield from below("policy_kwargs.patches", targets.patches, most, place)
        if not _has_encoder(deployment):
            yield f"{place}.policy_function: {deployment.name} holds no encoder, so no patches"


def below(name: str, target: float, most: int, place: str) -> Problems:
    """A replica that is full must be over its target, or there is never another."""
    if target >= most:
        yield f"{place}.{name}: is {target:g}, which a replica cannot exceed: it takes {most}"


def main(names: list[str]) -> int:
    """Print every problem of every file. The exit status: 1 if there are any, 2 without a file."""
    problems = [f"{name}: {problem}" for name in names for problem in check(Path(name))]
    problems = problems if names else ["usage: python -m serve_app.check_config FILE..."]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return (1 if problems else 0) if names else 2


def _has_encoder(deployment: Deployment) -> bool:
    return "num_gpus" in (deployment.ray_actor_options or {})


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model that a field's type mentions."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _mappings(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A mapping, or those of a list, each with its place."""
    for where, item in (
        [(f"{place}[{i}]", x) for i, x in enumerate(value)]
        if isinstance(value, list)
        else [(place, value)]
    ):
        if isinstance(item, dict):
            yield where, item


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
