"""Both towers on a real GPU: bf16 against fp32, no waiting inside a forward."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.bench_encoder import SUBJECTS, Subject, released
from encoders import EncoderConfig
from encoders.attention import Backend, sdpa
from encoders.backends import choose_backend
from encoders.encoder import Encoder
from encoders.forward import Forward
from encoders.packing import PackedBatch
from encoders.sizes import NUM_PREFIX, grid_thw
from encoders.towers.load import FAMILIES
from encoders.weights import load_into
from tests.gpu.sync import no_sync

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SIZES = [(512, 512), (300, 451), (768, 1024), (64, 700)]


def encoder_of(subject: Subject, dtype: str, *, attention: str = "auto") -> Encoder:
    """The subject's random weights in our tower on the GPU."""
    settings = subject.settings.model_copy(update={"dtype": dtype, "normalize": False})
    family = FAMILIES[settings.family]
    torch_dtype = getattr(torch, dtype)
    backend = choose_backend(attention, CUDA, torch_dtype, family.head_size(subject.config_json))
    tower = family.from_checkpoint(subject.config_json, settings, backend.attention)
    state = {k: v for k, v in released(subject.reference).items() if tower.wanted(k)}
    load_into(tower, tower.convert(state))
    return Encoder(
        settings, Forward(tower.eval().to(CUDA, torch_dtype), backend, CUDA, torch_dtype)
    )


def batch_for(config: EncoderConfig, sizes: Sequence[tuple[int, int]] = SIZES) -> PackedBatch:
    """Smooth random pictures of several sizes."""
    rng = np.random.default_rng(0)
    images = []
    for height, width in sizes:
        coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8))
        images.append(np.array(coarse.resize((width, height), Image.Resampling.BICUBIC)))
    grids = [grid_thw(config, *image.shape[:2]) for image in images]
    return PackedBatch.of(images, grids, NUM_PREFIX[config.family])


@pytest.fixture(scope="module", params=sorted(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    torch.manual_seed(0)
    return SUBJECTS[request.param]()


@pytest.mark.parametrize("output", ["pooled", "patch"])
def test_bf16_is_near_fp32(subject: Subject, output: str) -> None:
    batch = batch_for(subject.settings)
    expected = encoder_of(subject, "float32").encode(batch, output)

    rows = encoder_of(subject, "bfloat16").encode(batch, output)

    for row, whole in zip(rows, expected, strict=True):
        assert (row - whole).norm() / whole.norm() < 2e-2


def test_fp32_on_the_gpu_is_fp32_on_the_cpu(subject: Subject) -> None:
    # Sizes that neither family resizes: the devices' resampling differs by single levels.
    batch = batch_for(subject.settings, [(224, 448), (672, 224), (224, 672)])
    on_gpu = encoder_of(subject, "float32")
    tower = FAMILIES[on_gpu.config.family].from_checkpoint(subject.config_json, on_gpu.config, sdpa)
    state = {k: v for k, v in released(subject.reference).items() if tower.wanted(k)}
    load_into(tower, tower.convert(state))
    backend = Backend("sdpa", sdpa, boundaries="host", capturable=False)
    on_cpu = Encoder(
        on_gpu.config, Forward(tower.eval().float(), backend, torch.device("cpu"), torch.float32)
    )

    rows = on_gpu.encode(batch)

    for row, expected in zip(rows, on_cpu.encode(batch), strict=True):
        assert (row - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("output", ["pooled", "patch"])
def test_a_forward_waits_for_nothing(subject: Subject, output: str) -> None:
    encoder = encoder_of(subject, "bfloat16")
    batch = batch_for(subject.settings)
    encoder.forward(batch, output)  # lazy initialisation may wait

    with no_sync():
        encoder.forward(batch, output)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_are_the_callers_own(subject: Subject, dtype: str) -> None:
    encoder = encoder_of(subject, "bfloat16")
    batch = batch_for(subject.settings)
    rows = encoder.encode(batch, "patch", dtype)
    kept = [row.clone() for row in rows]

    encoder.encode(PackedBatch(batch.layout, batch.sizes, 255 - batch.pixels), "patch", dtype)

    for row, before in zip(rows, kept, strict=True):
        assert row.device.type == "cpu"
        assert row.dtype == getattr(torch, dtype)
        assert torch.equal(row, before)


def test_batches_that_are_started_one_behind_another_keep_their_own_pixels_and_rows(
    subject: Subject,
) -> None:
    encoder, config = encoder_of(subject, "bfloat16"), subject.settings
    rng = np.random.default_rng(1)
    batches = []
    some = [(64, 64)], SIZES, [(512, 512)], [(64, 700), (96, 96)]
    for n, sizes in enumerate(some * 3):
        sizes = sizes * (1 + n // 4)
        images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
        grids = [grid_thw(config, *size) for size in sizes]
        batches.append(PackedBatch.of(images, grids, NUM_PREFIX[config.family]))
    for output in ("pooled", "patch"):
        expected = [encoder.encode(batch, output) for batch in batches]

        fresh = encoder_of(subject, "bfloat16")  # its buffers have yet to grow, batch after batch
        started = [fresh.start(batch, output) for batch in batches]

        for results, rows in zip(started, expected, strict=True):
            assert all(map(torch.equal, results.wait(), rows))
            assert results.milliseconds > 0


def test_starting_a_batch_waits_for_nothing(subject: Subject) -> None:
    encoder = encoder_of(subject, "bfloat16")
    batch = batch_for(subject.settings)
    for _ in range(3):  # every slot of the staging buffers gets its size
        encoder.encode(batch)

    with no_sync():
        results = encoder.start(batch)

    assert len(results.wait()) == len(SIZES)
