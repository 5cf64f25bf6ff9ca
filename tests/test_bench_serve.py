"""The pure parts of benchmarks/bench_serve.py, and its load against a server of ten lines."""

import asyncio
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import asdict
from email.parser import BytesParser
from pathlib import Path

import pytest
import yaml
from PIL import Image

from benchmarks import bench_serve, load
from benchmarks.load import Load, Sample, Window
from encoders import EncoderConfig
from serve_app.waiting import BatchLimits

FIELDS = [
    "case", "proxy", "topology", "loop", "concurrency", "http_images_per_s", "bare_images_per_s",
    "p50_ms", "p99_ms", "cpu_ms_per_image", "errors",
]  # fmt: skip


def row() -> bench_serve.Row:
    summary = load.Summary(requests_per_s=20.0, p50_ms=1.234, p99_ms=math.nan, errors=3)
    labels = {"proxy": "python", "topology": "split", "bare_images_per_s": 90.0}
    return bench_serve.row_of("56x70", Load("", 2, rate=20.0), summary, 0.5, labels)


def test_images_are_jpegs_of_the_case_and_all_different() -> None:
    files = load.jpegs("56x70", 24)

    assert {Image.open(io.BytesIO(data)).size for data in files} == {(70, 56)}
    assert {Image.open(io.BytesIO(data)).format for data in files} == {"JPEG"}
    assert len(set(files)) == 24
    assert files == load.jpegs("56x70", 24)


def test_a_body_is_an_image_or_a_form_of_the_next_ones() -> None:
    images = [b"one", b"two\r\n", b"three"]
    head = b"Content-Type: multipart/form-data; boundary=" + load.BOUNDARY + b"\r\n\r\n"

    single = list(itertools.islice(load.bodies(images, 1), 4))
    form = BytesParser().parsebytes(head + next(load.bodies(images, 3)))

    assert single == [*images, images[0]]
    assert [part.get_payload(decode=True) for part in form.get_payload()] == images


def test_generators_share_a_load_without_remainder() -> None:
    closed, open_ = Load("", 1, concurrency=7), Load("", 1, rate=9.0)

    assert [closed.share(i, 3).concurrency for i in range(3)] == [3, 2, 2]
    assert [open_.share(i, 3).rate for i in range(3)] == [3.0] * 3


def test_arrivals_come_at_their_rate() -> None:
    times = list(load.arrivals(100.0, 5.0, 25.0, random.Random(0)))

    assert times == sorted(times)
    assert all(5 < moment < 25 for moment in times)
    assert 1850 < len(times) < 2150


def test_percentiles_are_of_the_samples() -> None:
    assert load.percentile(range(1, 101), 50) == 50
    assert load.percentile(range(1, 101), 99) == 99
    assert load.percentile([7.0], 99) == 7
    assert math.isnan(load.percentile([], 50))


def test_an_open_loop_counts_those_who_arrived_inside_the_window() -> None:
    window = Window(10.0, 20.0)
    samples = [
        Sample(9.0, 11.0, True),
        Sample(12.0, 13.0, True),
        Sample(14.0, 15.0, False),
        Sample(19.0, 28.0, True),
    ]

    closed = load.summarize(samples, window, open_loop=False)
    opened = load.summarize(samples, window, open_loop=True)

    assert closed == (0.2, 1000.0, 2000.0, 1)
    assert opened == (0.2, 1000.0, 9000.0, 1)


