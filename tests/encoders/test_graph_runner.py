"""The real runner over a recorder with the rules of CUDA graphs: when what is captured and kept.

The plain tower makes thousands of batches a second; the real one has AITER's signature below it.
"""

import json
import pickle
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from encoders import attention_kernels, transfer
from encoders.arena import Arena
from encoders.attention import AttentionLayout, Backend, sdpa
from encoders.attention_kernels import Target, load_aiter
from encoders.captured import TIMINGS, CapturedGraph, GraphMaker
from encoders.config import EncoderConfig, GraphSettings
from encoders.encoder import Encoder
from encoders.errors import ConfigError
from encoders.forward import Forward
from encoders.graph_cache import FORGET_LOSSES_AFTER, MAX_TRIES
from encoders.graph_keys import Planner
from encoders.graph_profile import GraphProfile
from encoders.graph_runner import GraphRunner
from encoders.graph_store import MAX_FAILURES_IN_A_ROW
from encoders.invariance import parts
from encoders.packing import Call, Output, PackedLayout
from encoders.towers.dinov2 import Dinov2
from tests import fake_aiter
from tests.fake_graphs import GIB, FakeRecorder
from tests.tiny import CHECKPOINT, write_tiny_encoder

CPU = torch.device("cpu")
Grid = tuple[int, int]


class PlainInputs(NamedTuple):
    weight_P: Tensor
    bounds_N: Tensor


class PlainTower:
    """Weighted means of patches: everything a tower has to do with a layout, and no more."""

    patch_size = merge_size = frames = 1
    num_prefix = 0
    dimensions = 3

    def inputs(self, layout: PackedLayout) -> PlainInputs:
        weights = [torch.arange(1, h * w + 1).float() / h for _, h, w in layout.grid_thw]
        return PlainInputs(torch.cat(weights), torch.tensor(layout.cu_seqlens))

    def row_counts(self, layout: PackedLayout) -> tuple[int, ...]:
        return layout.seqlens

    def __call__(
        self, patches_PC: Tensor, inputs: PlainInputs, layout: AttentionLayout, output: Output
    ) -> Tensor:
        rows_PC = patches_PC * inputs.weight_P[:, None]
        if output == "patch":
            return rows_PC
        means_NC = torch.segment_reduce(
            rows_PC, "mean", offsets=inputs.bounds_N, axis=0, unsafe=True
        )
        lengths_N = layout[0].diff()  # a stale boundary would show
        return means_NC + lengths_N[:, None]


CAPTURABLE = Backend("plain", sdpa, boundaries="device", capturable=True)


def runner_of(forward: Forward, settings: GraphSettings, recorder: FakeRecorder) -> GraphRunner:
    """As `GraphRunner.on` makes one for a GPU."""
    off = settings.graph_mode == "off"
    return GraphRunner(forward, settings, None if off else GraphMaker(forward, settings, recorder))


TINY = EncoderConfig.model_validate(
    {
        "name": "tiny",
        "family": "dinov2",
        "weights": {"source": "local", "path": "none"},
        "patch_size": 1,
        "dimensions": 3,
        "pooling": "mean",
        "resize": {"rule": "shortest_edge", "shortest_edge": 1, "max_pixels": 1},
        "image_mean": [0, 0, 0],
        "image_std": [1, 1, 1],
    }
)


def hot_calls(grids: list[list[int]], encoder: str = "tiny", merge_size: int = 1) -> str:
    """A profile of one call."""
    call = {"grid_thw": grids, "output": "pooled"}
    sizes = {"patch_size": 1, "merge_size": merge_size}
    return json.dumps({"encoder": encoder, "calls": [call], **sizes})


class Rig:
    """A runner over a plain tower, the recorder below it, and batches for it."""

    def __init__(
        self, recorder: FakeRecorder | None = None, tower: Any = None, **settings: Any
    ) -> None:
        self.recorder = recorder or FakeRecorder()
        self.forward = Forward(tower or PlainTower(), CAPTURABLE, CPU, torch.float32)
        defaults = {"graph_mode": "exact", "admission": "always"}
        settings = defaults | {"max_patches": 64, "max_images": 8} | settings
        self.runner = runner_of(self.forward, GraphSettings(**settings), self.recorder)
        self.recorder.captures = 0  # the start-up probe's apart
        self.random = torch.Generator().manual_seed(0)

    def call(self, *grids: Grid, output: Output = "pooled") -> Call:
        return Call(PackedLayout.of([(1, *grid) for grid in grids], 0), output)

    def patches(self, call: Call) -> Tensor:
        return torch.randn(call.layout.num_rows, 3, generator=self.random)

    @torch.inference_mode()
    def exact(self, call: Call) -> bool:
        """Whether the runner's answer to a new batch is eager's to the bit."""
        patches = self.patches(call)
        return transfer.same_bits(self.runner.run(patches, call), self.forward.eager(patches, call))

    def settle(self) -> None:
        """Let it capture and tidy up all that it wants to."""
        while self.runner.idle():
            pass

    def capture(self, *calls: Call) -> None:
        """See each call once and let it be captured."""
        for call in calls:
            assert self.exact(call)
            self.settle()

    def hits(self, *calls: Call) -> int:
        """How many of the calls are replayed; all have to be exact."""
        before = self.runner.stats().hits
        assert [call for call in calls if not self.exact(call)] == []
        return self.runner.stats().hits - before


