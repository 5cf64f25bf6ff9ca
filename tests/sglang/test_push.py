"""How long a message may take on its way, and what ends it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq

from encoders.errors import PeerUnreachable
from serve_app.sglang import push
from serve_app.sglang.push import Pusher
from serve_app.sglang.wire import Frames
from tests.sglang.receiver import Receiver

HEADER = b"header"
ROWS = np.zeros(24 * 1024 * 1024, np.uint8)
"""More than what the kernel's buffers of two connections take."""
TIMEOUT_S = 0.3


@pytest.fixture
def pusher() -> Iterator[Pusher]:
    made = Pusher(TIMEOUT_S)
    yield made
    made.close()


@asynccontextmanager
async def slow_line(port: int, pause_s: float, num_bytes: int) -> AsyncIterator[str]:
    """A way to a receiver that rests before each 256 KiB; after `num_bytes` it takes no more."""
    stopped = asyncio.Event()
    tasks = set[asyncio.Task[None]]()

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        left = num_bytes
        while left > 0 and (data := await source.read(256 * 1024)):
            left -= len(data)
            target.write(data)
            await target.drain()
            await asyncio.sleep(pause_s if len(data) > 1024 else 0)
        if left <= 0:
            await stopped.wait()
        target.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        tasks.add(asyncio.create_task(forward(there, writer)))
        tasks.add(asyncio.create_task(forward(reader, back)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=64 * 1024)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        stopped.set()
        await asyncio.wait(tasks)


async def test_a_long_message_may_take_longer_than_the_connection(
    pusher: Pusher, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "LEAST_BYTES_PER_S", len(ROWS) // 30)  # busy machines are slow
    loop = asyncio.get_running_loop()
    async with slow_line(receiver.port, 0.02, 1 << 30) as address:
        start = loop.time()

        await pusher.push(address, Frames(HEADER, ROWS))

        took = loop.time() - start
        header, rows = await asyncio.to_thread(receiver.frames)
    assert took > TIMEOUT_S
    assert (header, len(rows)) == (HEADER, len(ROWS))


async def test_a_receiver_that_stops_in_the_middle_is_given_up(
    pusher: Pusher, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "LEAST_BYTES_PER_S", len(ROWS))
    async with slow_line(receiver.port, 0, 1 << 20) as address:
        with pytest.raises(PeerUnreachable, match=r"take all 25165830 bytes within 1\.3 s"):
            await pusher.push(address, Frames(HEADER, ROWS))


async def test_no_socket_left_is_an_unreachable_receiver(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "MAX_SOCKETS", 1)
    pusher = Pusher(TIMEOUT_S)
    taken = zmq.Socket(pusher._context, zmq.PUSH)

    with pytest.raises(PeerUnreachable, match="no connection to the receiver"):
        await pusher.push(f"tcp://{receiver.url}", Frames(HEADER, None))

    taken.close(0)
    pusher.close()
