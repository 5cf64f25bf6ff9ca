"""`zmq_to_tokenizer`: one `POST /encode`, one message to the port that it names."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch

from encoders.encoder import Encoder
from tests.sglang.conftest import Serve
from tests.sglang.parts import SIZES, batch_of, body, data_uri, png, right
from tests.sglang.receiver import Modality, Receiver
from tests.tiny import QWEN3_VL_COLUMNS

FAILS_WITHIN_S = 5.0
# bfloat16 keeps 8 bits of a value; a batch's company moves the last bits of fp32.
CLOSE = {"rtol": 2**-8, "atol": 1e-4}


@pytest.mark.parametrize("count", [1, 2, 9])
def test_one_message_carries_the_rows_of_all_images_in_order(
    served: str, http: httpx.Client, receiver: Receiver, encoder: Encoder, count: int
) -> None:
    images = [png(seed, size) for seed, size in enumerate(SIZES[:count])]

    reply = http.post(f"{served}/encode", json=body(images, receiver))

    message = receiver.take()
    assert (reply.status_code, reply.json()) == (200, None)
    assert message.data.req_id == "r_local_part_0"
    assert (message.data.num_parts, message.data.part_idx) == (1, 0)
    assert message.data.modality is Modality.IMAGE
    assert message.data.dtype is torch.bfloat16
    assert message.data.shape[1] == QWEN3_VL_COLUMNS
    grids = [list(batch_of(encoder, image).layout.grid_thw[0]) for image in images]
    assert message.data.grid_dim == grids
    for rows, image in zip(message.images, images, strict=True):
        np.testing.assert_allclose(rows, right(encoder, image), **CLOSE)
    assert list(receiver.rest()) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_rows_are_the_encoders_to_the_last_byte(
    serve: Serve, http: httpx.Client, receiver: Receiver, encoder: Encoder, dtype: str
) -> None:
    image = png(3, (200, 90))
    url = serve(sglang={"dtype": dtype})

    http.post(f"{url}/encode", json=body([image], receiver)).raise_for_status()

    header, rows = receiver.frames()
    expected = encoder.encode(batch_of(encoder, image), "patch", dtype)[0]
    assert rows == expected.view(torch.uint8).numpy().tobytes()
    assert f"ctorch\n{dtype}\n".encode() in header


def test_parts_of_one_request_come_from_two_calls(
    served: str, http: httpx.Client, receiver: Receiver, encoder: Encoder
) -> None:
    images = [png(seed) for seed in range(3)]
    first = body(images[:2], receiver, num_parts=2)
    second = body(images[2:], receiver, num_parts=2, part_idx=1, req_id="r_local_part_1")

    with ThreadPoolExecutor(2) as pool:
        statuses = list(pool.map(lambda x: http.post(f"{served}/encode", json=x), [second, first]))

    assert [reply.status_code for reply in statuses] == [200, 200]
    messages = sorted([receiver.take(), receiver.take()], key=lambda x: x.data.part_idx)
    assert [x.data.req_id for x in messages] == ["r_local_part_0", "r_local_part_1"]
    rows = [*messages[0].images, *messages[1].images]
    for found, image in zip(rows, images, strict=True):
        np.testing.assert_allclose(found, right(encoder, image), **CLOSE)


def test_an_item_may_be_an_object_or_bare_base64(
    served: str, http: httpx.Client, receiver: Receiver, encoder: Encoder
) -> None:
    image = png(7)
    plain = data_uri(image)
    items = [
        {"url": plain, "content_hash": "abc", "detail": "high", "max_dynamic_patch": None},
        plain.partition(",")[2],
    ]

    http.post(f"{served}/encode", json=body(items, receiver)).raise_for_status()

    for rows in receiver.take().images:
        np.testing.assert_allclose(rows, right(encoder, image), **CLOSE)


BAD_ITEMS = {
    "http": ("http://example.org/cat.png", 400, "mm_items[1]: http: addresses are not fetched"),
    "https": ("https://example.org/cat.png", 400, "mm_items[1]: https: addresses are not fetched"),
    "file": ("file:///etc/passwd", 400, "mm_items[1]: file: addresses are not fetched"),
    "path": ("/etc/passwd", 400, "mm_items[1]: files are not opened here"),
    "relative path": ("../cat.png", 400, "mm_items[1]: files are not opened here"),
    "name": ("cat.png", 400, "mm_items[1]: files are not opened here"),
    "number": (7, 400, "mm_items[1]: an item is a string or has a `url`, not int"),
    "option": ({"url": "x", "max_long_side_pixel": 64}, 400, "'max_long_side_pixel' of an image"),
    "no url": ({"detail": "low"}, 400, "mm_items[1]: an item is a string or has a `url`"),
    "no image": ("data:image/png;base64,aGVsbG8=", 415, "mm_items[1]: "),
    "cut off": (data_uri(png(1)[:-60]), 422, "mm_items[1]: "),
}


@pytest.mark.parametrize(("item", "status", "said"), BAD_ITEMS.values(), ids=BAD_ITEMS.keys())
def test_a_bad_image_is_a_status_and_a_message_that_names_it(
    served: str, http: httpx.Client, receiver: Receiver, item: object, status: int, said: str
) -> None:
    start = time.monotonic()

    reply = http.post(f"{served}/encode", json=body([png(1), item], receiver))

    message = receiver.take()
    assert time.monotonic() - start < FAILS_WITHIN_S
    assert reply.status_code == status
    answer = reply.json()
    assert (answer["status"], answer["req_id"]) == ("error", "r_local_part_0")
    assert said in answer["message"]
    assert message.rows is None
    assert (message.data.error_msg, message.data.error_code) == (answer["message"], status)
    assert list(receiver.rest()) == []


@pytest.mark.parametrize("modality", ["VIDEO", "AUDIO"])
def test_video_and_audio_are_refused_in_words(
    served: str, http: httpx.Client, receiver: Receiver, modality: str
) -> None:
    reply = http.post(f"{served}/encode", json=body([png(1)], receiver, modality=modality))

    message = receiver.take()
    assert reply.status_code == 400
    assert message.data.error_msg == f"modality is {modality}, only IMAGE is encoded here"
    assert message.data.modality is Modality[modality]


def test_too_many_images_are_refused_with_both_numbers(
    serve: Serve, http: httpx.Client, receiver: Receiver
) -> None:
    url = serve(api={"max_images": 2})

    reply = http.post(f"{url}/encode", json=body([png(1)] * 3, receiver))

    assert reply.status_code == 413
    assert receiver.take().data.error_msg == "the part has 3 images, the limit is 2"


def test_a_body_that_is_too_large_is_refused_in_words_that_sglang_reads(
    serve: Serve, http: httpx.Client, receiver: Receiver
) -> None:
    url = serve(api={"max_body_bytes": 1000})

    reply = http.post(f"{url}/encode", json=body([png(1, (200, 200))], receiver))

    assert reply.status_code == 413
    assert "the limit is 1000" in reply.json()["message"]


MALFORMED = {
    "no JSON": b"{",
    "no id": {"req_id": ""},
    "part beyond the parts": {"part_idx": 1},
    "a port as text": {"embedding_port": "80"},
    "a list of ports": {"embedding_port": [80, 81]},
    "a port beyond all": {"embedding_port": 70_000},
    "a truth as port": {"embedding_port": True},
    "unknown modality": {"modality": "SMELL"},
    "no host": {"prefill_host": None},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_call_is_a_400_in_sglangs_own_form(
    served: str, http: httpx.Client, receiver: Receiver, change: bytes | dict[str, object]
) -> None:
    if isinstance(change, bytes):
        reply = http.post(f"{served}/encode", content=change)
    else:
        reply = http.post(f"{served}/encode", json=body([png(1)], receiver) | change)

    assert reply.status_code == 400
    assert set(reply.json()) == {"status", "message", "req_id"}


FORBIDDEN = [
    "10.0.0.7",
    "0.0.0.0",
    "::",
    "localhost",
    "example.org",
    "8.8.8.8",
    "::ffff:8.8.8.8",
    "::1%lo",
    "::1%1]:45675;[::1",
    "[::1%1]:45675;[::1]",
    "::1%",
    "127.0.0.1:45675;127.0.0.1",
    "[127.0.0.1",
    "127.0.0.1 ",
    "",
]


@pytest.mark.parametrize("host", FORBIDDEN)
def test_nothing_but_loopback_is_connected_to_by_default(
    served: str, http: httpx.Client, receiver: Receiver, host: str
) -> None:
    reply = http.post(f"{served}/encode", json=body([png(1)], receiver, prefill_host=host))

    assert reply.status_code == 400
    assert "receiver" in reply.json()["message"]
    assert list(receiver.rest()) == []


def test_a_network_that_is_not_listed_is_refused_even_if_it_is_loopback(
    serve: Serve, http: httpx.Client, receiver: Receiver
) -> None:
    url = serve(sglang={"receivers": ["10.0.0.0/8"]})

    reply = http.post(f"{url}/encode", json=body([png(1)], receiver))

    assert reply.status_code == 400
    assert "127.0.0.1 is not in sglang.receivers (10.0.0.0/8)" in reply.json()["message"]


def test_an_unreachable_receiver_ends_in_time_and_holds_up_no_other(
    served: str, http: httpx.Client, receivers: Iterator[Receiver]
) -> None:
    gone, here = next(receivers), next(receivers)
    gone.close()
    start = time.monotonic()

    with ThreadPoolExecutor(20) as pool:
        lost = [
            pool.submit(http.post, f"{served}/encode", json=body([png(1)], gone.port, f"r{i}"))
            for i in range(19)
        ]
        good = pool.submit(http.post, f"{served}/encode", json=body([png(2)], here))
        here.take()
        assert good.result().status_code == 200
        good_took = time.monotonic() - start
        replies = [future.result() for future in lost]

    assert time.monotonic() - start < FAILS_WITHIN_S
    assert good_took < 2.5, "it waited for those that cannot be reached"
    assert {reply.status_code for reply in replies} == {502}
    assert "took no message within 3 s" in replies[0].json()["message"]


def test_a_full_queue_is_waited_for_a_while_and_then_says_so(
    serve: Serve, http: httpx.Client, receiver: Receiver
) -> None:
    limits = {"max_images": 2, "max_bytes": 1 << 26}
    url = serve(queue=limits, api={"max_images": 2}, sglang={"queue_for_s": 1.0})
    start = time.monotonic()

    with ThreadPoolExecutor(40) as pool:
        calls = [
            pool.submit(http.post, f"{url}/encode", json=body([png(i)] * 2, receiver, rid=f"r{i}"))
            for i in range(40)
        ]
        statuses = [call.result().status_code for call in calls]

    messages = [receiver.take() for _ in range(40)]
    assert time.monotonic() - start < FAILS_WITHIN_S
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) > 1, "nothing was queued"
    assert [x.data.error_code for x in messages].count(503) == statuses.count(503)
    assert len({x.data.req_id for x in messages}) == 40
    assert list(receiver.rest()) == []


def test_health_answers_at_once_while_parts_are_encoded(
    served: str, http: httpx.Client, receiver: Receiver
) -> None:
    with ThreadPoolExecutor(30) as pool:
        bodies = [body([png(i, (640, 480))] * 4, receiver, rid=f"r{i}") for i in range(30)]
        calls = [pool.submit(http.post, f"{served}/encode", json=x) for x in bodies]
        slowest = 0.0
        while not all(call.done() for call in calls):
            start = time.monotonic()
            assert httpx.get(f"{served}/health").status_code == 200
            slowest = max(slowest, time.monotonic() - start)

    assert slowest < 2
    assert [call.result().status_code for call in calls] == [200] * 30
