"""An encoder replica on its own: its canary, its health, its figures, its one engine thread."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from encoders import EncoderConfig
from encoders.encoder import Encoder
from encoders.packing import PackedBatch
from encoders.sizes import grid_thw
from serve_app import replica as replica_module
from serve_app.engine import Engine, Started
from serve_app.replica import EncoderReplica
from tests.tiny import write_tiny_encoder


class ObservedEngine(Engine):
    """The real engine, which notes what it runs, and waits or fails when told to."""

    def __init__(self, config: EncoderConfig, device: str, *, lends: bool) -> None:
        self.encoded = list[int]()
        """Images in each batch that it began."""
        self.threads = set[str]()
        self.num_running = 0
        self.most_running = 0
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None
        super().__init__(config, device, lends=lends)

    def _start(self, batch: PackedBatch, *wanted: Any) -> Started:
        self.encoded.append(batch.layout.num_images)
        self.threads.add(threading.current_thread().name)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            return super()._start(batch, *wanted)
        finally:
            self.num_running -= 1


def observed(config: EncoderConfig, hang_after_s: float = 60.0) -> tuple[EncoderReplica, Any]:
    """The real replica, and its engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_module, "Engine", ObservedEngine)
        replica = EncoderReplica(config, "cpu", hang_after_s)
    return replica, replica._engine


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EncoderConfig:
    return EncoderConfig.load(str(write_tiny_encoder(tmp_path_factory.mktemp("tiny"))))


def packed(config: EncoderConfig, *values: int) -> PackedBatch:
    """A batch of grey images, of four patches each."""
    pixels = [np.full((28, 28, 3), value, np.uint8) for value in values]
    return PackedBatch.of(pixels, [grid_thw(config, 28, 28)] * len(values), 1)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop and the engine go on until the condition holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (of a thread's work there is no event)
            await asyncio.sleep(0.001)


def outstanding(replica: EncoderReplica) -> float:
    return replica.record_autoscaling_stats()["outstanding_patches"]


def test_a_replica_encodes_the_canary_before_it_exists(config: EncoderConfig) -> None:
    replica, engine = observed(config)

    assert engine.encoded == [1]
    assert outstanding(replica) == 0


def test_a_replica_whose_engine_fails_the_canary_does_not_exist(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(Encoder, "start", broken)

    with pytest.raises(RuntimeError, match="no kernel image"):
        EncoderReplica(config, "cpu", 60.0)


async def test_rows_are_those_of_the_bare_encoder(config: EncoderConfig) -> None:
    replica, batch = EncoderReplica(config, "cpu", 60.0), packed(config, 10, 200, 90)

    rows = (await replica.encode(batch)).rows

    expected = np.stack([row.numpy() for row in Encoder.load(config).encode(batch)])
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, expected, atol=1e-6)


async def test_batches_that_come_at_once_run_one_after_another_on_one_thread(
    config: EncoderConfig,
) -> None:
    replica, engine = observed(config)
    singles = [(await replica.encode(packed(config, value))).rows for value in range(0, 250, 10)]

    rows = await asyncio.gather(
        *(replica.encode(packed(config, value)) for value in range(0, 250, 10))
    )

    assert engine.most_running == 1
    assert len(engine.threads) == 1
    assert engine.threads != {threading.current_thread().name}
    np.testing.assert_allclose([answer.rows for answer in rows], singles, atol=1e-6)


async def test_patches_count_from_the_call_to_its_end_and_no_longer(config: EncoderConfig) -> None:
    replica, engine = observed(config)
    engine.go.clear()

    tasks = [asyncio.create_task(replica.encode(packed(config, *range(n)))) for n in (1, 2)]
    await until(lambda: engine.num_running == 1)
    during = outstanding(replica)
    engine.go.set()
    await asyncio.gather(*tasks)

    assert during == 4 * 3, "the batch that waits behind counts too"
    assert outstanding(replica) == 0


async def test_a_batch_that_fails_counts_no_longer_and_the_next_is_encoded(
    config: EncoderConfig,
) -> None:
    replica, engine = observed(config)
    engine.error = RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        await replica.encode(packed(config, 1))

    engine.error = None
    assert outstanding(replica) == 0
    assert len((await replica.encode(packed(config, 1))).rows) == 1


async def test_an_idle_replica_is_asked_for_the_canary(config: EncoderConfig) -> None:
    replica, engine = observed(config)

    await replica.check_health()

    assert engine.encoded == [1, 1]
    assert outstanding(replica) == 0


async def test_an_idle_replica_that_cannot_encode_the_canary_is_ill(config: EncoderConfig) -> None:
    replica, engine = observed(config)
    engine.error = RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        await replica.check_health()


async def test_an_idle_replica_whose_engine_hangs_is_ill(config: EncoderConfig) -> None:
    replica, engine = observed(config, hang_after_s=0.05)
    engine.go.clear()

    with pytest.raises(TimeoutError):
        await replica.check_health()
    with pytest.raises(TimeoutError):  # nobody waits for that canary, and it hangs all the same
        await replica.check_health()

    engine.go.set()


async def test_a_busy_replica_is_well_without_a_canary_until_its_batch_is_too_old(
    config: EncoderConfig,
) -> None:
    replica, engine = observed(config, hang_after_s=0.3)
    engine.go.clear()
    start = time.monotonic()
    tasks = [asyncio.create_task(replica.encode(packed(config, value))) for value in (1, 2)]
    await until(lambda: engine.num_running == 1)

    while time.monotonic() < start + 0.2:
        await replica.check_health()
    await until(lambda: time.monotonic() > start + 0.35)
    with pytest.raises(TimeoutError, match=r"^a batch is 0 s old, the limit is 0\.3$"):
        await replica.check_health()

    assert engine.encoded == [1, 1], "the canary would have waited behind the batch"
    engine.go.set()
    await asyncio.gather(*tasks)
    await replica.check_health()


async def test_the_loop_is_free_while_the_engine_is_busy(config: EncoderConfig) -> None:
    replica, engine = observed(config)
    engine.go.clear()
    task = asyncio.create_task(replica.encode(packed(config, 1)))
    await until(lambda: engine.num_running == 1)

    async with asyncio.timeout(5):
        await replica.check_health()

    assert not task.done()
    engine.go.set()
    await task
