"""Captured graphs on a real GPU: exact, owned, bounded, and alive after what kills a capture.

Written for an H200; on an MI355X the same file runs AITER in HIP graphs.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from benchmarks.bench_encoder import SUBJECTS, build
from encoders import transfer
from encoders.config import GraphSettings
from encoders.errors import ConfigError
from encoders.forward import Forward, Results, WayBack
from encoders.graph_runner import GraphRunner
from encoders.packing import Call, Output, PackedLayout, num_patches
from encoders.transfer import same_bits
from tests.gpu.sync import no_sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.timeout(1200),  # AITER compiles for minutes
    pytest.mark.filterwarnings("ignore"),  # of kernel libraries and of torch's sync detector
]

CUDA = torch.device("cuda")
Grid = tuple[int, int]


@pytest.fixture(scope="module", params=sorted(SUBJECTS))
def forward(request: pytest.FixtureRequest) -> Forward:
    torch.manual_seed(0)
    subject = SUBJECTS[request.param]()
    tower, backend = build(subject, CUDA, "auto")
    return Forward(tower, backend, CUDA, torch.bfloat16)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def runner_of(forward: Forward, **settings: object) -> GraphRunner:
    settings = {"graph_mode": "exact", "admission": "always", **settings}
    return GraphRunner.on(forward, GraphSettings.model_validate(settings))


def call_of(forward: Forward, grids: Sequence[Grid], output: Output = "pooled") -> Call:
    layout = PackedLayout.of([(1, *grid) for grid in grids], forward.tower.num_prefix)
    return Call(layout, output)


def patches_for(forward: Forward, call: Call, seed: int) -> Tensor:
    """Normalised patches of nobody's photos."""
    tower, generator = forward.tower, torch.Generator(CUDA).manual_seed(seed)
    count = sum(num_patches(grid) for grid in call.layout.grid_thw)
    shape = (count, 3 * tower.frames * tower.patch_size**2)
    return torch.randn(shape, generator=generator, device=CUDA).bfloat16()


def settle(runner: GraphRunner) -> None:
    """Let it capture all that it wants to."""
    while runner.idle():
        pass


def capture(runner: GraphRunner, forward: Forward, *calls: Call) -> None:
    """See each call once, and capture it."""
    for call in calls:
        runner.run(patches_for(forward, call, 0), call)
        settle(runner)


def exact(runner: GraphRunner, forward: Forward, call: Call, seed: int) -> bool:
    """Whether the runner's answer is eager's to the bit."""
    patches = patches_for(forward, call, seed)
    rows = runner.run(patches, call)
    with runner.on_stream():
        return same_bits(rows, forward.eager(patches, call))


SMALL, LARGE, MIX = [(8, 8)], [(48, 64), (32, 32)], [(8, 8), (4, 12), (32, 24)]


@pytest.mark.parametrize("output", ["pooled", "patch"])
def test_small_large_small_in_any_order_of_arrival(forward: Forward, output: Output) -> None:
    runner = runner_of(forward)
    sequence = [
        SMALL,
        LARGE,
        SMALL,
        MIX,
        MIX[::-1],
        LARGE[::-1],
        SMALL,
        [(24, 32), (8, 8), (12, 4)],
    ]
    calls = [call_of(forward, grids, output) for grids in sequence]
    capture(runner, forward, *calls)

    checks = [exact(runner, forward, call, seed) for seed, call in enumerate(calls)]

    assert all(checks)
    stats = runner.stats()
    assert (stats.captures, stats.mismatches) == (3, 0)
    assert stats.hits >= len(calls)


def test_equal_totals_with_other_boundaries_are_other_graphs(forward: Forward) -> None:
    runner = runner_of(forward)
    calls = [call_of(forward, grids) for grids in ([(8, 16)], [(8, 8), (8, 8)], [(8, 12), (8, 4)])]
    capture(runner, forward, *calls)

    assert all(exact(runner, forward, call, 1) for call in calls)
    assert runner.stats().captures == 3


def test_a_result_is_the_callers(forward: Forward) -> None:
    runner, call = runner_of(forward), call_of(forward, SMALL)
    capture(runner, forward, call)
    rows = runner.run(patches_for(forward, call, 1), call)
    kept = rows.clone()

    runner.run(patches_for(forward, call, 2), call)
    runner.poison()

    assert same_bits(rows, kept)


def test_a_replay_waits_for_nothing(forward: Forward) -> None:
    runner, call = runner_of(forward), call_of(forward, MIX)
    patches = patches_for(forward, call, 1)
    capture(runner, forward, call)

    with no_sync():
        runner.run(patches, call)

    assert runner.stats().hits == 1


def test_what_is_replayed_after_poison_is_exact(forward: Forward) -> None:
    runner = runner_of(forward)
    calls = [call_of(forward, grids) for grids in (LARGE, SMALL, MIX)]
    capture(runner, forward, *calls)

    for seed, call in enumerate(calls):
        runner.poison()
        assert exact(runner, forward, call, seed)


