"""Distinct real JPEGs by case, made by all cores."""

import multiprocessing
import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from io import BytesIO
from pathlib import Path

MIX = ("512x512", "768x1024", "2048x1600")
"""The sizes of the case `mix`, in equal parts by request."""
VARIED = "varied"
"""The case in which each image has a size of its own: what was worked out for one fits no other."""
PHOTOS = (
    "astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg",
    "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip
CHUNK = 16

Pools = dict[str, list[bytes]]
"""Case -> its images."""


def jpegs(case: str, count: int, first: int = 0) -> list[bytes]:
    """Distinct JPEGs of quality 90 of a case: parts of photographs, the same every time."""
    return [jpeg(*size_of(case, index), index) for index in range(first, first + count)]


def size_of(case: str, index: int) -> tuple[int, int]:
    """Height and width: the case's own, or `varied`, areas and aspects as they come on the web."""
    if case != VARIED:
        height, width = map(int, case.split("x"))
        return height, width
    rng = random.Random(f"{case} {index}")
    area = min(max(rng.lognormvariate(12.9, 0.9), 64**2), 2048 * 1600)
    aspect = 3 ** rng.uniform(-1, 1)
    return round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)


def jpeg(height: int, width: int, index: int) -> bytes:
    """A part of a photo, somewhere and of some size, brought to the wanted one."""
    from PIL import Image

    photo = _photos()[index % len(PHOTOS)]
    rng = random.Random(f"{height}x{width} {index}")
    scale = min(photo.width / width, photo.height / height) * rng.uniform(0.5, 1)
    left = rng.uniform(0, photo.width - scale * width)
    top = rng.uniform(0, photo.height - scale * height)
    box = (left, top, left + scale * width, top + scale * height)
    file = BytesIO()
    photo.resize((width, height), Image.Resampling.BICUBIC, box).save(file, "JPEG", quality=90)
    return file.getvalue()


def pools(cases: Sequence[str], count: int) -> Pools:
    """Images of every case. `mix` takes its sizes in turn, and their images from their cases."""
    sizes = dict.fromkeys(size for case in cases for size in (MIX if case == "mix" else (case,)))
    tasks = [
        (size, min(CHUNK, count - first), first)
        for size in sizes
        for first in range(0, count, CHUNK)
    ]
    processes = min(os.cpu_count() or 1, len(tasks))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn) as workers:
        made = list(workers.map(jpegs, *zip(*tasks, strict=True)))
    by_size: Pools = {size: [] for size in sizes}
    for (size, *_), files in zip(tasks, made, strict=True):
        by_size[size] += files
    return {case: mixed(by_size) if case == "mix" else by_size[case] for case in cases}


def mixed(by_size: Pools) -> list[bytes]:
    """One image of each size of the mix, then the next of each."""
    return [data for turn in zip(*(by_size[size] for size in MIX), strict=True) for data in turn]


def share(images: Sequence[bytes], case: str, index: int, processes: int) -> list[bytes]:
    """The images of one of several generators. Of a mix, each has every size equally often."""
    turn = len(MIX) if case == "mix" else 1
    return [data for i, data in enumerate(images) if i // turn % processes == index]


@cache
def _photos() -> list:  # type: ignore[type-arg]
    import skimage
    from PIL import Image

    folder = Path(skimage.__file__).parent / "data"
    return [Image.open(folder / name).convert("RGB") for name in PHOTOS]
