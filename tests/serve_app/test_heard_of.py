"""What is remembered of encoders: how they stood, by replica, and not for ever."""

import numpy as np
import pytest

from encoders.graph_keys import Planner
from encoders.graph_stats import Digest, GraphStats
from serve_app import heard_of
from serve_app.heard_of import HeardOf
from serve_app.service import Encoded

DIGEST = Digest(Planner("exact", 1, 64, 8), frozenset(), 1000)


def encoded(encoder: str, hits: int = 0) -> Encoded:
    return Encoded(np.zeros((1, 3), np.float32), encoder, GraphStats(hits=hits), DIGEST)


def test_the_last_answer_of_each_encoder_counts_and_rows_are_not_kept() -> None:
    heard = HeardOf()
    heard.heard("replica-1", encoded("host:1", hits=1))
    heard.heard("replica-2", encoded("host:2", hits=5))
    heard.heard("replica-1", encoded("host:1", hits=2))

    assert {name: stats.hits for name, stats in heard.graphs().items()} == {
        "host:1": 2,
        "host:2": 5,
    }
    assert heard.digest("replica-1") == DIGEST
    assert heard.digest("replica-3") is None
    assert all(len(kept.rows) == 0 for _, kept in heard._last.values())


def test_what_is_silent_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = HeardOf()
    heard.heard("replica-1", encoded("host:1"))

    monkeypatch.setattr(heard_of, "FORGET_AFTER_S", 0.0)

    assert heard.graphs() == {}
    assert heard.digest("replica-1") is None


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heard_of, "MAX_ENCODERS", 3)
    heard = HeardOf()

    for index in range(10):
        heard.heard(f"replica-{index}", encoded(f"host:{index}"))

    assert sorted(heard.graphs()) == ["host:7", "host:8", "host:9"]
