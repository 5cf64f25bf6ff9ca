"""What comes to an image encoder, and when: seeded, so that every run and every machine has it."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from encoders.config import EncoderConfig
from encoders.packing import GridTHW
from encoders.sizes import grid_thw

CONFIG = EncoderConfig.load("qwen3-vl-32b")
APP_SIZES = [
    (512, 512), (768, 1024), (1024, 768), (480, 640), (224, 224), (1024, 1024),
    (512, 768), (320, 480), (640, 640), (360, 640), (336, 336), (720, 1280),
]  # fmt: skip
"""Height and width of what an app's own screens upload, most frequent first."""
ODD_SHARE = 0.2

Size = tuple[int, int]


class Bursts(NamedTuple):
    """How images come: a geometric number of them close together, then a pause. Gaps are
    exponential, and means are given.
    """

    mean_images: float
    most_images: int
    gap_ms: float
    """Within a burst, about the time in which a Batcher decodes an image."""
    pause_ms: float


BURSTS = {
    "calm": Bursts(3, 16, 2.0, 60.0),
    "busy": Bursts(3, 16, 2.0, 25.0),
    "crowded": Bursts(6, 32, 0.5, 150.0),
}


class Arrival(NamedTuple):
    """An image that is decoded and waits from now on."""

    ms: float
    grid: GridTHW


def app_size(chance: random.Random) -> Size:
    """One of twelve by Zipf, or with a chance of a fifth one from 64 to 1024 pixels a side."""
    if chance.random() < ODD_SHARE:
        return round(64 * 16 ** chance.random()), round(64 * 16 ** chance.random())
    (size,) = chance.choices(APP_SIZES, [1 / rank for rank in range(1, 1 + len(APP_SIZES))])
    return size


def web_size(chance: random.Random) -> Size:
    """Log-normal area around 0.4 Mpx, aspect from 1:3 to 3:1."""
    area = min(max(chance.lognormvariate(12.9, 0.9), 64 * 64), 2048 * 1600)
    aspect = 3 ** chance.uniform(-1, 1)
    return round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)


SIZES: dict[str, Callable[[random.Random], Size]] = {"app": app_size, "web": web_size}


def arrivals(name: str, bursts: Bursts, seed: int = 0) -> Iterator[Arrival]:
    """Images without end, by Qwen3-VL's size rule."""
    chance, size, now = random.Random(f"{name} {seed}"), SIZES[name], 0.0
    while True:
        now += chance.expovariate(1 / bursts.pause_ms)
        yield Arrival(now, grid_thw(CONFIG, *size(chance)))
        more = 1
        while more < bursts.most_images and chance.random() > 1 / bursts.mean_images:
            more += 1
            now += chance.expovariate(1 / bursts.gap_ms)
            yield Arrival(now, grid_thw(CONFIG, *size(chance)))
