"""One encoder behind its Batcher in virtual time: real choices, real graph runner, modelled device.

An H200 with Qwen3-VL-32B's tower, fused, FlashAttention 4. In milliseconds:

* the device needs 0.3 + 1.8e-3 per patch + 3e-7 per squared patch of each image, and 5e-4 for each
  (segment, tile of 128 rows up to `max_seqlen`) that has no rows: those of a budget's empty
  segments;
* a replay takes that and 0.3 more: 2.8 for 1 024 patches, 9.2 for 4 x 1 024, 17.9 for 8 x 1 024,
  where 2.9, 8.9 and 17.9 were measured;
* eager takes as long as the device, and never less than the 12 that launching takes;
* a step of idle work, of which a graph needs several, takes what it runs, as if eagerly; steps are
  taken in pauses, and without one for a small share of the time, as `Engine` does it.

Two batches at most are on the encoder: one runs, one waits for it. A batch is formed by the digest
that came with the last batch that had ended.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise, tee
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from encoders.attention import AttentionLayout, Backend, sdpa
from encoders.captured import GraphMaker
from encoders.config import GraphSettings
from encoders.forward import Forward
from encoders.graph_cache import LEAST_GAIN
from encoders.graph_keys import Plan
from encoders.graph_profile import GraphProfile
from encoders.graph_runner import GraphRunner
from encoders.graph_stats import Digest
from encoders.packing import Call, Output, PackedLayout
from encoders.recorder import Measured
from serve_app.engine import BUSY_SHARE, RESTS_S
from serve_app.waiting import BatchLimits, Waiting, WaitingImages
from tests.fake_graphs import FakeRecorder
from tests.traces import BURSTS, CONFIG, Arrival, Bursts, arrivals

EAGER_FLOOR_MS = 12.0
REPLAY_MS = 0.3
SLOTS = 2
TILE = 128
NO_PIXELS = np.empty((0, 0, 3), np.uint8)


def device_ms(boundaries: list[int], max_seqlen: int) -> float:
    """What the device is busy for with these segments."""
    lengths = [end - start for start, end in pairwise(boundaries)]
    tiles = len(lengths) * -(-max_seqlen // TILE) - sum(-(-n // TILE) for n in lengths)
    return 0.3 + 1.8e-3 * boundaries[-1] + 3e-7 * sum(n * n for n in lengths) + 5e-4 * tiles


def eager_ms(layout: PackedLayout) -> float:
    """What a batch takes without a graph."""
    return max(EAGER_FLOOR_MS, device_ms([*layout.cu_seqlens], layout.max_seqlen))


def replay_ms(plan: Plan) -> float:
    """What a batch takes by a plan's graph."""
    return REPLAY_MS + device_ms([*plan.layout.cu_seqlens], plan.max_seqlen)


class Inputs(NamedTuple):
    bounds_N: Tensor


class MeteredTower:
    """Lengths of images: the least from which a graph's boundaries can be told; and its calls."""

    patch_size = frames = 1
    merge_size = CONFIG.merge_size
    num_prefix = 0
    dimensions = 1

    def __init__(self) -> None:
        self.ran: list[AttentionLayout] = []
        """Of each call since `took_ms`."""
        self.worked: list[AttentionLayout] | None = None
        """Of each call of a step of idle work, while there is one."""

    def inputs(self, layout: PackedLayout) -> Inputs:
        return Inputs(torch.tensor(layout.cu_seqlens, dtype=torch.float32))

    def row_counts(self, layout: PackedLayout) -> tuple[int, ...]:
        return layout.seqlens

    def __call__(
        self, patches_PC: Tensor, inputs: Inputs, attention: AttentionLayout, output: Output
    ) -> Tensor:
        self.ran.append(attention)  # a capture forbids to read it
        if self.worked is not None:
            self.worked.append(attention)
        return inputs.bounds_N.diff()[:, None]


class MeteredRecorder(FakeRecorder):
    """A recorder whose clock is the model's."""

    def __init__(self, tower: MeteredTower) -> None:
        self._tower = tower
        super().__init__()

    def measured(self, run: Any) -> Measured:
        self._tower.ran.clear()
        replays = self.replays
        measured = super().measured(run)
        ms = took_ms(self._tower, replayed=self.replays > replays)
        return Measured(measured.result, measured.scratch_bytes, ms)


