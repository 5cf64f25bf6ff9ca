"""What SGLang sends, and the frames that it is sent: a pickled header, and the rows' bytes.

The header is written opcode by opcode: the classes that SGLang expects live in SGLang. It names
three globals of SGLang's allow-list, and holds None, str, int and lists beside them.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from encoders.errors import InvalidRequest
from serve_app.refusals import describe
from serve_app.service import Dtype, Embedding, Rows

M = TypeVar("M", bound=BaseModel)

Modality = Literal["IMAGE", "VIDEO", "AUDIO"]
MODALITIES = {"IMAGE": 1, "VIDEO": 2, "AUDIO": 3}
"""Values of SGLang's enumeration."""
MAX_MESSAGE = 2000
"""Characters of an error's text that travel."""

RequestId = Annotated[str, Field(min_length=1, max_length=1024)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
ReceiveCount = Annotated[int, Field(strict=True, ge=1, le=1024)]
Count = Annotated[int, Field(strict=True, ge=1, le=65536)]


class Part(BaseModel):
    """The body of `/encode`: images of one request, of which others may be encoded elsewhere."""

    req_id: RequestId
    num_parts: Count
    part_idx: Annotated[int, Field(strict=True, ge=0)]
    modality: Modality
    mm_items: list[Any]
    prefill_host: str | None = None
    embedding_port: Port | None
    """None: the receivers register themselves, under `req_id`."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.part_idx >= self.num_parts:
            raise ValueError(f"part_idx is {self.part_idx} of {self.num_parts} parts")
        if self.embedding_port is not None and self.prefill_host is None:
            raise ValueError("embedding_port needs a prefill_host")
        return self


class Registration(BaseModel):
    """The body of `/scheduler_receive_url`: one of `receive_count` receivers of a part."""

    req_id: RequestId
    receive_count: ReceiveCount
    receive_url: Annotated[str, Field(max_length=256)]
    """host:port; an IPv6 host stands in brackets."""


def parse(model: type[M], body: bytes) -> M:
    """A JSON body, checked. What is not needed of it is ignored. Raises `InvalidRequest`."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(describe(error.errors())) from error


class Frames(NamedTuple):
    """One message: the header, and the rows of all images, or none if the part failed."""

    header: bytes
    rows: Rows | None
    """uint8, flat: little-endian rows, one after another."""


def success(part: Part, embeddings: Sequence[Embedding], dtype: Dtype) -> Frames:
    """The message with the rows of a part's images, in order."""
    rows = [embedding.values for embedding in embeddings]
    # One frame is one buffer: joining is the one copy here, and a lone image needs none.
    joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
    joined = np.ascontiguousarray(joined, joined.dtype.newbyteorder("<"))
    grids = [list(embedding.grid_thw) for embedding in embeddings]
    shape = list(joined.shape)
    header = _header(part, grid_dim=grids, shape=shape, dtype=Global("torch", dtype))
    return Frames(header, joined.reshape(-1).view(np.uint8))


def failure(part: Part, message: str, status: int) -> Frames:
    """The message that says why a part has no rows."""
    return Frames(_header(part, error_msg=message[:MAX_MESSAGE], error_code=status), None)


class Global(NamedTuple):
    """Something that SGLang's unpickler looks up by name."""

    module: str
    name: str


EMBEDDING_DATA = Global("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData")
MODALITY = Global("sglang.srt.multimodal.modality", "Modality")


def _header(part: Part, **said: Any) -> bytes:
    """A pickle of SGLang's `EmbeddingData` with every attribute that its receivers read."""
    attributes = {
        "req_id": part.req_id,
        "num_parts": part.num_parts,
        "part_idx": part.part_idx,
        "grid_dim": None,
        "modality": (MODALITY, MODALITIES[part.modality]),
        "embedding": None,
        "shape": None,
        "dtype": None,
        "send_time": None,
        "error_msg": None,
        "error_code": None,
    } | said
    pairs = b"".join(_pickled(name) + _pickled(value) for name, value in attributes.items())
    # Protocol 2: class, empty tuple, NEWOBJ; a dict of MARK, pairs, SETITEMS; BUILD, STOP.
    return b"\x80\x02" + _pickled(EMBEDDING_DATA) + b")\x81}(" + pairs + b"ub."


def _pickled(value: Any) -> bytes:
    """The opcodes that push a value."""
    match value:
        case None:
            return b"N"
        case Global(module, name):
            return f"c{module}\n{name}\n".encode()
        case (Global() as function, argument):  # called with one argument
            return _pickled(function) + _pickled(argument) + b"\x85R"
        case str():
            text = value.encode("utf-8", "replace")
            return b"X" + struct.pack("<I", len(text)) + text
        case int():
            return b"J" + struct.pack("<i", value)
        case list():
            return b"](" + b"".join(map(_pickled, value)) + b"e"
    raise TypeError(f"a header holds no {type(value).__name__}")