@pytest.mark.parametrize("wanted", [Load("", 1, concurrency=3), Load("", 1, rate=100.0)])
async def test_every_request_carries_an_image_and_every_refusal_is_counted(wanted: Load) -> None:
    seen: Counter[bytes] = Counter()

    handlers = list[asyncio.Task[None]]()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.create_task(answer(reader, writer)))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError):  # the client has left
            await answer_all(reader, writer)

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"Content-Length: 1" in (head := await reader.readuntil(b"\r\n\r\n")):
            assert b"Content-Type: image/jpeg" in head
            body = await reader.readexactly(1)
            seen[body] += 1
            status = b"503 Full" if body == b"b" else b"200 OK"
            await asyncio.sleep(0.002)
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: 6\r\n\r\n\x93NUMPY" % status)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    now = time.monotonic()
    window = Window(now + 0.1, now + 0.4)
    here = Load(url, 1, wanted.concurrency, wanted.rate)

    outcome = await load.drive(here, [b"a", b"b"], window, seed=0)

    server.close()
    await asyncio.wait_for(asyncio.gather(*handlers), 30)  # else they would end in another test
    assert abs(seen[b"a"] - seen[b"b"]) <= 1
    assert len(outcome.samples) == seen.total() > 10
    assert sum(not sample.ok for sample in outcome.samples) == seen[b"b"]
    assert 0 <= outcome.cpu_s < 1


def test_cpu_time_is_that_of_a_process_and_its_descendants() -> None:
    script = "import sys\nfor _ in range(10**7): pass\nprint(flush=True)\nsys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as child:
        assert child.stdout
        child.stdout.readline()
        all_of_us = bench_serve.cpu_seconds(os.getpid())
        alone = bench_serve.cpu_seconds(child.pid)
        child.communicate()

    assert alone.keys() == {child.pid}
    assert {os.getpid(), child.pid} <= all_of_us.keys()
    assert all_of_us[child.pid] > 0.05


@pytest.mark.parametrize(("outstanding", "size"), [(1, 1), (32, 32), (500, 48)])
def test_batches_keep_to_the_services_limits(
    outstanding: int, size: int, demo_config: EncoderConfig
) -> None:
    limits = BatchLimits(max_images=64, max_patches=48 * 16 * 16)

    assert bench_serve.batch_size(outstanding, "224x224", demo_config, limits) == size


def test_the_app_is_as_a_serve_file_has_it(tmp_path: Path) -> None:
    args = {"encoder": "qwen3-vl-8b", "batch": {"max_images": 256}, "encoder_labels": {"gpu": "x"}}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"args": args}]}))

    like = bench_serve.app_arguments(None, file)

    assert like == {"encoder": "qwen3-vl-8b", "batch": {"max_images": 256}}
    assert bench_serve.app_arguments("dinov2-demo", file)["encoder"] == "dinov2-demo"
    assert bench_serve.app_arguments("own.yaml", None) == {"encoder": str(Path.cwd() / "own.yaml")}


def test_fused_replicas_are_as_many_as_encoders() -> None:
    wanted = {"Ingress": 4, "Encoder": 2}

    assert bench_serve.replica_counts("split", wanted) == {"Ingress": 4, "Batcher": 1, "Encoder": 2}
    assert bench_serve.replica_counts("inline", wanted) == {"Ingress": 4, "Encoder": 2}
    assert bench_serve.replica_counts("fused", wanted) == {"Ingress": 2}


def test_a_row_counts_images_and_has_every_field() -> None:
    result = asdict(row())

    assert list(result) == FIELDS
    assert result["http_images_per_s"] == 40
    assert result["cpu_ms_per_image"] == 12.5
    assert json.loads(json.dumps(result, allow_nan=False))["p99_ms"] is None


def test_the_results_file_has_a_line_per_row() -> None:
    beside = bench_serve.Beside(0.25, 0.5)

    text = bench_serve.markdown({"encoder": "tiny", "hardware": "CPU"}, [row()], [beside])

    line = "| 56x70 | python | split | open | - | 40.0 | 90.0 | 1.23 | - | 12.5 | 3 | 0.25 | 0.5 |"
    assert text.splitlines()[-1] == line
    assert line.count("|") == text.splitlines()[-2].count("|")


def test_the_command_line_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    options = bench_serve.parse(["--topologies", "fused,split", "--replicas", "Ingress=4"])
    with pytest.raises(SystemExit):
        bench_serve.parse(["--topologies", "fussed"])

    assert options.topologies == ["fused", "split"]
    assert options.replicas == {"Ingress": 4}
    assert "fussed is none of split, inline, fused" in capsys.readouterr().err
