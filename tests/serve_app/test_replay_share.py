"""What share of images the real queue and the real graph runner replay, on seeded arrivals.

20 000 batches of each trace in virtual time, by a modelled device: the figures are the same on
every machine. `python -m benchmarks.simulate_batches` prints more of them.
"""

from pathlib import Path

import pytest

from encoders.graph_keys import Call, Planner
from encoders.graph_profile import GraphProfile
from encoders.packing import PackedLayout
from tests import virtual_time
from tests.traces import BURSTS, CONFIG, arrivals

BATCHES = 20_000


@pytest.mark.parametrize(
    ("trace", "mode", "least"), [("web", "budget", 0.95), ("app", "exact", 0.6)]
)
def test_most_images_in_small_batches_are_replayed_and_none_waits_long_for_it(
    trace: str, mode: str, least: float
) -> None:
    preferred, first_come = virtual_time.compare(trace, BURSTS["calm"], mode, BATCHES)

    assert preferred.batches == BATCHES
    assert preferred.replayable > 0.5, "else this trace says little"
    assert preferred.replayed >= least
    # Budgets hardly need the preference, and the two runs learn by chance what gains.
    assert preferred.replayed > first_come.replayed - (0.02 if mode == "budget" else 0)
    assert preferred.mean_wait_ms < first_come.mean_wait_ms + 0.5
    assert preferred.p99_wait_ms < first_come.p99_wait_ms + 5
    assert preferred.encoder_ms_per_image < 1.01 * first_come.encoder_ms_per_image


@pytest.mark.parametrize(("trace", "mode"), [("web", "budget"), ("app", "exact")])
def test_under_load_a_preference_takes_no_throughput(trace: str, mode: str) -> None:
    preferred, first_come = virtual_time.compare(trace, BURSTS["busy"], mode, 2_000)

    assert first_come.utilisation > 0.4
    assert preferred.encoder_ms_per_image < 1.01 * first_come.encoder_ms_per_image
    assert preferred.p99_answer_ms < 1.05 * first_come.p99_answer_ms


@pytest.mark.parametrize(
    ("trace", "mode"), [("web", "budget"), ("app", "budget"), ("app", "exact"), ("web", "exact")]
)
def test_an_encoder_that_starts_with_a_profile_replays_as_much_as_the_one_that_wrote_it(
    trace: str, mode: str, tmp_path: Path
) -> None:
    def profile() -> GraphProfile:
        return GraphProfile(tmp_path / "hot.json", CONFIG, 0)

    warm, cold = virtual_time.warm_and_cold(trace, mode, before=2_000, batches=100, profile=profile)

    assert cold > warm - 0.02
    assert cold > (0.8 if mode == "budget" else 0)


def test_the_model_takes_what_was_measured() -> None:
    planner = Planner("exact", 2, 16_384, 64)
    layouts = [PackedLayout.of([(1, 32, 32)] * images, 0) for images in (1, 4, 8)]

    times = [
        virtual_time.replay_ms(planner.exact_plan(Call(layout, "pooled"))) for layout in layouts
    ]

    assert times == pytest.approx([2.9, 8.9, 17.9], rel=0.06)


def test_a_trace_is_the_same_each_time_and_rises() -> None:
    first, again = (arrivals("web", BURSTS["calm"]) for _ in range(2))

    images = [next(first) for _ in range(500)]

    assert images == [next(again) for _ in range(500)]
    assert images == sorted(images, key=lambda image: image.ms)
