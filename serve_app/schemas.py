"""Wire formats of requests and replies."""

import base64
from typing import Any, Literal

import numpy as np
from pydantic import AliasChoices, BaseModel, Field, PositiveInt
from pydantic_core import to_json

from encoders.packing import GridTHW
from serve_app.service import Dtype, Embedding, EncoderGraphs, Rows


class EmbeddingsRequest(BaseModel):
    """OpenAI's envelope. Unknown fields are ignored, as its clients expect."""

    input: str | dict[str, Any] | list[Any] = Field(
        description="a data URI, an object with an `image`, or a list of them"
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: PositiveInt | None = Field(
        None, validation_alias=AliasChoices("dimensions", "output_dimension")
    )
    modality: str | None = Field(None, description='"image" makes a bare string base64')


class EmbeddingData(BaseModel):
    """One image's embedding: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Patches that the images took, under OpenAI's names."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, embeddings: list[Embedding]) -> "Usage":
        """What these took."""
        patches = sum(embedding.num_patches for embedding in embeddings)
        return cls(prompt_tokens=patches, total_tokens=patches)


class EmbeddingsReply(BaseModel):
    """OpenAI's reply to both embedding endpoints."""

    object: Literal["list"] = "list"
    data: list[EmbeddingData]
    model: str
    usage: Usage

    @classmethod
    def of(cls, embeddings: list[Embedding], model: str, encoding: str) -> "EmbeddingsReply":
        """The reply for embeddings in order of the request's items."""
        rows = [widen(x.values) for x in embeddings]
        encoded = [to_base64(row) if encoding == "base64" else row.tolist() for row in rows]
        data = [EmbeddingData(index=i, embedding=values) for i, values in enumerate(encoded)]
        return cls(data=data, model=model, usage=Usage.of(embeddings))


class PatchEmbeddingData(BaseModel):
    """One image's rows, and the frames, rows and columns of patches that they came from."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[list[float]]
    grid_thw: GridTHW


class PatchEmbeddingsReply(BaseModel):
    """The same reply for patch output."""

    object: Literal["list"] = "list"
    data: list[PatchEmbeddingData]
    model: str
    usage: Usage

    @classmethod
    def json_of(cls, embeddings: list[Embedding], model: str) -> bytes:
        """The reply for embeddings in order of the request's items, as JSON.

        It is made row by row, for other threads stand still while one value becomes JSON.
        """
        data = []
        for i, embedding in enumerate(embeddings):
            rows = b",".join(to_json(row.tolist()) for row in widen(embedding.values))
            item = b'{"object":"embedding","index":%d,"embedding":[%b],"grid_thw":%b}'
            data.append(item % (i, rows, to_json(embedding.grid_thw)))
        ending = b'],"model":%b,"usage":%b}' % (to_json(model), to_json(Usage.of(embeddings)))
        return b'{"object":"list","data":[' + b",".join(data) + ending


class Model(BaseModel):
    """What is served, and the limits that a client has to keep."""

    id: str
    object: Literal["model"] = "model"
    owned_by: str = "vision-encoder-serve"
    dimensions: int
    normalized: bool
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]
    reply_types: list[str] = Field(description="of `POST /v1/images/embeddings`")
    max_images_per_request: int
    max_patches_per_request: int = Field(description="of all its images, for patch output")
    max_body_bytes: int
    max_image_bytes: int
    max_image_pixels: int
    max_aspect_ratio: float
    graphs: EncoderGraphs = Field(
        description="captured graphs of each encoder, as it last told the Batcher that was asked"
    )


class Models(BaseModel):
    """OpenAI's list of models: always one."""

    object: Literal["list"] = "list"
    data: list[Model]


def to_base64(values: Rows) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def shorten(
    embedding: Embedding, dimensions: int, dtype: Dtype = "float32", *, normalize: bool
) -> Embedding:
    """The first `dimensions` values. If the whole was float32 of unit length, so are they, until
    they are rounded to `dtype`; else they are left as they are.
    """
    values = embedding.values[:dimensions]
    if normalize:
        values = narrow(values / max(float(np.linalg.norm(values)), 1e-12), dtype)
    return Embedding(values, embedding.grid_thw)


def narrow(values: Rows, dtype: Dtype) -> Rows:
    """Finite float32 values rounded to nearest, ties to even; of bfloat16, the bits."""
    if dtype != "bfloat16":
        return values.astype(dtype, copy=False)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(values: Rows) -> Rows:
    """The same values as floats that NumPy knows: bfloat16's bits become float32."""
    if values.dtype != np.uint16:
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)
