"""The engine's pauses: what is captured in them, and what is told of it."""

import asyncio
import math
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoders import EncoderConfig, attention_kernels
from encoders.attention import Backend
from encoders.attention_kernels import Target, load_aiter
from encoders.captured import GraphMaker
from encoders.config import GraphSettings
from encoders.encoder import Encoder
from encoders.forward import Forward, Results
from encoders.graph_stats import GraphStats
from encoders.packing import PackedBatch
from encoders.sizes import grid_thw
from encoders.towers.load import load_forward
from serve_app import engine as engine_module
from serve_app import graph_metrics
from serve_app.engine import Engine
from tests import fake_aiter
from tests.fake_graphs import FakeRecorder
from tests.serve_app.test_replica import until
from tests.tiny import write_tiny_encoder


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EncoderConfig:
    """A tiny bf16 encoder whose attention can be captured, over the fake recorder."""
    monkeypatch.setattr(attention_kernels, "is_rocm", lambda: True)
    monkeypatch.syspath_prepend(tmp_path)
    fake_aiter.install(tmp_path)
    attention = load_aiter(Target("gfx950", torch.bfloat16, 16))
    backend = Backend("aiter", attention, "device", True)
    monkeypatch.setattr("encoders.towers.load.choose_backend", lambda *_: backend)

    def on(forward: Forward, settings: GraphSettings) -> GraphMaker:
        return GraphMaker(forward, settings, FakeRecorder())

    monkeypatch.setattr(GraphMaker, "on", on)
    config = EncoderConfig.load(str(write_tiny_encoder(tmp_path)))
    limits = {"max_patches": 64, "max_images": 8}
    graphs = GraphSettings(graph_mode="exact", profile=tmp_path / "hot.json", **limits)
    return config.model_copy(update={"dtype": "bfloat16", "graphs": graphs})


def packed(config: EncoderConfig, *values: int) -> PackedBatch:
    pixels = [np.full((28, 28, 3), value, np.uint8) for value in values]
    return PackedBatch.of(pixels, [grid_thw(config, 28, 28)] * len(values), 1)


def no_work(engine: Engine) -> bool:
    return engine._idle_work is None or engine._idle_work.done()


async def test_what_was_missed_is_captured_in_the_next_pause_and_told_with_the_answer(
    config: EncoderConfig,
) -> None:
    engine = Engine(config, "cpu")
    first = await engine.encode(packed(config, 1, 2), "pooled", ())
    second = await engine.encode(packed(config, 1, 2), "pooled", ())
    assert first.graphs.misses == {"unseen": 1}
    await until(lambda: engine._idle_work is not None and engine._idle_work.done())

    third = await engine.encode(packed(config, 1, 2), "pooled", ())

    assert third.graphs.hits == 1
    assert third.encoder == engine.name
    np.testing.assert_array_equal(third.rows, second.rows)


