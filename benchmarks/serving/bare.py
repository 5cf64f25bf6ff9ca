"""The Encoder by itself, on the batches that a load can form, pixels on the device already."""

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from encoders.config import EncoderConfig
from encoders.packing import GridTHW, PackedBatch, Pixels, num_patches
from encoders.reading import read
from encoders.sizes import NUM_PREFIX
from serve_app.waiting import BatchLimits

if TYPE_CHECKING:
    from torch import Tensor

    from encoders.encoder import Encoder

LONE_CALLS = 30
MAX_STEPS = 1000
NUM_BATCHES = 3
"""Different ones, one after another."""


class Want(NamedTuple):
    """What a load can have wait at once."""

    case: str
    outstanding: int
    output: str


class Machine(NamedTuple):
    """Where it ran."""

    device: str
    hardware: str
    num_gpus: int


@dataclass(frozen=True)
class Bare:
    """One size of batch. Images a second."""

    encoder: str
    case: str
    output: str
    outstanding: int
    images_per_batch: float
    images_per_s: float
    """Pixels on the device, one wait at the end, rows copied to the host."""
    encode_images_per_s: float | None
    """`Encoder.encode` of pixels on the host, each batch waited for before the next."""
    lone_forward_ms: float | None
    """Median of a batch of one image, from pixels on the device to its rows on the host."""
    gpu_busy: float | None = None


class Cost(NamedTuple):
    """What an image takes of a batch."""

    patches: int
    num_bytes: int = 0
    row_bytes: float = 0.0


def cut(costs: Sequence[Cost], outstanding: int, limits: BatchLimits) -> list[range]:
    """Batches of images in their order, each as large as the limits and the load allow."""
    batches, start = list[range](), 0
    most = min(outstanding, limits.max_images)
    room = Cost(limits.max_patches, limits.max_bytes, limits.max_row_bytes)
    while start < len(costs):
        end, totals = start, [0.0] * len(room)
        while end < len(costs) and end - start < most:
            totals = [total + cost for total, cost in zip(totals, costs[end], strict=True)]
            over = any(total > limit for total, limit in zip(totals, room, strict=True))
            if end > start and over:
                break
            end += 1
        batches.append(range(start, end))
        start = end
    return batches


def packed(
    images: Sequence[bytes],
    outstanding: int,
    config: EncoderConfig,
    limits: BatchLimits,
    row_bytes: float = 0.0,
) -> list[PackedBatch]:
    """The images decoded, in the largest batches that so many at once can become; whole ones.

    `row_bytes`: what a patch comes back as.
    """
    pixels, grids, ranges = list[Pixels](), list[GridTHW](), list[range]()
    costs = list[Cost]()
    for data in images:
        image, grid = read(data, config)
        pixels.append(image)
        grids.append(grid)
        patches = num_patches(grid)
        costs.append(Cost(patches, image.nbytes, row_bytes * patches))
        ranges = cut(costs, outstanding, limits)
        if len(ranges) > NUM_BATCHES:
            break
    prefix = NUM_PREFIX[config.family]
    whole = ranges[:-1] or ranges  # the last may be cut off by the images' end
    return [PackedBatch.of([pixels[i] for i in r], [grids[i] for i in r], prefix) for r in whole]


def measure_bare(
    encoder: str,
    device: str,
    images: dict[str, Sequence[bytes]],
    wants: Iterable[Want],
    limits: BatchLimits,
    seconds: float,
    random_into: Path | None,
    until: float,
) -> tuple[list[Bare], Machine, str]:
    """Load the Encoder and measure wants, as many as begin by the moment `until`.

    Also which configuration it was.
    """
    import torch

    from benchmarks.serving.weights import write_random
    from encoders.encoder import Encoder

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if random_into:
        encoder = str(write_random(encoder, random_into, device))
    config = EncoderConfig.load(encoder)
    wants = list(wants)
    found, formed = list[Bare](), set[tuple[str, str, tuple[int, ...]]]()
    if wants:
        loaded = Encoder.load(config, device)
        # What more waiting images would not change is left out below, so the fewest come first.
        for want in sorted(wants, key=lambda want: want.outstanding):
            if time.monotonic() > until:
                sys.stderr.write(f"not measured: {want}: no time\n")
                continue
            files = images[want.case]
            row_bytes = row_bytes_of(loaded, files[0], limits) if want.output == "patch" else 0.0
            batches = packed(files, want.outstanding, config, limits, row_bytes)
            images_of = tuple(batch.layout.num_images for batch in batches)
            if (want.case, want.output, images_of) in formed:
                continue  # more wait, but no more of them fit in a batch
            formed.add((want.case, want.output, images_of))
            try:
                one = measure_one(loaded, want, batches, seconds)
            except RuntimeError:  # out of memory, say: the others are measured all the same
                traceback.print_exc()
                continue
            sys.stderr.write(f"{one}\n")
            found.append(one)
    on_gpu = device == "cuda"
    hardware = torch.cuda.get_device_name() if on_gpu else cpu_name()
    machine = Machine(device, hardware, torch.cuda.device_count() if on_gpu else 0)
    return found, machine, encoder


