"""`zmq_to_scheduler`: receivers register themselves, before, during or after `/encode`."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq

from encoders.encoder import Encoder
from serve_app.sglang import slots
from tests.sglang.conftest import Serve, make_ingress
from tests.sglang.parts import body, png, registration, right
from tests.sglang.receiver import Receiver
from tests.sglang.test_tokenizer import CLOSE, FAILS_WITHIN_S

Json = dict[str, Any]


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def register(http: httpx.Client, url: str, receiver: Receiver, **of: Any) -> None:
    """As a scheduler does; it is answered at once, whatever else goes on."""
    start = time.monotonic()
    reply = http.post(f"{url}/scheduler_receive_url", json=registration(receiver, **of))
    assert (reply.status_code, reply.json()) == (200, None)
    assert time.monotonic() - start < 2


def encode(http: httpx.Client, url: str, *images: Any, **of: Any) -> httpx.Response:
    return http.post(f"{url}/encode", json=body(images, None, **of))


def wait_until_waiting(http: httpx.Client, url: str, call: Future[httpx.Response]) -> None:
    """Long enough for the rows to be there: the call waits for nothing but a receiver."""
    for _ in range(3):
        httpx.post(f"{url}/v1/images/embeddings", content=png(9), timeout=60).raise_for_status()
    assert not call.done()


@pytest.mark.parametrize("count", [1, 2])
def test_early_registrations_are_kept(
    served: str, http: httpx.Client, receivers: Iterator[Receiver], encoder: Encoder, count: int
) -> None:
    ranks = [next(receivers) for _ in range(count)]
    for rank in ranks:
        register(http, served, rank, rid="early", count=count)

    reply = encode(http, served, png(1), png(2), rid="early")

    assert (reply.status_code, reply.json()) == (200, None)
    for rank in ranks:
        for rows, seed in zip(rank.take().images, (1, 2), strict=True):
            np.testing.assert_allclose(rows, right(encoder, png(seed)), **CLOSE)
        assert list(rank.rest()) == []


def test_late_registrations_are_waited_for_and_each_gets_a_whole_copy(
    served: str,
    http: httpx.Client,
    receivers: Iterator[Receiver],
    background: ThreadPoolExecutor,
) -> None:
    first, second = next(receivers), next(receivers)
    call = background.submit(encode, http, served, png(1), rid="late")
    wait_until_waiting(http, served, call)
    register(http, served, first, rid="late", count=2)
    wait_until_waiting(http, served, call)

    register(http, served, second, rid="late", count=2)

    assert call.result().status_code == 200
    assert first.frames() == second.frames()
    assert list(first.rest()) == list(second.rest()) == []


def test_the_same_receiver_twice_gets_one_message(
    served: str, http: httpx.Client, receivers: Iterator[Receiver]
) -> None:
    first, second = next(receivers), next(receivers)
    for rank in (first, first, second, second):
        register(http, served, rank, rid="twice", count=2)

    reply = encode(http, served, png(1), rid="twice")

    assert reply.status_code == 200
    assert first.take().rows is not None
    assert second.take().rows is not None
    assert list(first.rest()) == list(second.rest()) == []


def test_a_request_id_may_be_used_again(
    served: str, http: httpx.Client, receiver: Receiver
) -> None:
    for seed in (1, 2):
        register(http, served, receiver, rid="again")

        assert encode(http, served, png(seed), rid="again").status_code == 200

        assert receiver.take().rows is not None


def test_every_receiver_hears_of_a_failure_also_one_that_registers_after_it(
    served: str, http: httpx.Client, receivers: Iterator[Receiver]
) -> None:
    first, second = next(receivers), next(receivers)
    register(http, served, first, rid="bad", count=2)
    start = time.monotonic()

    reply = encode(http, served, "file:///etc/passwd", rid="bad")
    register(http, served, second, rid="bad", count=2)

    said = [rank.take().data for rank in (first, second)]
    assert time.monotonic() - start < FAILS_WITHIN_S
    assert reply.status_code == 400
    assert [x.error_code for x in said] == [400, 400]
    assert {x.error_msg for x in said} == {reply.json()["message"]}
    assert list(first.rest()) == list(second.rest()) == []


def test_a_receiver_that_never_comes_is_a_504_and_the_others_are_told(
    serve: Serve, http: httpx.Client, receiver: Receiver
) -> None:
    url = serve(api={"request_timeout_s": 1})
    register(http, url, receiver, rid="alone", count=2)

    reply = encode(http, url, png(1), rid="alone")

    assert reply.status_code == 504
    assert "1 of 2 receivers registered for 'alone_local_part_0'" in reply.json()["message"]
    assert receiver.take().data.error_code == 504
    assert list(receiver.rest()) == []


def test_one_unreachable_receiver_keeps_the_message_from_no_other(
    served: str, http: httpx.Client, receivers: Iterator[Receiver]
) -> None:
    gone, here = next(receivers), next(receivers)
    gone.close()
    register(http, served, gone, rid="half", count=2)
    register(http, served, here, rid="half", count=2)
    start = time.monotonic()

    reply = encode(http, served, png(1), rid="half")

    assert time.monotonic() - start < FAILS_WITHIN_S
    assert reply.status_code == 502
    assert here.take().rows is not None
    assert list(here.rest()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"receive_url": "10.0.0.7:40001"}, "10.0.0.7 is not in sglang.receivers"),
        ({"receive_url": "tcp://127.0.0.1:1"}, "is no IP address"),
        ({"receive_url": "[::1%lo]:40001"}, "has a zone"),
        ({"receive_url": "[::1%1]:45675;[::1]:40001"}, "has a zone"),
        ({"receive_url": "::1%1]:45675;[::1:40001"}, "has a zone"),
        ({"receive_url": "127.0.0.1:1;127.0.0.1:40001"}, "is no IP address"),
        ({"receive_url": "[[127.0.0.1]]:40001"}, "is no IP address"),
        ({"receive_url": "127.0.0.1"}, "is not host:port"),
        ({"receive_url": "127.0.0.1:0"}, "is not host:port"),
        ({"receive_url": "1" * 257}, "receive_url: String should have at most 256"),
        ({"receive_count": 0}, "receive_count"),
        ({"receive_count": 1025}, "less than or equal to 1024"),
        ({"req_id": None}, "req_id"),
    ],
)
def test_a_wrong_registration_is_refused(
    served: str, http: httpx.Client, receiver: Receiver, change: Json, said: str
) -> None:
    changed = registration(receiver, rid="wrong") | change

    reply = http.post(f"{served}/scheduler_receive_url", json=changed)

    assert reply.status_code == 400
    assert said in reply.json()["message"]


def test_a_long_registration_is_refused(
    served: str, http: httpx.Client, receiver: Receiver
) -> None:
    long = registration(receiver, rid="long") | {"more": "x" * 17_000}

    reply = http.post(f"{served}/scheduler_receive_url", json=long)

    assert reply.status_code == 413
    assert "the limit is 16384" in reply.json()["message"]


def test_a_second_call_for_a_part_that_is_being_encoded_is_refused_and_tells_nobody(
    served: str, http: httpx.Client, receiver: Receiver, background: ThreadPoolExecutor
) -> None:
    call = background.submit(encode, http, served, png(1), rid="same")
    wait_until_waiting(http, served, call)

    second = encode(http, served, "file:///etc/passwd", rid="same")
    register(http, served, receiver, rid="same")

    assert second.status_code == 400
    assert second.json()["message"] == "'same_local_part_0' is being encoded already"
    assert call.result().status_code == 200
    assert receiver.take().rows is not None
    assert list(receiver.rest()) == []


def test_registrations_that_disagree_are_refused(
    served: str, http: httpx.Client, receivers: Iterator[Receiver]
) -> None:
    first, second, third = (next(receivers) for _ in range(3))
    register(http, served, first, rid="disagree", count=2)
    other = registration(second, rid="disagree", count=3)
    count = http.post(f"{served}/scheduler_receive_url", json=other)
    register(http, served, second, rid="disagree", count=2)

    one_too_many = registration(third, rid="disagree", count=2)
    many = http.post(f"{served}/scheduler_receive_url", json=one_too_many)

    assert (count.status_code, many.status_code) == (400, 400)
    assert count.json()["message"] == "receive_count is 3, it was 2 before"
    assert many.json()["message"] == "all 2 receivers of this part have registered already"


def test_calls_that_wait_for_receivers_hold_up_no_registration(
    served: str, receivers: Iterator[Receiver], background: ThreadPoolExecutor
) -> None:
    ranks = [next(receivers) for _ in range(60)]
    with httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        calls = [
            background.submit(encode, http, served, png(i), rid=f"w{i}") for i in range(len(ranks))
        ]
        wait_until_waiting(http, served, calls[-1])
        for index, rank in reversed(list(enumerate(ranks))):
            register(http, served, rank, rid=f"w{index}")

        assert [call.result().status_code for call in calls] == [200] * len(ranks)
    assert [rank.take().data.req_id for rank in ranks] == [
        f"w{i}_local_part_0" for i in range(len(ranks))
    ]


def test_calls_past_the_limit_are_refused_in_time_and_registrations_are_not(
    serve: Serve,
    http: httpx.Client,
    receivers: Iterator[Receiver],
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "MAX_CALLS", 2)
    url = serve(sglang={"queue_for_s": 0.5})
    ranks = [next(receivers) for _ in range(3)]
    calls = [background.submit(encode, http, url, png(i), rid=f"l{i}") for i in range(2)]
    for call in calls:
        wait_until_waiting(http, url, call)
    start = time.monotonic()

    refused = encode(http, url, png(2), rid="l2")
    for index, rank in enumerate(ranks):
        register(http, url, rank, rid=f"l{index}")

    assert time.monotonic() - start < FAILS_WITHIN_S
    assert refused.status_code == 503
    assert [call.result().status_code for call in calls] == [200, 200]
    assert [rank.take().data.error_code for rank in ranks] == [None, None, 503]


async def test_a_replica_that_drains_still_takes_registrations_for_what_it_has(
    tiny: Path, receiver: Receiver
) -> None:
    ingress = make_ingress(tiny)
    app = ingress.__serve_build_asgi_app__()
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http,
    ):
        call = asyncio.create_task(http.post("/encode", json=body([png(1)], None, rid="d")))
        (await http.post("/v1/images/embeddings", content=png(2))).raise_for_status()
        drain = asyncio.create_task(ingress.drain(60))
        await asyncio.sleep(0)
        refused = await http.post("/encode", json=body([png(1)], None, rid="new"))

        taken = await http.post("/scheduler_receive_url", json=registration(receiver, "d"))

        assert refused.status_code == 503
        assert "shutting down" in refused.json()["message"]
        assert (await call).status_code == taken.status_code == 200
        assert await drain == 0
    assert (await asyncio.to_thread(receiver.take)).rows is not None


async def test_an_address_in_brackets_is_ipv6(serve: Serve) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.set(zmq.IPV6, 1)
    try:
        port = socket.bind_to_random_port("tcp://[::1]")
    except zmq.ZMQError:
        pytest.skip("this machine has no IPv6 loopback")
    url = serve()
    call = {"req_id": "v6_local_part_0", "receive_count": 1, "receive_url": f"[::1]:{port}"}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        (await http.post("/scheduler_receive_url", json=call)).raise_for_status()

        reply = await http.post("/encode", json=body([png(1)], None, rid="v6"))

    assert reply.status_code == 200
    assert len(await asyncio.to_thread(socket.recv_multipart)) == 2
    context.destroy(0)
