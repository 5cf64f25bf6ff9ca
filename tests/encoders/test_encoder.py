"""What an Encoder gives back: whose memory it is, of which type, in which order."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from encoders import EncoderConfig
from encoders.encoder import Encoder
from encoders.errors import BackendUnavailable
from encoders.packing import PackedBatch
from tests.tiny import write_tiny_encoder

GRIDS = [(1, 2, 2), (1, 2, 5), (1, 3, 3)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EncoderConfig:
    return EncoderConfig.load(str(write_tiny_encoder(tmp_path_factory.mktemp("tiny"))))


def batch(seed: int) -> PackedBatch:
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (20, 30, 3), np.uint8) for _ in GRIDS]
    return PackedBatch.of(images, GRIDS, 1)


@pytest.mark.parametrize("output", ["pooled", "patch"])
def test_a_later_batch_leaves_earlier_results_alone(config: EncoderConfig, output: str) -> None:
    encoder = Encoder.load(config)
    results = encoder.encode(batch(0), output)
    kept = [result.clone() for result in results]

    encoder.encode(batch(1), output)

    assert all(torch.equal(result, before) for result, before in zip(results, kept, strict=True))


def test_results_come_in_order_of_arrival_with_a_row_for_each_patch(config: EncoderConfig) -> None:
    results = Encoder.load(config).encode(batch(0), "patch")

    assert [tuple(result.shape) for result in results] == [(4, 32), (10, 32), (9, 32)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_unit_length_is_made_in_fp32_and_cast_after(config: EncoderConfig, dtype: str) -> None:
    encoder = Encoder.load(config)
    exact = encoder.encode(batch(0))

    results = encoder.encode(batch(0), dtype=dtype)

    for result, whole in zip(results, exact, strict=True):
        torch.testing.assert_close(whole.norm(), torch.tensor(1.0), atol=1e-6, rtol=0)
        assert torch.equal(result, whole.to(getattr(torch, dtype)))


def test_patch_rows_keep_their_length(config: EncoderConfig) -> None:
    (row, *_) = Encoder.load(config).encode(batch(0), "patch")

    assert (row.norm(dim=-1) - 1).abs().min() > 1e-3


def test_read_only_pixels_are_neither_written_nor_complained_of(config: EncoderConfig) -> None:
    packed = batch(0)
    packed.pixels.flags.writeable = False  # as Ray hands them over

    results = Encoder.load(config).encode(packed)

    assert len(results) == 3


def test_the_attention_backend_and_what_took_time_are_reported_at_load(
    config: EncoderConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "encoders"):
        Encoder.load(config)

    assert "attention sdpa (auto for cpu, float32, head size 16)" in caplog.text
    assert re.search(r"weights in \d+\.\d s, kernels and 0 graphs in \d+\.\d s", caplog.text)


def test_a_backend_that_cannot_run_here_is_refused_at_load(config: EncoderConfig) -> None:
    with pytest.raises(BackendUnavailable, match="varlen"):
        Encoder.load(config.model_copy(update={"attention": "varlen"}))


def test_the_tiny_checkpoint_of_the_tests_is_whole(tmp_path: Path) -> None:
    config = EncoderConfig.load(str(write_tiny_encoder(tmp_path)))

    weights = dict(Encoder.load(config)._tower.named_parameters())

    torch.manual_seed(0)
    again = EncoderConfig.load(str(write_tiny_encoder(tmp_path)))
    for name, tensor in Encoder.load(again)._tower.named_parameters():
        assert torch.equal(tensor, weights[name])
        assert tensor.isfinite().all()
