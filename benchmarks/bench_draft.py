"""What `draft_jpegs_from` saves of decoding, and what it changes of embeddings.

Eight photographs, enlarged to 12 Mpx and compressed at quality 90, for the DINOv2 demo on the CPU:
each decoded whole and cut, and the cosine between the two embeddings. The last line of stdout is
one JSON document.

usage: python benchmarks/bench_draft.py [--write NAME]
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_encoder import conditions, publish, table
from benchmarks.serving.bare import cpu_name
from benchmarks.serving.images import PHOTOS, jpeg
from encoders.config import EncoderConfig
from encoders.encoder import Encoder
from encoders.packing import PackedBatch
from encoders.reading import read
from encoders.sizes import NUM_PREFIX

SIZE = (3000, 4000)
LEAST = 8_000_000


def compare(encoder: Encoder, whole: EncoderConfig, cut: EncoderConfig, data: bytes) -> list[Any]:
    """Milliseconds of decoding whole and cut, the cut one's sides, the cosine of the embeddings."""
    milliseconds, rows, sides = list[float](), list[torch.Tensor](), ""
    for config in (whole, cut):
        start = time.perf_counter()
        pixels, grid = read(data, config)
        milliseconds.append(round((time.perf_counter() - start) * 1e3, 1))
        sides = "x".join(map(str, pixels.shape[:2]))
        rows += encoder.encode(PackedBatch.of([pixels], [grid], NUM_PREFIX[config.family]))
    return [*milliseconds, sides, round(float(rows[0] @ rows[1]), 6)]


def main() -> None:
    """Measure, write the results if asked to, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="results file without suffix: .md and .json")
    options = parser.parse_args()
    whole = EncoderConfig.load("dinov2-demo")
    cut = whole.model_copy(update={"draft_jpegs_from": LEAST})
    encoder = Encoder.load(whole)
    files = [jpeg(*SIZE, index) for index in range(len(PHOTOS))]
    compare(encoder, whole, cut, files[0])  # what is loaded on first use
    rows = [
        [name, *compare(encoder, whole, cut, data)]
        for name, data in zip(PHOTOS, files, strict=True)
    ]
    about = conditions(torch.device("cpu"), "dinov2-demo", "sdpa")
    about |= {"hardware": f"{cpu_name()}, {os.cpu_count()} cores", "dtype": whole.dtype}
    about["median ms, whole and cut"] = ", ".join(
        f"{statistics.median(row[column] for row in rows):.0f}" for column in (1, 2)
    )
    about["least cosine"] = str(min(row[4] for row in rows))
    lines = [f"# Huge JPEGs, whole and cut, on {about['hardware']}", ""]
    lines += [f"* {key}: {value}" for key, value in about.items()]
    head = ("photo", "whole ms", "cut ms", "cut to", "cosine")
    cells = [list(map(str, row)) for row in rows]
    lines += ["", *table(*head, rows=cells)]
    publish(about | {"rows": rows}, "\n".join(lines) + "\n", options.write)


if __name__ == "__main__":
    main()
