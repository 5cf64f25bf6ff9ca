"""The table of metrics, the page printed of it, and the code that uses it are one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app import metrics

ROOT = Path(__file__).parents[2]
MAKERS = {"counter": "counter", "gauge": "gauge", "histogram": "histogram"}
MAKERS |= {"timed": "histogram", "observe_since": "histogram"}


def used() -> dict[str, set[str]]:
    """Names of metrics in our code, each with the kinds as which it is used."""
    found = dict[str, set[str]]()
    for file in sorted((ROOT / "serve_app").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            maker, name = ast.unparse(node.func).split(".")[-1], node.args[0]
            if maker in MAKERS and isinstance(name, ast.Constant):
                found.setdefault(str(name.value), set()).add(MAKERS[maker])
    return found


def test_the_page_is_what_the_table_prints() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    assert page == metrics.markdown(), "run: python -m serve_app.metrics > docs/metrics.md"


def test_the_command_prints_the_page() -> None:
    command = [sys.executable, "-m", "serve_app.metrics"]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert result.stdout == metrics.markdown()


def test_every_metric_is_used_and_every_use_is_of_a_metric_of_that_kind() -> None:
    table = {metric.name: {metric.kind} for metric in metrics.TABLE}

    assert used() == table


def test_names_are_unique_and_say_what_they_count_in() -> None:
    names = [metric.name for metric in metrics.TABLE]

    assert len(set(names)) == len(names)
    for metric in metrics.TABLE:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.endswith("_ms") == (metric.unit == "ms"), metric.name


@pytest.mark.parametrize("metric", metrics.TABLE, ids=lambda metric: metric.name)
def test_boundaries_rise_and_belong_to_histograms_alone(metric: metrics.Metric) -> None:
    assert list(metric.boundaries) == sorted(set(metric.boundaries))
    assert bool(metric.boundaries) == (metric.kind == "histogram")


def test_a_metric_that_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="encoder_cats_total"):
        metrics.counter("encoder_cats_total")


def test_a_metric_is_made_once_per_process() -> None:
    first = metrics.counter("encoder_images_total")

    assert metrics.counter("encoder_images_total") is first


def test_a_block_is_timed_in_milliseconds_even_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = list[float]()
    histogram = metrics.histogram("encoder_decode_ms")
    monkeypatch.setattr(histogram, "observe", seen.append)

    with pytest.raises(KeyError), metrics.timed("encoder_decode_ms"):
        raise KeyError

    (milliseconds,) = seen
    assert 0 <= milliseconds < 1000