def test_evicted_graphs_leave_the_rest_right(forward: Forward) -> None:
    runner = runner_of(forward, graph_capacity=3)
    calls = [call_of(forward, [(4, 4 * n)]) for n in range(1, 13)]
    capture(runner, forward, *calls)
    settle(runner)

    live = runner.stats()
    assert live.graphs <= 3
    assert live.evictions + live.rebuilds > 0
    held = [torch.full((1 << 24,), torch.nan, device=CUDA) for _ in range(8)]
    runner.poison()
    assert all(exact(runner, forward, call, 1) for call in calls)
    assert all(bool(block.isnan().all()) for block in held)
    assert runner.stats().hits >= live.hits + live.graphs


def test_down_to_no_graph_and_back(forward: Forward) -> None:
    runner, call = runner_of(forward), call_of(forward, SMALL)
    capture(runner, forward, call)

    runner.release()
    assert runner.stats().graphs == 0
    capture(runner, forward, call)

    assert runner.stats().graphs == 1
    assert exact(runner, forward, call, 1)


def test_a_rebuild_captures_the_hottest_anew(forward: Forward) -> None:
    runner = runner_of(forward)
    calls = [call_of(forward, grids) for grids in (LARGE, SMALL)]
    capture(runner, forward, *calls)

    runner.rebuild()
    settle(runner)

    assert runner.stats().graphs == 2
    assert all(exact(runner, forward, call, 1) for call in calls)


class Synchronising:
    """A tower during whose forward another thread waits for the whole device, if told to."""

    def __init__(self, forward: Forward) -> None:
        self._tower = forward.tower
        self.armed = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._tower, name)

    def __call__(self, *args: object) -> Tensor:
        rows = self._tower(*args)
        if self.armed and torch.cuda.is_current_stream_capturing():
            thread = threading.Thread(target=_synchronise)
            thread.start()
            thread.join()
        return rows


def _synchronise() -> None:
    with suppress(RuntimeError):  # it fails there too
        torch.cuda.synchronize()


def test_a_capture_that_a_foreign_synchronise_kills_is_survived(forward: Forward) -> None:
    tower = Synchronising(forward)
    forward = Forward(tower, forward.backend, CUDA, torch.bfloat16)
    runner = runner_of(forward)
    before, killed = call_of(forward, SMALL), call_of(forward, MIX)
    capture(runner, forward, before)
    used = used_bytes()

    tower.armed = True
    runner.run(patches_for(forward, killed, 0), killed)
    runner.idle()
    assert runner.stats().failures == 1
    assert exact(runner, forward, killed, 1)
    assert exact(runner, forward, before, 1)  # graphs that were there still replay

    tower.armed = False
    settle(runner)
    capture(runner, forward, killed)
    assert runner.stats().rebuilds == 1
    assert runner.stats().graphs == 2
    assert all(exact(runner, forward, call, 2) for call in (before, killed))
    assert used_bytes() - used < 1 << 30


def test_captures_that_always_fail_end_and_lose_bounded_memory(forward: Forward) -> None:
    tower = Synchronising(forward)
    forward = Forward(tower, forward.backend, CUDA, torch.bfloat16)
    runner = runner_of(forward)
    tower.armed = True
    used = []

    for n in range(1, 13):
        call = call_of(forward, [(4, 4 * n)])
        assert exact(runner, forward, call, n)
        settle(runner)
        used.append(used_bytes())

    assert runner.stats().failures == 8
    assert runner.stats().misses["disabled"] > 0
    assert max(used) - used[0] < 1 << 29  # each failure may leak what its pool held


class Dropping:
    """A tower that drops results of an earlier batch while it is captured, in another thread."""

    def __init__(self, forward: Forward) -> None:
        self._tower = forward.tower
        self.kept = list[Tensor]()
        self.dropped = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tower, name)

    def __call__(self, *args: object) -> Tensor:
        rows = self._tower(*args)
        if self.kept and torch.cuda.is_current_stream_capturing():
            self.dropped += len(self.kept)
            thread = threading.Thread(target=self.kept.clear)
            thread.start()
            thread.join()
        return rows


