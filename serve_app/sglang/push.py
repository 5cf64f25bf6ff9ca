"""One ZMQ message to each receiver: where one may connect to, and when it has been sent."""

import asyncio
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import zmq
import zmq.asyncio

from encoders.errors import InvalidRequest, PeerUnreachable
from serve_app import metrics
from serve_app.sglang.wire import Frames

MAX_SOCKETS = 16 * 1024
"""At once in one process; ZMQ's own default is 1023."""
LINGER_MS = 5000
"""How long the tail of a message that was sent may still take after its socket is closed."""

LEAST_BYTES_PER_S = 16 * 1024 * 1024
"""A transfer that is slower on the whole is given up. ZMQ's own limit (TCP_MAXRT) would not do: it
drops what it could not send, which cannot be told from having sent it."""

Networks = Sequence[IPv4Network | IPv6Network]


def endpoint(host: str, port: int, allowed: Networks) -> str:
    """ZMQ's address of a receiver. Raises `InvalidRequest` unless its network is allowed.

    Names are refused: what they mean may change between the check and the connection. So are
    zones (`fe80::1%eth0`): any text may follow the `%`, and to ZMQ `;` separates two addresses.
    Nothing of the caller's text gets into the result.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address: IPv4Address | IPv6Address = ip_address(bare)
    except ValueError as error:
        raise InvalidRequest(f"the receiver's host {host[:80]!r} is no IP address") from error
    if "%" in bare:
        raise InvalidRequest(f"the receiver's host {host[:80]!r} has a zone, which is not allowed")
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified or not any(address in network for network in allowed):
        networks = ", ".join(map(str, allowed))
        raise InvalidRequest(f"the receiver {address} is not in sglang.receivers ({networks})")
    return f"tcp://[{address}]:{port}" if address.version == 6 else f"tcp://{address}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`. Raises `InvalidRequest`."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise InvalidRequest(f"the receiver's address {address[:80]!r} is not host:port")
    return host, int(port)


class Pusher:
    """Sends each message once, over a connection of its own."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)

    async def push(self, receiver: str, frames: Frames) -> None:
        """Send one message; it has left this process on return. Raises `PeerUnreachable`.

        The timeout is for the connection; the transfer may take longer, by the message's length.
        """
        parts = [frame for frame in frames if frame is not None]
        num_bytes = len(frames.header) + (0 if frames.rows is None else frames.rows.nbytes)
        transfer_s = self._timeout_s + num_bytes / LEAST_BYTES_PER_S
        problem = f"took no message within {self._timeout_s:g} s"
        socket: zmq.asyncio.Socket | None = None
        linger_ms = 0  # what failed is never sent after all
        try:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.IPV6, int(receiver.startswith("tcp://[")))
            socket.setsockopt(zmq.IMMEDIATE, 1)  # not into the queue of a connection to nobody
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(receiver)
            with metrics.timed("encoder_push_ms"):
                async with asyncio.timeout(self._timeout_s):
                    # Returns once ZMQ's handshake is done.
                    tracker = await socket.send_multipart(parts, copy=False, track=True)
                problem = f"did not take all {num_bytes} bytes within {transfer_s:.3g} s"
                async with asyncio.timeout(transfer_s):
                    await _sent(tracker)
            linger_ms = LINGER_MS
        except TimeoutError as error:
            raise PeerUnreachable(f"the receiver {receiver} {problem}") from error
        except zmq.ZMQError as error:  # no file descriptor is left, no route, ...
            message = f"no connection to the receiver {receiver}: {error.strerror}"
            raise PeerUnreachable(message) from error
        finally:
            if socket is not None:
                socket.close(linger_ms)

    def close(self) -> None:
        """Wait until what was sent has left, at most the linger."""
        self._context.destroy(LINGER_MS)


async def _sent(tracker: zmq.MessageTracker | None) -> None:
    """Return when ZMQ needs the frames' memory no more: it has written them."""
    assert tracker is not None  # it was asked for
    pause_s = 0.0005
    while not tracker.done:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