def test_a_layout_is_answered_eagerly_then_captured_when_idle_then_replayed() -> None:
    rig = Rig()
    call = rig.call((2, 3))

    assert rig.hits(call, call) == 0
    rig.settle()

    assert rig.hits(call, call) == 2
    stats = rig.runner.stats()
    assert (stats.captures, stats.graphs, stats.misses) == (1, 1, {"queued": 2})


def test_second_sight_leaves_a_layout_that_came_once_alone() -> None:
    rig = Rig(admission="second_sight")
    once, twice = rig.call((1, 1)), rig.call((2, 3))

    rig.capture(once, twice, twice)

    assert rig.hits(once, twice) == 1
    assert rig.runner.stats().misses["unseen"] == 2


def test_order_of_arrival_and_height_for_width_share_a_graph() -> None:
    rig = Rig()
    rig.capture(rig.call((2, 3), (4, 4)))

    assert rig.hits(rig.call((4, 4), (2, 3)), rig.call((2, 8), (3, 2))) == 2
    assert rig.runner.stats().captures == 1


def test_equal_totals_with_other_boundaries_do_not() -> None:
    rig = Rig()
    rig.capture(rig.call((2, 4)))

    assert rig.hits(rig.call((2, 2), (2, 2)), rig.call((2, 3), (1, 2))) == 0


def test_each_kind_of_output_has_its_own_graph() -> None:
    rig = Rig()
    calls = [rig.call((2, 4)), rig.call((2, 4), output="patch")]

    rig.capture(*calls)

    assert rig.hits(*calls) == 2


def test_small_large_small() -> None:
    rig = Rig()
    small, large = rig.call((1, 1)), rig.call((7, 8), (2, 4))
    rig.capture(small, large)

    assert rig.hits(small, large, small, large, small) == 5


@pytest.mark.parametrize("output", ["pooled", "patch"])
def test_a_result_stays_what_it_was(output: Output) -> None:
    rig = Rig()
    call = rig.call((2, 3), output=output)
    rig.capture(call)
    rows = rig.runner.run(rig.patches(call), call)
    kept = rows.clone()

    rig.runner.run(rig.patches(call), call)
    rig.runner.poison()

    assert transfer.same_bits(rows, kept)


def test_a_replay_needs_nothing_of_what_the_last_one_left() -> None:
    rig = Rig()
    calls = [rig.call((1, 1)), rig.call((7, 8), (2, 4)), rig.call((3, 3), (1, 2))]
    rig.capture(*calls)

    for call in calls * 2:
        rig.runner.poison()
        assert rig.hits(call) == 1


@pytest.mark.parametrize("too_large", [[(8, 9)], [(1, 1)] * 9], ids=["patches", "images"])
def test_what_exceeds_the_arena_runs_eagerly(too_large: list[Grid]) -> None:
    rig = Rig()
    widest = [[(8, 8)], [(1, 1)] * 8, [(1, 1)] * 7 + [(3, 19)]]
    rig.capture(
        *(rig.call(*grids, output=kind) for grids in widest for kind in ("pooled", "patch"))
    )

    rig.capture(rig.call(*too_large), rig.call(*too_large))

    stats = rig.runner.stats()
    assert (stats.captures, stats.misses["too_large"]) == (6, 2)


def test_the_least_recently_used_graph_leaves() -> None:
    rig = Rig(graph_capacity=2)
    a, b, c = (rig.call((1, n)) for n in (1, 2, 3))
    rig.capture(a, b)
    assert rig.hits(a) == 1

    rig.capture(c)

    assert rig.recorder.live == 2
    assert rig.hits(c, a) == 2
    assert rig.hits(b) == 0
    assert rig.runner.stats().evictions == 1


def test_where_a_reset_breaks_the_others_graphs_are_retired_and_rebuilt() -> None:
    recorder = FakeRecorder()
    recorder.reset_clears_workspace = True
    rig = Rig(recorder, graph_capacity=2)
    calls = [rig.call((1, n)) for n in range(1, 6)]

    rig.capture(*calls[:3])
    assert rig.hits(*calls[1:3]) == 2  # a reset would have made them wrong
    assert (rig.runner.stats().retired, rig.recorder.live) == (1, 3)
    rig.capture(calls[3])  # the second retired is as many as may be

    stats = rig.runner.stats()
    assert (stats.rebuilds, stats.retired, rig.recorder.live) == (1, 0, 2)
    assert rig.hits(*calls[2:4]) == 2