async def test_no_capture_begins_while_a_batch_waits_until_it_is_overdue(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config, "cpu")
    load = [packed(config, *range(n)) for n in (1, 2, 3, 1, 2, 3)]

    async def batches(rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.gather(*(engine.encode(batch, "pooled", ()) for batch in load))

    async def constant_load() -> None:
        await asyncio.gather(batches(3), batches(3))

    during = list[int]()
    idle = engine._encoder.idle
    monkeypatch.setattr(
        engine._encoder, "idle", lambda **kw: during.append(engine._num_batches) or idle(**kw)
    )
    engine._rests_until = math.inf
    monkeypatch.setattr(engine_module, "BUSY_SHARE", 1e-9)
    await constant_load()
    await until(lambda: no_work(engine))
    assert set(during) == {0}
    assert engine._encoder.graphs.stats().captures == 3

    engine._thread.submit(engine._encoder.graphs.release).result()
    during.clear()
    engine._rests_until = 0.0
    monkeypatch.setattr(engine_module, "BUSY_SHARE", 1e9)
    await constant_load()
    await until(lambda: no_work(engine))

    assert max(during) > 0


async def test_under_constant_load_steps_take_no_more_than_their_share_of_the_time(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config, "cpu")
    steps = list[tuple[float, float]]()
    idle = engine._encoder.idle

    def slow(**how: bool) -> bool:
        begin = time.monotonic()
        time.sleep(0.005)
        more = idle(**how)
        steps.append((begin, time.monotonic()))
        return more

    monkeypatch.setattr(engine._encoder, "idle", slow)
    monkeypatch.setattr(engine_module, "BUSY_SHARE", 0.2)

    async def client(start: int) -> None:
        n = start
        while len(steps) < 5:
            n += 1
            await engine.encode(packed(config, *range(1 + n % 7)), "pooled", ())

    await asyncio.gather(*(client(n) for n in (0, 2, 4)))
    under_load = steps[:5]
    await until(lambda: no_work(engine))

    for (begin, end), (later, _) in pairwise(under_load):
        assert later - end >= (end - begin) / 0.2


async def test_idle_work_that_fails_is_logged_and_batches_are_served(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(config, "cpu")

    class OddError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise OddError("a kernel library's own error")

    monkeypatch.setattr(GraphMaker, "record", fail)

    for _ in range(3):
        await engine.encode(packed(config, 1), "pooled", ())
        await until(lambda: no_work(engine))

    assert "a kernel library's own error" in caplog.text


def test_publishing_counts_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = dict[str, float]()

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
            assert value > 0
            name = self.name + "".join((tags or {}).values())
            counted[name] = counted.get(name, 0) + value

    class Gauged(Counted):
        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            counted[self.name + "".join((tags or {}).values())] = value

    monkeypatch.setattr(graph_metrics, "counter", Counted)
    monkeypatch.setattr(graph_metrics, "gauge", Gauged)
    before = GraphStats(hits=3, misses={"queued": 2}, captures=1, capture_ms=500.0)
    after = before.snapshot()
    after.hits, after.capture_ms, after.graphs, after.graph_pool_bytes = 5, 1500.0, 7, 99
    after.misses = {"queued": 3, "failed": 4}

    graph_metrics.publish(before, GraphStats())
    graph_metrics.publish(after, before)

    assert {name: value for name, value in counted.items() if value} == {
        "encoder_graph_batches_totalhit": 5,
        "encoder_graph_batches_totalqueued": 3,
        "encoder_graph_batches_totalfailed": 4,
        "encoder_graph_captures_total": 1,
        "encoder_graph_capture_seconds_total": 1.5,
        "encoder_graph_live": 7,
        "encoder_graph_memory_bytespool": 99,
    }


def test_the_encoder_gives_the_same_bits_with_graphs_and_without(config: EncoderConfig) -> None:
    encoder = Encoder.load(config)
    eager = Encoder(config, load_forward(config, torch.device("cpu"), torch.bfloat16))
    batch = packed(config, 7, 9)

    for _ in range(3):
        rows = encoder.encode(batch)
        while encoder.idle():
            pass
        assert all(torch.equal(a, b) for a, b in zip(rows, eager.encode(batch), strict=True))

    assert encoder.graphs.stats().hits == 1


async def test_the_next_batch_is_launched_before_anybody_has_the_rows_of_the_last(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, come, launched = Engine(config, "cpu"), threading.Event(), list[int]()
    wait, start = Results.wait, engine._encoder.start

    def slow_wait(results: Results) -> list[torch.Tensor]:
        assert come.wait(30)
        return wait(results)

    def noted_start(batch: PackedBatch, *wanted: Any) -> Results:
        launched.append(batch.layout.num_images)
        return start(batch, *wanted)

    monkeypatch.setattr(Results, "wait", slow_wait)
    monkeypatch.setattr(engine._encoder, "start", noted_start)
    tasks = [
        asyncio.create_task(engine.encode(packed(config, *values), "pooled", ()))
        for values in ([1], [2, 3])
    ]
    await until(lambda: launched == [1, 2])
    assert not any(task.done() for task in tasks)

    come.set()
    first, second = await asyncio.gather(*tasks)

    assert (len(first.rows), len(second.rows)) == (1, 2)


async def test_a_device_that_fails_behind_a_launch_fails_that_batch_alone(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config, "cpu")

    def failed(results: Results) -> list[torch.Tensor]:
        raise RuntimeError("an error that the device tells of late")

    with monkeypatch.context() as patch:
        patch.setattr(Results, "wait", failed)
        with pytest.raises(RuntimeError, match="tells of late"):
            await engine.encode(packed(config, 1), "pooled", ())

    assert len((await engine.encode(packed(config, 1, 2), "pooled", ())).rows) == 2
    assert engine._num_batches == 0
