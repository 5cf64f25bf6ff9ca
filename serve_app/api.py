"""The HTTP front door: `build_api(service, ...)` is a FastAPI app that knows nothing of Ray."""

from fastapi import APIRouter, Depends, FastAPI

from encoders.config import EncoderConfig
from serve_app import __version__, refusals
from serve_app.endpoints import ApiLimits, Endpoints
from serve_app.middleware import BodyLimit, Traffic, Watch
from serve_app.openapi import IMAGE_BODY, JSON_BODY, NEGOTIATED, REPLY
from serve_app.service import ImageService


def build_api(
    service: ImageService,
    config: EncoderConfig,
    limits: ApiLimits,
    traffic: Traffic | None = None,
    more: APIRouter | None = None,
    more_v1: APIRouter | None = None,
) -> FastAPI:
    """The whole HTTP interface over anything that turns images into embeddings.

    What `more` routes needs no key; `more_v1` stands under `/v1`, behind the key.
    """
    endpoints = Endpoints(service, config, limits)
    app = FastAPI(title="Image embeddings", version=__version__)
    app.get("/health", summary="Live: this process answers")(endpoints.health)
    app.get("/ready", summary="An encoder answers")(endpoints.ready)
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(endpoints.authorize)])
    v1.get("/models")(endpoints.models)
    v1.post("/embeddings", responses=REPLY, openapi_extra=JSON_BODY)(endpoints.embeddings)
    v1.post("/images/embeddings", responses=NEGOTIATED, openapi_extra=IMAGE_BODY)(
        endpoints.image_embeddings
    )
    if more_v1:
        v1.include_router(more_v1)
    app.include_router(v1)
    if more:
        app.include_router(more)
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    app.add_middleware(Watch, traffic=traffic or Traffic(), access_log=limits.access_log)
    refusals.install(app)
    return app