def test_evicted_graphs_are_freed_at_once_where_that_is_safe() -> None:
    rig = Rig(graph_capacity=2)

    rig.capture(*(rig.call((1, n)) for n in range(1, 6)))

    stats = rig.runner.stats()
    assert (stats.evictions, stats.rebuilds, stats.retired, rig.recorder.live) == (3, 0, 0, 2)


def test_down_to_no_graph_and_back() -> None:
    rig = Rig()
    call = rig.call((2, 3))
    rig.capture(call)

    rig.runner.release()
    assert rig.recorder.live == 0
    rig.capture(call)

    assert rig.hits(call) == 1


def test_a_rebuild_captures_anew_what_was_hot_and_what_was_due() -> None:
    rig = Rig(graph_capacity=2)
    cold, hot, due = (rig.call((1, n)) for n in (1, 2, 3))
    rig.capture(cold, hot)
    assert rig.exact(due)

    rig.runner.rebuild()
    rig.settle()

    assert rig.hits(hot, due) == 2
    assert rig.runner.stats().rebuilds == 1


def test_a_rebuild_captures_anew_what_was_on_trial() -> None:
    rig = Rig()
    call = rig.call((2, 3))
    assert rig.exact(call)
    rig.runner.idle()
    assert rig.runner.stats().on_trial == 1

    rig.runner.rebuild()
    rig.settle()

    assert rig.hits(call) == 1


def test_a_killed_capture_is_survived_and_tried_once_more() -> None:
    rig = Rig()
    before, killed = rig.call((1, 1)), rig.call((2, 3))
    rig.capture(before)
    rig.recorder.kill_captures = 1

    assert rig.exact(killed)
    rig.runner.idle()
    assert rig.hits(killed, before) == 1  # the graph that was there still serves
    rig.settle()

    assert rig.hits(killed, before) == 2
    stats = rig.runner.stats()
    assert (stats.failures, stats.rebuilds, stats.captures) == (1, 1, 3)


def test_a_layout_that_fails_again_stays_eager() -> None:
    rig = Rig()
    call = rig.call((2, 3))

    for _ in range(MAX_TRIES + 3):
        rig.recorder.kill_captures = 1
        assert rig.exact(call)
        rig.runner.idle()
        rig.recorder.kill_captures = 0
        rig.settle()

    assert rig.hits(call) == 0
    assert rig.runner.stats().failures == MAX_TRIES
    assert rig.runner.stats().misses["failed"] > 0


def test_after_many_failures_in_a_row_nothing_is_tried_and_all_is_answered() -> None:
    rig = Rig()
    kept = rig.call((1, 1))
    rig.capture(kept)
    rig.recorder.kill_captures = 1000

    for n in range(2, 40):
        rig.capture(rig.call((1, n)))

    assert rig.runner.stats().failures == MAX_FAILURES_IN_A_ROW
    assert rig.runner.stats().misses["disabled"] > 0
    assert not rig.runner.idle()


def test_a_pool_whose_anchor_cannot_be_captured_is_a_failure_like_others() -> None:
    rig = Rig()
    rig.recorder.kill_captures = 1

    rig.runner.release()
    rig.settle()
    rig.capture(rig.call((2, 3)))

    assert rig.hits(rig.call((2, 3))) == 1


def test_a_graph_with_other_bits_than_eager_never_answers() -> None:
    rig = Rig()
    call, other = rig.call((2, 3)), rig.call((1, 1))
    rig.recorder.spoil_captures = 1

    rig.capture(call, other, call, call)

    assert rig.hits(call, other) == 1
    stats = rig.runner.stats()
    assert (stats.mismatches, stats.graphs, stats.misses["failed"]) == (1, 1, 3)
    assert rig.recorder.live == 1


@pytest.mark.parametrize("scratch", [0, 3 * GIB], ids=["now", "after the capture"])
def test_below_the_floor_nothing_is_captured_for_a_while(scratch: int) -> None:
    rig = Rig(free_memory_floor=2 * GIB)
    call = rig.call((2, 3))
    rig.recorder.free, rig.recorder.scratch = GIB if scratch == 0 else 4 * GIB, scratch

    rig.capture(call, call)
    assert (rig.recorder.captures, rig.runner.stats().short_of_memory) == (0, 1)
    rig.recorder.free = 100 * GIB
    rig.capture(call)
    assert rig.hits(call) == 0
    rig.runner._store._short_until = 0.0  # type: ignore[union-attr]
    rig.capture(call)

    assert rig.hits(call) == 1


class Hungry(PlainTower):
    """A tower that runs out of memory so many times."""

    failures = 0

    def __call__(self, *args: Any) -> Tensor:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(*args)


def test_graphs_give_up_their_memory_to_a_batch_that_needs_it() -> None:
    rig = Rig()
    rig.forward.tower = tower = Hungry()  # type: ignore[assignment]
    rig.capture(rig.call((2, 3)))
    tower.failures = 1

    assert rig.exact(rig.call((8, 8)))

    assert rig.recorder.live == 0


