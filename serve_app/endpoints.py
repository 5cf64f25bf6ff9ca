"""What each HTTP endpoint does, over one service."""

import asyncio
import hmac
import io
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

import numpy as np
from fastapi import Depends, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import PositiveFloat, PositiveInt, SecretStr, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from encoders import errors
from encoders.config import EncoderConfig, Settings
from serve_app import refusals, schemas
from serve_app.canary import CANARY
from serve_app.service import Embedding, EncoderGraphs, ImageItem, ImageService, deadline
from serve_app.sources import image_bytes

NPY = "application/x-npy"
TIMEOUT_HEADER = "x-request-timeout-seconds"
CHUNK_BYTES = 64 * 1024
TAIL_BYTES = 1024
"""Where the closing boundary of a multipart body is looked for."""
REPORT_WITHIN_S = 2.0
READY_FOR_S = 10.0
"""After any answer, readiness is believed this long: probes then cost a busy encoder nothing."""


class ApiLimits(Settings):
    """What one request may ask for, and whether it needs a key."""

    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    max_images: PositiveInt = 64
    request_timeout_s: PositiveFloat = 60.0
    access_log: bool = False
    api_key: SecretStr | None = None


class Endpoints:
    """One method per endpoint."""

    def __init__(self, service: ImageService, config: EncoderConfig, limits: ApiLimits) -> None:
        self._service = service
        self._config = config
        self._limits = limits
        self._answered_at = -READY_FOR_S

    async def authorize(
        self,
        bearer: Annotated[
            HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))
        ],
    ) -> None:
        """Let a request pass that carries the configured key, or any if none is configured."""
        if (key := self._limits.api_key) is None:
            return
        if bearer is None:
            raise errors.Unauthorized("this service wants an `Authorization: Bearer` header")
        # Headers arrive decoded as latin-1, whatever bytes the client meant.
        sent = bearer.credentials.encode("latin-1")
        if not hmac.compare_digest(sent, key.get_secret_value().encode()):
            raise errors.Unauthorized("wrong API key")

    async def health(self) -> dict[str, str]:
        """200 as long as this process lives."""
        return {"status": "live"}

    async def ready(self) -> dict[str, str]:
        """200 if an encoder has answered lately, or answers a canary image now; else 503."""
        if time.monotonic() - self._answered_at > READY_FOR_S:
            try:
                await self._submit([CANARY], timeout_s=READY_FOR_S)
            except errors.EncoderError as error:
                raise errors.Overloaded(f"no encoder answers: {error}") from error
        return {"status": "ready"}

    async def models(self) -> schemas.Models:
        """The one model served here, and its limits."""
        config, limits = self._config, self._limits
        model = schemas.Model(
            id=config.name,
            dimensions=config.dimensions,
            normalized=config.normalize,
            max_images_per_request=limits.max_images,
            max_body_bytes=limits.max_body_bytes,
            max_image_bytes=config.limits.max_bytes,
            max_image_pixels=config.limits.max_pixels,
            max_aspect_ratio=config.limits.max_aspect_ratio,
            graphs=await self._graphs(),
        )
        return schemas.Models(data=[model])

    async def _graphs(self) -> EncoderGraphs:
        try:
            async with asyncio.timeout(REPORT_WITHIN_S):
                return await self._service.encoders()
        except (TimeoutError, errors.EncoderError):
            return {}  # the limits are to be had while every Batcher is busy or gone

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's endpoint: images as data URIs or base64 in JSON."""
        # Megabytes of JSON and base64 are parsed in a thread: the loop serves others meanwhile.
        wanted, items = await asyncio.to_thread(self._parse, await request.body())
        if wanted.model not in (None, self._config.name):
            raise errors.UnknownModel(
                f"model {wanted.model[:80]!r} is not served here, only {self._config.name!r}"
            )
        embeddings = await self._embed(items, wanted.dimensions, timeout(request))
        return self._json(embeddings, wanted.encoding_format)

    async def image_embeddings(
        self, request: Request, dimensions: Annotated[int | None, Query(ge=1)] = None
    ) -> Response:
        """One image as the body, or many as multipart files; JSON, or `application/x-npy`."""
        embeddings = await self._embed(await _uploads(request), dimensions, timeout(request))
        if NPY in request.headers.get("accept", ""):
            return Response(npy(embeddings), media_type=NPY)
        return self._json(embeddings, "float")

    def _parse(self, body: bytes) -> tuple[schemas.EmbeddingsRequest, list[ImageItem]]:
        try:
            wanted = schemas.EmbeddingsRequest.model_validate_json(body)
        except ValidationError as error:
            raise errors.InvalidRequest(refusals.describe(error.errors())) from error
        single = not isinstance(wanted.input, list)
        values = [wanted.input] if single else list(wanted.input)
        self._check_count(len(values))
        items = []
        for index, value in enumerate(values):
            name = "input" if single else f"input[{index}]"
            try:
                items.append(ImageItem(name, image_bytes(value, modality=wanted.modality)))
            except errors.EncoderError as error:
                raise error.named(name) from error
        return wanted, items

    async def _embed(
        self, items: Sequence[ImageItem], dimensions: int | None, timeout_s: float
    ) -> list[Embedding]:
        self._check_count(len(items))
        width = self._config.dimensions
        if dimensions is not None and dimensions > width:
            raise errors.InvalidRequest(f"dimensions is {dimensions}, the model has {width}")
        # A client may ask for less than the server's limit, never for more.
        timeout_s = min(timeout_s, self._limits.request_timeout_s)
        embeddings = await self._submit(items, timeout_s)
        if dimensions is None:
            return embeddings
        normalize = self._config.normalize
        return [schemas.shorten(x, dimensions, normalize=normalize) for x in embeddings]

    async def _submit(self, items: Sequence[ImageItem], timeout_s: float) -> list[Embedding]:
        async with deadline(timeout_s, len(items)):
            embeddings = await self._service.submit(items, timeout_s)
        self._answered_at = time.monotonic()
        return embeddings

    def _check_count(self, num_images: int) -> None:
        if num_images == 0:
            raise errors.InvalidRequest("the request has 0 images, at least 1 is needed")
        if num_images > self._limits.max_images:
            raise errors.RequestTooLarge(
                f"the request has {num_images} images, the limit is {self._limits.max_images}"
            )

    def _json(self, embeddings: list[Embedding], encoding: str) -> Response:
        reply = schemas.EmbeddingsReply.of(embeddings, self._config.name, encoding)
        return Response(reply.model_dump_json(), media_type="application/json")