def took_ms(tower: MeteredTower, *, replayed: bool) -> float:
    """What the calls since the last time took: a replay, if it was one, then eager ones."""
    ran = [device_ms(bounds.tolist(), max_seqlen) for bounds, max_seqlen in tower.ran]
    tower.ran = []
    replays = ran[:1] if replayed else []
    eager = ran[len(replays) :]
    return sum(ms + REPLAY_MS for ms in replays) + sum(max(EAGER_FLOOR_MS, ms) for ms in eager)


class Encoder:
    """The real runner over the model."""

    def __init__(self, **settings: Any) -> None:
        self._tower = MeteredTower()
        self._recorder = MeteredRecorder(self._tower)
        backend = Backend("plain", sdpa, boundaries="device", capturable=True)
        forward = Forward(self._tower, backend, torch.device("cpu"), torch.float32)
        graphs = GraphSettings(**settings)
        self.runner = GraphRunner(forward, graphs, GraphMaker(forward, graphs, self._recorder))
        self._patches = torch.zeros(graphs.max_patches, 3)

    def run(self, call: Call) -> tuple[float, bool]:
        """What a batch took, and whether it was replayed."""
        self._tower.ran.clear()
        replays = self._recorder.replays
        self.runner.run(self._patches[: call.layout.num_patches], call)
        replayed = self._recorder.replays > replays
        return took_ms(self._tower, replayed=replayed), replayed

    def work_ms(self, *, may_rebuild: bool) -> float:
        """Take a step of idle work, and what it took."""
        self._tower.worked = ran = []
        self.runner.idle(may_rebuild=may_rebuild)
        self._tower.worked = None
        return sum(
            max(EAGER_FLOOR_MS, device_ms(bounds.tolist(), max_seqlen))
            for bounds, max_seqlen in ran
        )

    def gains(self, call: Call) -> bool:
        """Whether the graph that the mode has for a batch would be worth keeping."""
        plans = self.runner.digest().planner.plans(call)[:1]
        return any(replay_ms(p) <= (1 - LEAST_GAIN) * eager_ms(call.layout) for p in plans)


@dataclass
class Tally:
    """What became of the images of one run."""

    batches: int = 0
    images: int = 0
    replayable: int = 0
    """Images in batches for which a graph would gain."""
    replayed: int = 0
    busy_ms: float = 0.0
    ended_ms: float = 0.0
    waits_ms: list[float] = field(default_factory=list)
    """From an image's decoding to the start of its batch on the device."""
    answers_ms: list[float] = field(default_factory=list)
    """From an image's decoding to its row."""


def simulate(
    trace: Iterator[Arrival],
    *,
    batches: int,
    prefer_within_ms: float,
    images: float = math.inf,
    **settings: Any,
) -> "Summary":
    """Run so many batches, or images if they are fewer, with these graph settings."""
    world = World(trace, Encoder(**settings), BatchLimits(prefer_within_ms=prefer_within_ms))
    with torch.inference_mode():
        while world.tally.batches < batches and world.tally.images < images:
            world.step()
    world.loop.close()
    return summary(world.tally, world.encoder)


def compare(
    trace: str, bursts: Bursts, mode: str, batches: int, **settings: Any
) -> tuple["Summary", "Summary"]:
    """The same arrivals with the Batcher's preference, and first come first served."""
    settings = {"graph_mode": mode, "batches": batches, **settings}
    usual = BatchLimits().prefer_within_ms
    preferred = simulate(arrivals(trace, bursts), prefer_within_ms=usual, **settings)
    settings |= {"images": preferred.images, "batches": 10 * batches}
    return preferred, simulate(arrivals(trace, bursts), prefer_within_ms=0, **settings)


def warm_and_cold(
    trace: str, mode: str, *, before: int, batches: int, profile: Callable[[], GraphProfile]
) -> tuple[float, float]:
    """Shares of replayable images that are replayed in so many batches: by an encoder that has run
    as many as `before`, and by one that starts with its profile. Both get the same arrivals.
    """
    settings = {"graph_mode": mode}
    warm, limits = Encoder(**settings), BatchLimits()
    warm.runner.capture_now(profile().read() or warm.runner.usual_calls())
    world = World(arrivals(trace, BURSTS["calm"]), warm, limits)
    world.run(before)
    profile().write(warm.runner.hottest())
    cold = Encoder(**settings)
    cold.runner.capture_now(profile().read() or cold.runner.usual_calls())
    other = World(world.fork(), cold, limits)
    shares = []
    for each in (world, other):
        each.tally = Tally()
        each.run(batches)
        shares.append(each.tally.replayed / each.tally.replayable)
        each.loop.close()
    return shares[0], shares[1]