def test_a_batch_that_is_too_large_without_graphs_fails() -> None:
    rig = Rig()
    rig.forward.tower = tower = Hungry()  # type: ignore[assignment]
    tower.failures = 1

    with pytest.raises(torch.OutOfMemoryError):
        rig.exact(rig.call((2, 3)))


def test_off_and_a_backend_that_cannot_be_captured_stay_eager_without_arenas() -> None:
    call = Rig().call((2, 3))
    off = Rig(graph_mode="off")
    on_host = Forward(PlainTower(), Backend("sdpa", sdpa, "host", False), CPU, torch.float32)  # type: ignore[arg-type]
    host = GraphRunner.on(on_host, GraphSettings())

    assert off.exact(call)
    host.run(off.patches(call), call)

    assert off.runner.stats().misses == {"off": 1}
    assert host.stats().misses == {"backend": 1}
    assert off.runner.stats().arena_bytes == host.stats().arena_bytes == 0
    assert not off.runner.idle()
    assert not host.idle()


def test_a_budget_serves_every_layout_of_its_class_with_eagers_bits() -> None:
    rig = Rig(graph_mode="budget")
    rig.capture(rig.call((5, 6), (4, 4)))

    calls = [
        rig.call((4, 4), (5, 6)),
        rig.call((7, 6), (1, 1), (1, 2)),
        rig.call((1, 60)),
        rig.call((8, 8)),
        rig.call((1, 1)),
    ]
    assert rig.hits(*calls, *reversed(calls)) == 10
    assert rig.runner.stats().captures == 1


def test_more_images_or_more_patches_are_another_budget() -> None:
    rig = Rig(graph_mode="budget", max_patches=256, max_images=16)
    rig.capture(rig.call((5, 6)))

    assert rig.hits(rig.call((5, 13)), rig.call(*[(1, 2)] * 8)) == 0


@pytest.mark.parametrize("output", ["pooled", "patch"])
def test_what_lies_in_the_padding_changes_nothing(output: Output) -> None:
    rig = Rig(graph_mode="budget")
    calls = [rig.call((3, 3), (2, 2), output=output), rig.call((7, 9), output=output)]
    rig.capture(*calls)

    for call in calls * 2:
        rig.runner.poison()  # NaN where the padding is
        assert rig.hits(call) == 1


class ByTotal(PlainTower):
    """A tower whose bits depend on how many patches there are, as those of a BLAS library may."""

    def __call__(self, patches_PC: Tensor, *args: Any) -> Tensor:
        rows = super().__call__(patches_PC, *args)
        return rows + len(patches_PC) * 1e-3


def test_a_budget_that_changes_bits_is_not_used_but_the_exact_layout_is() -> None:
    rig = Rig(tower=ByTotal(), graph_mode="budget")
    call, other = rig.call((5, 6)), rig.call((5, 7))

    rig.capture(call, call)

    assert rig.hits(call) == 1
    assert rig.hits(other) == 0
    assert rig.runner.stats().mismatches == 1


def test_a_graph_that_does_nothing_is_found_before_it_answers() -> None:
    rig = Rig()
    call = rig.call((2, 3))
    rig.capture(call)
    rig.runner.release()  # its last patches and its last result still lie in the arena
    rig.recorder.dead_captures = 1

    rig.capture(call)

    assert rig.hits(call) == 0
    assert rig.runner.stats().mismatches == 1


def test_fast_uses_budgets_whose_bits_differ() -> None:
    rig = Rig(tower=ByTotal(), graph_mode="budget", precision="fast")
    call = rig.call((5, 6))
    with torch.inference_mode():
        rig.runner.run(rig.patches(call), call)
    rig.settle()

    assert not rig.exact(call)

    stats = rig.runner.stats()
    assert (stats.hits, stats.mismatches, stats.precision) == (1, 0, "fast")


def test_a_replay_that_goes_wrong_later_is_found_and_answered_by_eager() -> None:
    rig = Rig(shadow_every=3)
    call = rig.call((2, 3))
    rig.capture(call)
    for graph in rig.recorder.pool.graphs:
        graph.wrong = True  # from now on, as after ROCm/clr#279

    right = [rig.exact(call) for _ in range(4)]

    assert right == [False, False, True, True]
    stats = rig.runner.stats()
    assert (stats.shadow_checks, stats.shadow_mismatches, stats.graphs) == (1, 1, 0)
    assert stats.misses["failed"] == 1