def timeout(request: Request) -> float:
    """Seconds that the client grants, or infinity. Ray's own header, which its proxy reads too."""
    text = request.headers.get(TIMEOUT_HEADER, "inf")
    try:
        seconds = float(text)
    except ValueError as error:
        raise errors.InvalidRequest(f"{TIMEOUT_HEADER} is {text[:40]!r}, not a number") from error
    if not seconds > 0:  # NaN too; to Ray's proxy zero means for ever
        raise errors.InvalidRequest(f"{TIMEOUT_HEADER} is {text[:40]}, it has to be above 0")
    return seconds


async def _uploads(request: Request) -> list[ImageItem]:
    """The files of a multipart body, or the body itself as one image."""
    kind = request.headers.get("content-type", "").lower()
    if not kind.startswith("multipart/form-data"):
        return [ImageItem("image", await request.body())]
    _, parameters = parse_options_header(request.headers["content-type"])
    end = b"--" + parameters.get(b"boundary", b"") + b"--"
    # Parsed as it arrives: 60 MB at once held the loop up for 0.1 s, and lay in memory twice.
    # The body's own limit bounds the number of parts; ours of images has its own message.
    parser = MultiPartParser(request.headers, _chunks(request, end), max_files=math.inf)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise errors.InvalidRequest(error.message) from error
    except UnicodeError as error:
        raise errors.InvalidRequest("the form's charset cannot be decoded") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        return [ImageItem(f"file[{i}]", await file.read()) for i, file in enumerate(files)]
    finally:
        await form.close()


async def _chunks(request: Request, end: bytes) -> AsyncGenerator[bytes, None]:
    """The body in pieces that are soon parsed. It has to close with the boundary `end`.

    The parser itself would drop a last file that is cut off, silently; told of it from here, it
    also closes what it has opened.
    """
    tail = bytearray()
    async for message in request.stream():  # a server may hand over the whole body in one
        for start in range(0, max(len(message), 1), CHUNK_BYTES):
            chunk = message[start : start + CHUNK_BYTES]
            tail += chunk[-TAIL_BYTES:]
            del tail[:-TAIL_BYTES]
            yield chunk
            await asyncio.sleep(0)  # others' turn
    if end not in tail:
        raise MultiPartException("the multipart body ends before its closing boundary")


def npy(embeddings: Sequence[Embedding]) -> bytes:
    """A float32 [images, dimensions] array in NumPy's file format."""
    file = io.BytesIO()
    np.save(file, np.stack([embedding.values for embedding in embeddings]), allow_pickle=False)
    return file.getvalue()
