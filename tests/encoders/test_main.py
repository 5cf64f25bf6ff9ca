"""`python -m encoders`, as a person runs it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from encoders.__main__ import main
from encoders.encoder import Encoder
from encoders.image import decode_rgb
from encoders.packing import PackedBatch
from encoders.sizes import grid_thw


def expected(encoder: Encoder, path: Path, output: str) -> torch.Tensor:
    pixels = decode_rgb(path.read_bytes(), encoder.config.limits)
    batch = PackedBatch.of([pixels], [grid_thw(encoder.config, *pixels.shape[:2])], 1)
    return encoder.encode(batch, output)[0]


@pytest.mark.parametrize("output", ["pooled", "patch"])
def test_every_file_becomes_an_array_under_its_name(
    photo_dir: Path, tmp_path: Path, demo_encoder: Encoder, output: str
) -> None:
    files = [photo_dir / name for name in ("chelsea.png", "astronaut.png", "rocket.jpg")]
    out = tmp_path / "out.safetensors"

    status = main([*map(str, files), "--output", output, "--batch", "2", "--out", str(out)])

    arrays = load_file(out)
    assert status == 0
    assert set(arrays) == set(map(str, files))
    for file in files:
        whole = expected(demo_encoder, file, output)
        torch.testing.assert_close(arrays[str(file)], whole, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_dtype_is_the_one_asked_for(photo_dir: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "out.safetensors"

    main([str(photo_dir / "chelsea.png"), "--dtype", dtype, "--out", str(out)])

    (array,) = load_file(out).values()
    assert array.dtype == getattr(torch, dtype)
    torch.testing.assert_close(array.float().norm(), torch.tensor(1.0), atol=5e-3, rtol=0)


def test_pooled_rows_stack_into_one_npy(photo_dir: Path, tmp_path: Path) -> None:
    files = [str(photo_dir / name) for name in ("chelsea.png", "astronaut.png")]
    out = tmp_path / "out.npy"

    main([*files, "--out", str(out)])

    assert np.load(out).shape == (2, 384)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.png"], "absent.png: No such file"),
        ([__file__], "not an image of type"),
        ([__file__, "--encoder", "dinov9"], "no encoder named 'dinov9'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([*arguments, "--out", str(tmp_path / "out.safetensors")])

    assert status == 1
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_rows_of_unequal_number_do_not_fit_npy(
    photo_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(photo_dir / name) for name in ("chelsea.png", "astronaut.png")]

    status = main([*files, "--output", "patch", "--out", str(tmp_path / "out.npy")])

    assert status == 1
    assert "write .safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--out", "x.txt"], ["--out", "x.npy", "--dtype", "bfloat16"]])
def test_an_impossible_format_is_refused_before_work(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["a.png", *options])

    assert ".safetensors" in capsys.readouterr().err