def test_what_a_graph_does_not_speed_up_is_not_kept_nor_anything_larger() -> None:
    rig = Rig(admission="gain")
    small, large, larger, largest = (rig.call((n, n)) for n in (2, 4, 5, 6))
    rig.capture(small, small)
    rig.recorder.replay_ms = 19.5  # eager takes 20
    rig.capture(large, large, larger, larger)
    rig.capture(large, largest, largest)

    assert rig.hits(small, large, largest) == 1
    stats = rig.runner.stats()
    assert (stats.captures, stats.no_gain, stats.misses["no_gain"]) == (3, 2, 5)
    digest = rig.runner.digest()
    assert digest is not None
    assert digest.gains_below == 25


def test_what_gains_nothing_is_not_compared_and_no_step_measures_more_than_once() -> None:
    rig = Rig(admission="gain")
    call, slow = rig.call((2, 2)), rig.call((4, 4))
    rig.recorder.replay_ms = 19.5  # eager takes 20
    steps = list[int]()
    for miss in (slow, slow):
        rig.exact(miss)
    while rig.runner.has_work:
        before = rig.recorder.replays
        rig.runner.idle()
        steps.append(rig.recorder.replays - before)

    assert steps == [0, *[1] * TIMINGS]  # the recording
    assert rig.runner.stats().no_gain == 1

    rig.recorder.replay_ms = 5.0
    rig.capture(call, call)
    assert rig.hits(call) == 1


def test_a_graph_that_does_nothing_teaches_nothing_of_sizes() -> None:
    rig = Rig(admission="gain")
    dead, small, large = (rig.call((n, n)) for n in (6, 4, 5))
    rig.recorder.dead_captures = 1
    rig.capture(dead, dead)
    rig.recorder.replay_ms = 30.0
    rig.capture(small, small, large, large)

    digest = rig.runner.digest()
    assert digest is not None
    assert (rig.runner.stats().mismatches, digest.gains_below) == (1, 25)


def test_what_is_missed_while_its_graph_is_on_trial_is_not_captured_twice() -> None:
    for replay_ms, kept in ((5.0, 1), (19.5, 0)):
        rig = Rig(admission="gain")
        rig.recorder.replay_ms = replay_ms  # eager takes 20
        call = rig.call((3, 3))
        rig.exact(call)
        rig.exact(call)
        while rig.runner.has_work:
            rig.runner.idle()
            rig.exact(call)

        stats = rig.runner.stats()
        assert (stats.captures, stats.graphs, stats.no_gain) == (1, kept, 1 - kept)
        assert stats.evictions == stats.retired == 0


def test_what_is_due_is_not_captured_when_it_has_turned_out_too_large_to_gain() -> None:
    rig = Rig(admission="gain")
    rig.recorder.replay_ms = 19.5
    calls = [rig.call((n, n)) for n in range(2, 8)]
    for call in (*calls, *calls):
        rig.exact(call)
    while rig.runner.idle():
        pass

    assert rig.runner.stats().captures == 2


def test_comparisons_meet_no_zeros_of_a_padding() -> None:
    rig = Rig(graph_mode="budget", admission="gain")
    zeros = list[bool]()
    agrees = GraphMaker.agrees

    def watched(maker: GraphMaker, captured: CapturedGraph, call: Call) -> bool:
        agreed = agrees(maker, captured, call)
        zeros.append(bool((captured.place.patches_PC == 0).any()))
        return agreed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphMaker, "agrees", watched)
        rig.capture(rig.call((3, 3)), rig.call((3, 3)))

    assert len(zeros) > 2
    assert not any(zeros)


def test_one_disturbed_measurement_does_not_keep_larger_batches_from_their_graphs() -> None:
    rig = Rig(admission="gain")
    disturbed, large = rig.call((2, 3)), rig.call((4, 4))
    rig.recorder.replay_ms = 30.0
    rig.capture(disturbed, disturbed)
    rig.recorder.replay_ms = 5.0

    rig.capture(large, large)

    assert rig.hits(large, disturbed) == 1


