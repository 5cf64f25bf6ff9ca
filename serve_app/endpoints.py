"""What each HTTP endpoint does, over one service."""

import asyncio
import hmac
import time
from collections.abc import Sequence
from typing import Annotated, get_args

from fastapi import Depends, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import PositiveFloat, PositiveInt, SecretStr

from encoders import errors
from encoders.config import EncoderConfig, Settings
from serve_app import bodies, replies, schemas
from serve_app.canary import CANARY
from serve_app.service import (
    POOLED,
    Dtype,
    Embedding,
    EncoderGraphs,
    ImageItem,
    ImageService,
    Output,
    Wanted,
    deadline,
)

REPORT_WITHIN_S = 2.0
READY_FOR_S = 10.0
"""After any answer, readiness is believed this long: probes then cost a busy encoder nothing."""


class ApiLimits(Settings):
    """What one request may ask for, and whether it needs a key."""

    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    max_images: PositiveInt = 64
    max_patches: PositiveInt = 65_536
    """Of all images of one request for patch output: they bound its reply."""
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
            outputs=get_args(Output),
            dtypes=get_args(Dtype),
            reply_types=replies.REPLY_TYPES,
            max_images_per_request=limits.max_images,
            max_patches_per_request=limits.max_patches,
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
        body, limit = await request.body(), self._limits.max_images
        asked, items = await asyncio.to_thread(bodies.parse, body, limit)
        if asked.model not in (None, self._config.name):
            raise errors.UnknownModel(
                f"model {asked.model[:80]!r} is not served here, only {self._config.name!r}"
            )
        embeddings = await self._embed(items, POOLED, asked.dimensions, bodies.timeout(request))
        return replies.as_json(
            schemas.EmbeddingsReply.of(embeddings, self._config.name, asked.encoding_format)
        )

    async def image_embeddings(
        self,
        request: Request,
        output: Annotated[Output, Query()] = "pooled",
        dtype: Annotated[Dtype, Query()] = "float32",
        dimensions: Annotated[int | None, Query(ge=1)] = None,
    ) -> Response:
        """One image as the body, or many as multipart files; the reply is of an accepted type."""
        wanted = Wanted(output, dtype)
        if output == "patch" and dimensions is not None:
            raise errors.InvalidRequest("dimensions shortens pooled embeddings, not patch rows")
        # Whoever takes none of the types hears of it before anything is read or encoded.
        kind = replies.media_type(", ".join(request.headers.getlist("accept")), wanted)
        items = await bodies.uploads(request, self._limits.max_images)
        if output == "patch":  # before anything is encoded
            what, most = "patch output", self._limits.max_patches
            if kind == replies.JSON:
                what, most = "patch rows in JSON", min(most, replies.json_patches(self._config))
            await bodies.check_patches(items, self._config, most, what)
        embeddings = await self._embed(items, wanted, dimensions, bodies.timeout(request))
        return await replies.reply(embeddings, kind, wanted, self._config.name)

    async def _embed(
        self,
        items: Sequence[ImageItem],
        wanted: Wanted,
        dimensions: int | None,
        timeout_s: float,
    ) -> list[Embedding]:
        width, normalize = self._config.dimensions, self._config.normalize
        if dimensions is not None and dimensions > width:
            raise errors.InvalidRequest(f"dimensions is {dimensions}, the model has {width}")
        # A client may ask for less than the server's limit, never for more.
        timeout_s = min(timeout_s, self._limits.request_timeout_s)
        if dimensions is None:
            return await self._submit(items, timeout_s, wanted)
        # What is scaled to unit length again is rounded after that.
        embeddings = await self._submit(items, timeout_s, POOLED if normalize else wanted)
        return [
            schemas.shorten(x, dimensions, wanted.dtype, normalize=normalize) for x in embeddings
        ]

    async def _submit(
        self, items: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        async with deadline(timeout_s, len(items)):
            embeddings = await self._service.submit(items, timeout_s, wanted)
        self._answered_at = time.monotonic()
        return embeddings
