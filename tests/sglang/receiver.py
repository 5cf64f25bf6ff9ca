"""SGLang's end of the wire, written from what was found out about SGLang 0.5.23, without its code.

It binds PULL sockets on loopback and takes a message only if SGLang would.
"""

import enum
import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zmq

WAIT_S = 30.0
DTYPES = {torch.bfloat16, torch.float16, torch.float32}


class Modality(enum.Enum):
    """Of a part."""

    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


class EmbeddingData:
    """Whatever attributes the header sets."""


# What is on SGLang's exact allow-list and of use in a header. The list has no builtins.getattr, no
# http.HTTPStatus and nothing of NumPy's; a module that is allowed does not allow its members.
ALLOWED = {
    ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"): EmbeddingData,
    ("sglang.srt.multimodal.modality", "Modality"): Modality,
    ("sglang.srt.managers.schedule_batch", "Modality"): Modality,
    ("torch", "bfloat16"): torch.bfloat16,
    ("torch", "float16"): torch.float16,
    ("torch", "float32"): torch.float32,
    **{("builtins", x.__name__): x for x in (bool, bytes, dict, float, int, list, str, tuple)},
}


class Unpickler(pickle.Unpickler):
    """Looks names up in the allow-list alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"blocked {module}.{name}")
        return ALLOWED[module, name]


def loads(header: bytes) -> EmbeddingData:
    """What SGLang makes of a header."""
    data = Unpickler(io.BytesIO(header)).load()
    assert type(data) is EmbeddingData
    return data


@dataclass(frozen=True)
class Message:
    """One message, checked. `rows` are float32, or None if it says that the part failed."""

    data: Any
    rows: np.ndarray | None

    @classmethod
    def of(cls, frames: Sequence[bytes]) -> "Message":
        data: Any = loads(frames[0])
        assert type(data.req_id) is str
        assert type(data.num_parts) is int
        assert type(data.part_idx) is int
        assert 0 <= data.part_idx < data.num_parts
        assert type(data.modality) is Modality
        assert data.send_time is None  # has to exist
        if data.error_msg is not None:
            assert len(frames) == 1
            assert type(data.error_msg) is str
            assert type(data.error_code) is int
            return cls(data, None)
        assert len(frames) == 2
        assert data.error_code is None
        assert data.dtype in DTYPES
        rows, columns = data.shape
        assert type(rows) is type(columns) is int
        assert all(type(x) is int for grid in data.grid_dim for x in grid)
        assert sum(t * h * w for t, h, w in data.grid_dim) == 4 * rows  # merged two by two
        tensor = torch.frombuffer(bytearray(frames[1]), dtype=data.dtype)
        return cls(data, tensor.reshape(data.shape).float().numpy())

    @property
    def images(self) -> list[np.ndarray]:
        """The rows of each image."""
        assert self.rows is not None
        counts = [t * h * w // 4 for t, h, w in self.data.grid_dim]
        return np.split(self.rows, np.cumsum(counts)[:-1])


class Receiver:
    """A PULL socket on a port of its own, as SGLang binds one for each request or rank."""

    def __init__(self, context: zmq.Context) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    @property
    def url(self) -> str:
        """What a scheduler registers."""
        return f"127.0.0.1:{self.port}"

    def frames(self) -> list[bytes]:
        """The next message as it came."""
        assert self._socket.poll(WAIT_S * 1e3), "no message came"
        return self._socket.recv_multipart()

    def take(self) -> Message:
        """The next message."""
        return Message.of(self.frames())

    def rest(self) -> Iterator[Message]:
        """What else has come, or comes in the time that a second copy would take."""
        while self._socket.poll(300):
            yield self.take()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close(0)


@contextmanager
def many() -> Iterator[Iterator[Receiver]]:
    """As many receivers as are asked for, by `next`, until the end of the block."""
    context, made = zmq.Context(), list[Receiver]()

    def more() -> Iterator[Receiver]:
        while True:
            made.append(Receiver(context))
            yield made[-1]

    yield more()
    for receiver in made:
        receiver.close()
    context.term()