def test_what_was_measured_does_not_hold_for_ever() -> None:
    rig = Rig(admission="gain")
    calls = [rig.call((n, n)) for n in (3, 4)]
    rig.recorder.replay_ms = 30.0
    rig.capture(*calls, *calls)
    rig.recorder.replay_ms = 5.0

    for _ in range(FORGET_LOSSES_AFTER // 2 + 2):
        rig.capture(*calls)

    assert rig.hits(*calls) == 2


def test_a_digest_says_what_would_be_replayed() -> None:
    rig = Rig(graph_mode="budget")
    call = rig.call((5, 6), (4, 4))
    rig.capture(call)
    digest = pickle.loads(pickle.dumps(rig.runner.digest()))

    assert digest.replays(call)
    assert digest.replays(rig.call((6, 6), (2, 4)))
    assert not digest.replays(rig.call((5, 6), (4, 4), output="patch"))
    assert not digest.replays(rig.call(*[(1, 1)] * 8))
    assert not digest.replays(rig.call((9, 9)))


def test_a_profile_brings_the_hottest_graphs_before_the_first_batch(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    warm, cold = Rig(graph_mode="exact"), Rig(graph_mode="exact")
    calls = [warm.call((2, 3)), warm.call((4, 4), (1, 2)), warm.call((3, 3), output="patch")]
    warm.capture(*calls)

    GraphProfile(path, TINY, 0).write(warm.runner.hottest())
    cold.runner.capture_now(GraphProfile(path, TINY, 0).read())

    assert cold.hits(*calls) == 3
    assert cold.runner.hottest()[0].output == "patch"


def test_without_a_profile_the_usual_budgets_are_there_before_the_first_batch() -> None:
    rig = Rig(graph_mode="budget", max_patches=512, graph_capacity=8)

    rig.runner.capture_now(rig.runner.usual_calls())

    assert rig.hits(rig.call((8, 8)), rig.call((3, 3), (2, 2)), rig.call((9, 10))) == 3
    assert rig.runner.stats().graphs == 8
    assert Rig(graph_mode="exact").runner.usual_calls() == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        hot_calls([]),
        hot_calls([[1, -2, -3]]),
        hot_calls([[1, 2, 3]], encoder="another"),
        hot_calls([[1, 2, 3]], merge_size=2),
    ],
)
def test_a_profile_that_is_spoilt_or_of_another_encoder_is_left_aside(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "hot.json"
    path.write_text(text)

    assert GraphProfile(path, TINY, 0).read() == []
    assert GraphProfile(tmp_path / "none.json", TINY, 0).read() == []
    assert GraphProfile(None, TINY, 0).read() == []


def test_a_profile_drops_images_that_are_no_whole_merge_blocks(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    path.write_text(hot_calls([[1, 3, 5]], merge_size=2))
    merging = TINY.model_copy(update={"merge_size": 2})

    assert GraphProfile(path, merging, 0).read() == []


def test_a_profile_brings_exact_graphs_where_budgets_change_bits(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    warm, cold = (Rig(tower=ByTotal(), graph_mode="budget") for _ in range(2))
    calls = [warm.call((5, 6)), warm.call((5, 7))]
    warm.capture(*calls, *calls)
    assert warm.hits(*calls) == 2

    GraphProfile(path, TINY, 0).write(warm.runner.hottest())
    cold.runner.capture_now(GraphProfile(path, TINY, 0).read())

    assert cold.hits(*calls) == 2


class OutOfMemoryLater(PlainTower):
    """A tower that runs out of memory in some call after the capture."""

    calls_left = 10**9

    def __call__(self, *args: Any) -> Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(*args)


def test_a_graph_whose_comparison_fails_is_not_lost_sight_of() -> None:
    tower = OutOfMemoryLater()
    rig = Rig(tower=tower, graph_mode="budget")
    kept, call = rig.call((2, 3)), rig.call((2, 3), output="patch")
    rig.capture(kept)
    assert rig.exact(call)
    tower.calls_left = 4  # warm-up, recording, then a comparison

    rig.settle()

    assert rig.hits(kept) == 1
    stats = rig.runner.stats()
    assert stats.failures == 1
    assert rig.recorder.live == stats.graphs + stats.retired


def test_each_graph_has_its_own_turn_to_be_checked() -> None:
    rig = Rig(shadow_every=10)
    a, b = rig.call((2, 3)), rig.call((4, 4))
    rig.capture(a, b)
    for graph in rig.recorder.pool.graphs:
        graph.wrong = True

    for _ in range(11):
        rig.exact(a)
        rig.exact(b)

    assert rig.runner.stats().shadow_mismatches == 2


def test_what_is_captured_again_is_as_recent_as_it_was() -> None:
    rig = Rig(graph_capacity=3)
    a, b, c, d = (rig.call((1, n)) for n in range(1, 5))
    rig.capture(a, b, c)
    assert rig.hits(b, c, a) == 3
    rig.runner.rebuild()
    rig.settle()

    rig.capture(d)

    assert rig.hits(d, a, c) == 3
    assert rig.hits(b) == 0


@pytest.mark.parametrize("error", [LookupError, TypeError, AssertionError])
def test_whatever_a_kernel_library_raises_at_the_start_is_survived(error: type[Exception]) -> None:
    class Raising(FakeRecorder):
        def capture(self, run: Any) -> Any:
            if self.pool.graphs:  # the anchor is there
                raise error("in a capture")
            return super().capture(run)

    rig = Rig(Raising())

    rig.capture(rig.call((2, 3)))

    assert rig.runner.stats().failures > 0
    assert rig.hits(rig.call((2, 3))) == 0


class Company(PlainTower):
    """A tower that computes small images in another order when others are about."""

    def __init__(self, floor: int) -> None:
        self._floor = floor

    def __call__(
        self, patches_PC: Tensor, inputs: PlainInputs, layout: AttentionLayout, output: Output
    ) -> Tensor:
        rows = super().__call__(patches_PC, inputs, layout, output)
        lengths = layout[0].diff()
        if len(lengths) > 1:
            small = (lengths < self._floor).float() * 1e-3
            rows = (
                rows + (small if output == "pooled" else small.repeat_interleave(lengths))[:, None]
            )
        return rows


def test_invariant_batches_only_images_whose_bits_are_their_own() -> None:
    rig = Rig(tower=Company(16), precision="invariant", max_patches=512, graph_mode="off")
    call = rig.call((2, 3), (5, 5), (4, 4), (1, 2))
    patches = rig.patches(call)

    with torch.inference_mode():
        rows = rig.runner.run(patches, call)
        own = torch.split(patches, list(call.layout.seqlens))
        alone = [
            rig.forward.eager(x, Call(PackedLayout.of([grid], 0), "pooled"))
            for x, grid in zip(own, call.layout.grid_thw, strict=True)
        ]

    assert rig.runner.stats().invariant_from == 16
    assert transfer.same_bits(rows, torch.cat(alone))
    assert rig.runner.stats().batches == 3  # the two large together, each small one alone


def test_invariant_shares_no_batch_that_is_larger_than_was_tried() -> None:
    rig = Rig(precision="invariant", max_patches=64, max_images=4, graph_mode="budget")
    grids = [(8, 9), (5, 6), (5, 5), (5, 5), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2)]

    cut = parts(rig.call(*grids).layout, 1, 64, 4)

    assert [part.seqlens for part in cut] == [(72,), (30, 25), (25, 4, 4, 4), (4, 4, 4)]
    call = rig.call(*grids)
    rig.capture(call, call)
    assert rig.hits(call) == 3  # the first is too large for a graph
    assert rig.runner.digest() is None  # which of them share a batch is decided here


def test_invariant_is_refused_where_it_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match="not offered"):
        Rig(tower=Company(10**6), precision="invariant", max_patches=512, graph_mode="off")


def test_eager_runs_make_no_buffers_of_a_layout() -> None:
    rig = Rig(graph_capacity=1, admission="second_sight")
    rig.capture(rig.call((8, 8)), rig.call((8, 8)), rig.call((8, 8), output="patch"))
    before = rig.runner.stats()

    rig.capture(*(rig.call((1, n)) for n in range(1, 60)))

    after = rig.runner.stats()
    assert (after.arena_bytes, after.graph_pool_bytes) == (
        before.arena_bytes,
        before.graph_pool_bytes,
    )
    assert after.graphs == 1


WALK_CAPACITY = 12


@pytest.mark.parametrize("clears", [False, True], ids=["resets are safe", "resets are not"])
def test_a_random_walk_of_20_000_batches_keeps_every_promise(clears: bool) -> None:
    walk, recorder = random.Random(0), FakeRecorder()
    recorder.reset_clears_workspace = clears
    rig = Rig(
        recorder, graph_capacity=WALK_CAPACITY, admission="second_sight", free_memory_floor=2 * GIB
    )
    grids = [(h, w) for h in range(1, 5) for w in range(1, 7)]
    calls = [
        rig.call(
            *walk.choices(grids, k=walk.randint(1, 3)), output=walk.choice(["pooled", "patch"])
        )
        for _ in range(40)
    ]
    popular = [1 / (rank + 1) for rank in range(len(calls))]
    kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=3)

    for step in range(1, 20_001):
        _disturb(rig, walk)
        (call,) = walk.choices(calls, popular)
        patches = rig.patches(call)
        with torch.inference_mode():
            rows = rig.runner.run(patches, call)
            assert transfer.same_bits(rows, rig.forward.eager(patches, call)), step
        kept.append((rows, rows.clone()))
        while walk.random() < 0.4 and rig.runner.idle():
            pass
        assert all(transfer.same_bits(rows, before) for rows, before in kept), step
        _check_bounds(rig, step)

    stats = rig.runner.stats()
    assert stats.hits > 6_000
    assert min(stats.evictions, stats.failures, stats.mismatches, stats.rebuilds) > 0
    assert stats.short_of_memory > 0