def test_results_may_be_dropped_while_a_graph_is_captured(forward: Forward) -> None:
    tower, way_back = Dropping(forward), WayBack(CUDA)
    forward = Forward(tower, forward.backend, CUDA, torch.bfloat16)
    runner = runner_of(forward)
    seen, calls = call_of(forward, SMALL), [call_of(forward, grids) for grids in (LARGE, MIX)]

    for seed, call in enumerate([*calls, *calls]):
        with runner.on_stream():
            rows = runner.run(patches_for(forward, seen, seed), seen)
            results = Results(rows, None, range(len(rows)), way_back.begin(), way_back)
        expected = rows.cpu()
        tower.kept = results.wait()
        assert torch.equal(torch.stack(tower.kept), expected)
        del results
        capture(runner, forward, call)
        torch.empty(1 << 16, pin_memory=True)  # torch asks after what was dropped

    assert tower.dropped > 0
    assert runner.stats().failures == 0
    assert all(exact(runner, forward, call, 9) for call in (seen, *calls))


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_other_threads_may_allocate_copy_and_wait_for_events(forward: Forward) -> None:
    runner, stop, failures = runner_of(forward), threading.Event(), []

    def work() -> None:
        stream = torch.cuda.Stream()
        try:
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    torch.ones(1 << 20, device=CUDA).to("cpu", non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                    event.synchronize()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    calls = [call_of(forward, [(4, 4 * n), (8, 8)]) for n in range(1, 9)]
    try:
        capture(runner, forward, *calls)
    finally:
        stop.set()
        thread.join()

    assert failures == []
    assert (runner.stats().captures, runner.stats().failures) == (8, 0)
    assert all(exact(runner, forward, call, 1) for call in calls)


def test_little_free_memory_means_no_capture(forward: Forward) -> None:
    runner = runner_of(forward, free_memory_floor=1 << 50)
    call = call_of(forward, SMALL)

    capture(runner, forward, call)

    assert exact(runner, forward, call, 1)
    assert (runner.stats().captures, runner.stats().short_of_memory) == (0, 1)


def test_the_largest_admitted_layouts_fit_their_slabs(forward: Forward) -> None:
    runner = runner_of(forward, max_patches=256, max_images=4)
    fits = [[(16, 16)], [(8, 8)] * 4, [(2, 2)] * 3 + [(2, 122)]]
    too_large = [[(16, 18)], [(2, 2)] * 5]
    for output in ("pooled", "patch"):
        calls = [call_of(forward, grids, output) for grids in (*fits, *too_large)]
        capture(runner, forward, *calls)
        assert all(exact(runner, forward, call, 1) for call in calls)

    assert runner.stats().captures == 2 * len(fits)
    assert runner.stats().misses["too_large"] == 2 * 2 * len(too_large)


BUDGET = {"graph_mode": "budget", "max_patches": 4096, "max_images": 8}


@pytest.mark.parametrize("output", ["pooled", "patch"])
def test_one_budget_graph_gives_eagers_bits_for_layouts_in_turn(
    forward: Forward, output: Output
) -> None:
    runner = runner_of(forward, **BUDGET)
    layouts = [[(32, 32)], [(28, 32), (8, 14)], [(16, 26), (20, 20), (12, 16)], [(32, 30), (6, 8)]]
    calls = [call_of(forward, grids, output) for grids in layouts]
    capture(runner, forward, calls[0], *calls)
    captured = runner.stats()

    checks = [exact(runner, forward, call, seed) for seed in range(25) for call in calls]

    assert all(checks)
    stats = runner.stats()
    assert stats.hits == captured.hits + 100  # by the budget, or where that changes bits, exactly
    if captured.mismatches == 0:
        assert stats.captures == 1


def test_what_rocm_needs_for_its_scalar_cache_gives_the_same_bits(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "is_rocm", lambda: True)
    runner = runner_of(forward, **BUDGET)
    calls = [call_of(forward, grids) for grids in ([(32, 32)], [(16, 26), (20, 20), (12, 16)])]
    capture(runner, forward, *calls)

    assert all(exact(runner, forward, call, seed) for seed in range(3) for call in calls)
    assert runner.stats().hits >= 6


def test_nan_in_the_padding_of_a_budget_stays_there(forward: Forward) -> None:
    runner = runner_of(forward, **BUDGET)
    calls = [call_of(forward, grids) for grids in ([(32, 32)], [(16, 26), (20, 20), (8, 12)])]
    capture(runner, forward, *calls)

    for seed, call in enumerate(calls * 2):
        runner.poison()
        assert exact(runner, forward, call, seed)
    assert runner.stats().hits >= 4


def test_an_images_bits_are_its_own_from_the_verified_size_on(forward: Forward) -> None:
    try:
        runner = runner_of(forward, precision="invariant", **BUDGET)
    except ConfigError as error:  # it was tried, and is not promised
        pytest.skip(str(error))
    floor = runner.stats().invariant_from
    assert floor is not None
    call = call_of(forward, [(32, 32), (24, 24), (4, 4), (16, 20), (2, 2)])
    patches = patches_for(forward, call, 1)

    rows = runner.run(patches, call)

    grids = call.layout.grid_thw
    own = torch.split(patches, [num_patches(grid) for grid in grids])
    for row, patch_PC, grid in zip(rows, own, grids, strict=True):
        alone = Call(PackedLayout.of([grid], forward.tower.num_prefix), "pooled")
        with runner.on_stream():
            assert same_bits(row[None], forward.eager(patch_PC, alone)), (grid, floor)
