"""What `python -m serve_app --production` sets, and what it says of ports."""

import sys

import pytest

from encoders.errors import ConfigError
from serve_app import production


def test_the_environment_gets_what_is_missing_and_keeps_the_rest() -> None:
    given = {"PATH": "/bin", "MALLOC_TRIM_THRESHOLD_": "7", "RAY_SERVE_HAPROXY_BINARY_PATH": "/x"}

    wanted = production.environment(given)

    assert wanted["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert wanted["MALLOC_MMAP_THRESHOLD_"] == production.MALLOC["MALLOC_MMAP_THRESHOLD_"]
    assert wanted.items() >= given.items()
    assert production.environment(wanted) == wanted


def test_haproxy_is_there_or_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="RAY_SERVE_ENABLE_HA_PROXY"):
        production.environment({"RAY_SERVE_ENABLE_HA_PROXY": "0"})
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux only, not darwin"):
        production.environment({})


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", None, True), ("0.0.0.0", "secret", False), ("127.0.0.1", None, False)],
)
def test_every_port_is_told_and_a_missing_key_is_a_warning(
    host: str, key: str | None, warned: bool
) -> None:
    api = {"api": {"api_key": key}} if key else {}
    config = {
        "http_options": {"host": host, "port": 8001},
        "applications": [{"name": "encoder", "args": {"topology": "fused", **api}}],
    }
    moved = {"RAY_SERVE_HAPROXY_STATS_PORT": "8405"}

    lines = list(production.opened(config, moved))

    assert [line.split(",")[0] for line in lines[:5]] == [
        f"requests: {host}:8001",
        f"replicas: {host}:30000-31000",
        f"fallback: {host}:8500",
        "metrics: 0.0.0.0:9101/metrics",
        "statistics: 0.0.0.0:8405/stats",
    ]
    assert any(line.startswith("WARNING: encoder has no") for line in lines[5:]) == warned
    assert "secret" not in "".join(lines)


def test_a_file_without_a_host_is_served_on_every_interface() -> None:
    assert next(production.opened({}, {})) == "requests: 0.0.0.0:8000, by HAProxy"


def test_a_ray_that_runs_already_is_a_warning() -> None:
    lines = list(production.opened({}, {"RAY_ADDRESS": "10.0.0.1:6379"}))

    assert any("the Ray at 10.0.0.1:6379 runs already" in line for line in lines)