def _disturb(rig: Rig, walk: random.Random) -> None:
    """Now and then something goes wrong."""
    recorder, chance = rig.recorder, walk.random()
    rig.runner._store._short_until = 0.0  # type: ignore[union-attr]
    if chance < 0.0005:
        recorder.kill_captures = 1
    elif chance < 0.001:
        # Only for layouts that have a second chance: each bad graph costs its layout all.
        recorder.spoil_captures = int(rig.runner.stats().mismatches < 3)
    elif chance < 0.003:
        recorder.free = walk.choice([GIB, 100 * GIB, 100 * GIB])
    elif chance < 0.008:
        rig.runner.poison()
    elif chance < 0.0085:
        rig.runner.release()
    elif chance < 0.009:
        rig.runner.rebuild()


def _check_bounds(rig: Rig, step: int) -> None:
    stats = rig.runner.stats()
    assert stats.hits + sum(stats.misses.values()) == step
    assert stats.graphs <= WALK_CAPACITY
    assert stats.retired <= WALK_CAPACITY
    if not rig.recorder.pool.burnt:
        assert rig.recorder.live == stats.graphs + stats.retired + stats.on_trial


BF16 = torch.bfloat16


@pytest.fixture
def on_aiter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Forward:
    """A DINOv2 on AITER's strict fake, on a machine that believes to be ROCm."""
    monkeypatch.setattr(attention_kernels, "is_rocm", lambda: True)
    monkeypatch.setattr(transfer, "is_rocm", lambda: True)
    monkeypatch.syspath_prepend(tmp_path)
    fake_aiter.install(tmp_path)
    attention = load_aiter(Target("gfx950", BF16, 16))
    config = EncoderConfig.load(str(write_tiny_encoder(tmp_path)))
    torch.manual_seed(0)
    tower = Dinov2.from_checkpoint(CHECKPOINT, config, attention).eval().to(BF16)
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return Forward(tower, Backend("aiter", attention, "device", True), CPU, BF16)