def row_bytes_of(encoder: "Encoder", image: bytes, limits: BatchLimits) -> float:
    """What a patch comes back as, in float16."""
    (batch,) = packed([image], 1, encoder.config, limits)
    rows = encoder.forward(batch, "patch")
    return 2 * rows.numel() / num_patches(batch.layout.grid_thw[0])


def measure_one(
    encoder: "Encoder", want: Want, batches: Sequence[PackedBatch], seconds: float
) -> Bare:
    """A want in these batches."""
    from benchmarks.serving.meters import gpu_meter

    output = want.output
    with gpu_meter(int(encoder.upload(batches[0]).is_cuda)) as meter:
        per_s, begin, end = forwards_per_s(encoder, batches, output, seconds)
        busy = meter.busy(begin, end)
    per_batch = sum(batch.layout.num_images for batch in batches) / len(batches)
    encodes = lone = None
    if output == "pooled":
        encodes = per_batch * calls_per_s(encoder.encode, batches, seconds / 2)
    if output == "pooled" and per_batch == 1:
        lone = lone_forward_ms(encoder, batches)
    return Bare(
        encoder=encoder.config.name,
        case=want.case,
        output=output,
        outstanding=want.outstanding,
        images_per_batch=round(per_batch, 2),
        images_per_s=round(per_batch * per_s, 1),
        encode_images_per_s=encodes and round(encodes, 1),
        lone_forward_ms=lone and round(lone, 2),
        gpu_busy=busy,
    )


def settle(encoder: "Encoder") -> None:
    """Capture whatever was asked for, as an idle replica does."""
    for _ in range(MAX_STEPS):
        if not encoder.idle():
            return


def forwards_per_s(
    encoder: "Encoder", batches: Sequence[PackedBatch], output: Any, seconds: float
) -> tuple[float, float, float]:
    """Batches a second, back to back with one wait at the end; from when to when."""
    run, drain = forward_to_host(encoder, batches, output)
    for _ in range(3):  # seen twice, captured, replayed
        for index in range(len(batches)):
            run(index)
        drain()
        settle(encoder)
    count, begin = 0, time.monotonic()
    while time.monotonic() - begin < seconds:
        run(count % len(batches))
        count += 1
    drain()
    end = time.monotonic()
    return count / (end - begin), begin, end


def forward_to_host(
    encoder: "Encoder", batches: Sequence[PackedBatch], output: Any
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A forward of one of the batches into rows on the host, without a wait; and the wait."""
    import torch

    pixels = [encoder.upload(batch) for batch in batches]
    on_gpu = pixels[0].is_cuda
    dtype = torch.float16 if output == "patch" else torch.float32
    hosts: dict[torch.Size, Tensor] = {}

    @torch.inference_mode()
    def run(index: int) -> None:
        with encoder.graphs.on_stream():
            rows = encoder.forward(batches[index], output, pixels=pixels[index]).to(dtype)
            if rows.shape not in hosts:
                hosts[rows.shape] = torch.empty(rows.shape, dtype=dtype, pin_memory=on_gpu)
            hosts[rows.shape].copy_(rows, non_blocking=True)

    return run, torch.cuda.synchronize if on_gpu else (lambda: None)


def calls_per_s(
    call: Callable[[PackedBatch], object], batches: Sequence[PackedBatch], seconds: float
) -> float:
    """One call after another, as the engine thread makes them, after a round of warm-up."""
    for batch in batches:
        call(batch)
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        call(batches[count % len(batches)])
        count += 1
    return count / elapsed


def lone_forward_ms(encoder: "Encoder", batches: Sequence[PackedBatch]) -> float:
    """Median wall time of one image's forward, waited for. What it needs is captured by now."""
    run, drain = forward_to_host(encoder, batches, "pooled")
    times = []
    for count in range(LONE_CALLS):
        begin = time.perf_counter()
        run(count % len(batches))
        drain()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def cpu_name() -> str:
    """As the kernel calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"