class World:
    """Arrivals, what waits, and an encoder."""

    def __init__(self, trace: Iterator[Arrival], encoder: Encoder, limits: BatchLimits) -> None:
        self.encoder, self.tally = encoder, Tally()
        self.loop = asyncio.new_event_loop()  # never run: images need futures, and nobody waits
        self._trace, self._next = trace, next(trace)
        self._waiting = WaitingImages(limits, CONFIG)
        self._ends: list[float] = []
        """Of the batches that hold a slot."""
        self._told: deque[tuple[float, Digest]] = deque()
        self._digest: Digest | None = None
        self._now_ms = self._free_ms = self._rests_until_ms = 0.0

    def run(self, batches: int) -> None:
        """So many steps."""
        with torch.inference_mode():
            for _ in range(batches):
                self.step()

    def fork(self) -> Iterator[Arrival]:
        """What is to arrive yet, for another world too."""
        self._trace, copy = tee(self._trace)
        return chain([self._next], copy)

    def step(self) -> None:
        """Form a batch when a slot is free and something waits, and run it."""
        if len(self._ends) == SLOTS:
            self._now_ms = max(self._now_ms, heapq.heappop(self._ends))
        if not len(self._waiting):
            self._now_ms = max(self._now_ms, self._next.ms)
        self._hear(self._now_ms)
        batch = self._waiting.take(self._digest, self._now_ms * 1e-3)
        call = Call(PackedLayout.of([image.grid for image in batch], 0), "pooled")
        start = self._begin(self._now_ms)
        ms, replayed = self.encoder.run(call)
        self._free_ms = start + ms
        heapq.heappush(self._ends, self._free_ms)
        self._told.append((self._free_ms, self.encoder.runner.digest()))
        self._count(batch, call, start, ms, replayed)

    def _hear(self, now: float) -> None:
        while self._next.ms <= now:
            self._waiting.append(
                Waiting(
                    "", NO_PIXELS, self._next.grid,
                    future=self.loop.create_future(), since=self._next.ms * 1e-3,
                )
            )  # fmt: skip
            self._next = next(self._trace)
        while self._told and self._told[0][0] <= now:
            _, self._digest = self._told.popleft()
        while self._ends and self._ends[0] <= now:
            heapq.heappop(self._ends)

    def _begin(self, now: float) -> float:
        """When the engine turns to a batch that came now: what it does meanwhile is done before."""
        runner = self.encoder.runner
        while self._free_ms < now and runner.has_work:
            self._capture(may_rebuild=True)
        if self._free_ms > max(now, self._rests_until_ms) and runner.has_work:
            self._capture(may_rebuild=False)
        return max(now, self._free_ms)

    def _capture(self, *, may_rebuild: bool) -> None:
        took_ms = self.encoder.work_ms(may_rebuild=may_rebuild)
        least, most = (seconds * 1e3 for seconds in RESTS_S)
        self._free_ms += took_ms
        self._rests_until_ms = self._free_ms + min(max(took_ms / BUSY_SHARE, least), most)

    def _count(
        self, batch: list[Waiting], call: Call, start: float, ms: float, replayed: bool
    ) -> None:
        tally, images = self.tally, len(batch)
        tally.batches += 1
        tally.images += images
        tally.replayable += images * (replayed or self.encoder.gains(call))
        tally.replayed += images * replayed
        tally.busy_ms += ms
        tally.ended_ms = start + ms
        tally.waits_ms += [start - image.since * 1e3 for image in batch]
        tally.answers_ms += [start + ms - image.since * 1e3 for image in batch]


class Summary(NamedTuple):
    """The figures of one run."""

    batches: int
    images: int
    replayable: float
    """Share of images that were in batches small enough to gain by a graph."""
    replayed: float
    """Share of those that were replayed."""
    mean_wait_ms: float
    p99_wait_ms: float
    mean_answer_ms: float
    p99_answer_ms: float
    encoder_ms_per_image: float
    utilisation: float
    captures: int
    evictions: int
    gains_below: float


def summary(tally: Tally, encoder: Encoder) -> Summary:
    """The figures of what was tallied."""
    stats = encoder.runner.stats()
    return Summary(
        tally.batches,
        tally.images,
        tally.replayable / tally.images,
        tally.replayed / tally.replayable,
        fmean(tally.waits_ms),
        float(np.quantile(tally.waits_ms, 0.99)),
        fmean(tally.answers_ms),
        float(np.quantile(tally.answers_ms, 0.99)),
        tally.busy_ms / tally.images,
        tally.busy_ms / tally.ended_ms,
        stats.captures,
        stats.evictions,
        encoder.runner.digest().gains_below,
    )