def dinov2_call(grids: Sequence[Grid], output: Output = "pooled") -> Call:
    return Call(PackedLayout.of([(1, *grid) for grid in grids], 1), output)


@pytest.mark.parametrize("output", ["pooled", "patch"])
@torch.inference_mode()
def test_a_tower_on_aiter_is_captured_with_its_list_argument(
    on_aiter: Forward, output: Output
) -> None:
    settings = GraphSettings(graph_mode="exact", admission="always", max_patches=64, max_images=4)
    runner = runner_of(on_aiter, settings, FakeRecorder())
    calls = [dinov2_call(grids, output) for grids in ([(2, 3)], [(2, 2), (4, 5)], [(5, 4), (2, 2)])]
    for call in calls:
        runner.run(torch.randn(call.layout.num_rows - call.layout.num_images, 588).to(BF16), call)
        while runner.idle():
            pass
    fake_aiter.calls.clear()
    before = runner.stats().hits

    for call in calls:
        patches = torch.randn(call.layout.num_rows - call.layout.num_images, 588).to(BF16)
        rows = runner.run(patches, call)
        assert transfer.same_bits(rows, on_aiter.eager(patches, call))

    assert runner.stats().hits == before + 3
    assert runner.stats().captures == 2
    assert {type(call["max_seqlen_q"]) for call in fake_aiter.calls} == {int}


@torch.inference_mode()
def test_slabs_keep_the_type_of_what_they_hold(on_aiter: Forward) -> None:
    layout = dinov2_call([(2, 3)]).layout

    planner = Planner("exact", 1, 64, 4)
    place = Arena(on_aiter, planner).place(planner.exact_plan(Call(layout, "pooled")))

    host = on_aiter.tower.inputs(layout)
    assert place.patches_PC.dtype == BF16
    assert [view.dtype for view in place.inputs] == [values.dtype for values in host]
    assert all(torch.equal(view, values) for view, values in zip(place.inputs, host, strict=True))


@pytest.mark.parametrize("rocm", [False, True])
def test_refilling_keeps_every_bit(monkeypatch: pytest.MonkeyPatch, rocm: bool) -> None:
    monkeypatch.setattr(transfer, "is_rocm", lambda: rocm)

    def upload(*_: object) -> Tensor:
        raise AssertionError("what is on the device already cannot be pinned")

    monkeypatch.setattr(transfer, "upload", upload)
    floats = torch.tensor([-0.0, 0.0, torch.nan, torch.inf, 1e-45, -3.5])
    numbers = torch.tensor([0, -1, 2**62, 7])

    for values in (floats, floats.to(BF16), numbers, numbers.int()):
        view = torch.zeros_like(values)
        transfer.refill(view, values)
        assert transfer.same_bits(view, values)


@pytest.mark.parametrize(
    ("yaml_value", "mode"), [(False, "off"), ("off", "off"), ("exact", "exact")], ids=str
)
def test_a_bare_off_in_yaml_means_off(yaml_value: object, mode: str) -> None:
    assert GraphSettings.model_validate({"graph_mode": yaml_value}).graph_mode == mode


def test_an_operator_overrides_by_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = GraphSettings()
    environment = {"ENCODER_GRAPH_MODE": "off", "ENCODER_GRAPH_CAPACITY": "4", "HOME": "/"}

    changed = settings.overridden(environment)

    assert (changed.graph_mode, changed.graph_capacity) == ("off", 4)
    assert changed.max_patches == settings.max_patches
    with pytest.raises(ConfigError, match="ENCODER_GRAPH_CAPACITY"):
        settings.overridden({"ENCODER_GRAPH_CAPACITY": "many"})
    monkeypatch.setenv("ENCODER_GRAPH_MODE", "on")
    with pytest.raises(ConfigError, match="ENCODER_GRAPH_MODE"):
        Encoder.load(EncoderConfig.load(str(write_tiny_encoder(tmp_path))))
