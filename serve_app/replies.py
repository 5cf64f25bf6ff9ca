"""Embeddings -> a reply of the type that the client accepts. Rows leave without being joined.

NumPy's format holds one array, so a patch reply is three files one after another. A file of
safetensors is the length of its header (8 bytes), the header (JSON), then the tensors' bytes.
"""

import asyncio
import copyreg
import io
import json
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from fastapi import Response
from starlette.responses import StreamingResponse

from encoders.config import EncoderConfig
from encoders.errors import NotAcceptable, RequestTooLarge
from serve_app import accept, schemas
from serve_app.service import Embedding, Rows, Wanted

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"
REPLY_TYPES = [JSON, NPY, SAFETENSORS]

CHUNK_BYTES = 1024 * 1024
"""Of one ASGI message. Smaller ones cost throughput: on loopback 64 KiB about a third of it."""
MAX_JSON_VALUES = 4 * 1024 * 1024
"""Each takes some 20 bytes of text, and 32 while that is made."""
UNDER_WAY = 4
PAUSE_S, PAUSES = 1e-3, 10

SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


def _pickled(view: memoryview) -> tuple[Any, ...]:
    return bytes, (view.tobytes(),)


# The messages of a reply reach Ray's Python proxy by plain pickle, which refuses views; this is
# cloudpickle's own rule for them. Any other server writes a view as it is.
copyreg.pickle(memoryview, _pickled)


def media_type(header: str, wanted: Wanted) -> str:
    """The type of the reply, by the request's `Accept`. Raises `NotAcceptable`.

    JSON is the default of pooled output. Of patch output it has ten times the bytes, so there it
    has to be named.
    """
    if wanted.output == "pooled":
        offers, by_name_only = REPLY_TYPES, set[str]()
    else:
        offers, by_name_only = [NPY, SAFETENSORS, JSON], {JSON}
    offers = [x for x in offers if x != NPY or wanted.dtype != "bfloat16"]
    chosen = accept.best(header, offers, by_name_only)
    if chosen is None:
        why = "; NumPy has no bfloat16" if NPY not in offers else ""
        raise NotAcceptable(
            f"{wanted.output} embeddings in {wanted.dtype} are offered as {', '.join(offers)}{why}"
        )
    return chosen


async def reply(
    embeddings: list[Embedding], media_type: str, wanted: Wanted, model: str
) -> Response:
    """The whole reply, of a type that is offered for what was wanted."""
    if media_type == JSON:
        if wanted.output == "pooled":
            return as_json(schemas.EmbeddingsReply.of(embeddings, model, "float"))
        _check_values(sum(embedding.values.size for embedding in embeddings))
        # Millions of numbers: the loop serves others meanwhile.
        content = await asyncio.to_thread(schemas.PatchEmbeddingsReply.json_of, embeddings, model)
        return Response(content, media_type=JSON)
    tensors = _tensors(embeddings, wanted)
    parts = _npy(tensors) if media_type == NPY else _safetensors(tensors)
    views = [_view(part) for part in parts]
    num_bytes = sum(map(len, views))
    if num_bytes <= CHUNK_BYTES:
        return Response(b"".join(views), media_type=media_type)
    length = {"Content-Length": str(num_bytes)}
    return StreamingResponse(_chunks(views), headers=length, media_type=media_type)


def as_json(record: schemas.EmbeddingsReply) -> Response:
    """A record as the body."""
    return Response(record.model_dump_json(), media_type=JSON)


def json_patches(config: EncoderConfig) -> int:
    """Patches that become too many values for JSON, at the least width that rows may have."""
    return MAX_JSON_VALUES // config.dimensions * config.merge_size**2


def _check_values(num_values: int) -> None:
    if num_values > MAX_JSON_VALUES:
        raise RequestTooLarge(
            f"the rows have {num_values} values, the limit of JSON is {MAX_JSON_VALUES}; "
            f"accept {NPY} or {SAFETENSORS}"
        )


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[Rows]
    """Of which the tensor is made when they are laid end to end."""


def _tensors(embeddings: Sequence[Embedding], wanted: Wanted) -> list[_Tensor]:
    rows = [embedding.values for embedding in embeddings]
    if wanted.output == "pooled":
        joined = np.stack(rows)  # small: one vector for each image
        return [_Tensor("embeddings", wanted.dtype, joined.shape, [joined])]
    offsets = np.array([*accumulate(map(len, rows), initial=0)], np.int64)
    grids = np.array([embedding.grid_thw for embedding in embeddings], np.int64)
    return [  # the small ones first: who reads a stream then knows what the rows are
        _Tensor("offsets", "int64", offsets.shape, [offsets]),
        _Tensor("grid_thw", "int64", grids.shape, [grids]),
        _Tensor("rows", wanted.dtype, (int(offsets[-1]), rows[0].shape[1]), rows),
    ]


def _npy(tensors: Sequence[_Tensor]) -> Iterator[bytes | Rows]:
    for tensor in tensors:
        file = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(np.dtype(tensor.dtype))
        header = {"descr": descr, "fortran_order": False, "shape": tensor.shape}
        np.lib.format.write_array_header_1_0(file, header)
        yield file.getvalue()
        yield from tensor.parts


def _safetensors(tensors: Sequence[_Tensor]) -> Iterator[bytes | Rows]:
    entries, start = {}, 0
    for tensor in tensors:
        end = start + sum(part.nbytes for part in tensor.parts)
        entries[tensor.name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # tensors then begin at a multiple of their size
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        yield from tensor.parts


def _view(part: bytes | Rows) -> memoryview:
    """The bytes of a part, where they lie."""
    if isinstance(part, bytes):
        return memoryview(part)
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


async def _chunks(views: Sequence[memoryview]) -> AsyncIterator[memoryview]:
    """The bytes in views, few of which are under way at a time.

    Ray takes messages without a limit, and makes one pickle of all that it finds. A view that is
    still alive has not been written; whoever writes them may keep the last ones, so the wait ends.
    """
    sent = deque[weakref.ref[memoryview]](maxlen=UNDER_WAY)
    for view in views:
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            sent.append(weakref.ref(chunk))
            yield chunk
            del chunk
            await asyncio.sleep(0)  # others' turn
            for _ in range(PAUSES):
                if len(sent) < UNDER_WAY or sent[0]() is None:
                    break
                await asyncio.sleep(PAUSE_S)
