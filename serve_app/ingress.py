"""HTTP replicas: the front door over a Batcher. Imports no torch."""

from fastapi import FastAPI

from encoders.config import EncoderConfig
from serve_app.api import build_api
from serve_app.endpoints import ApiLimits
from serve_app.service import ImageService


class Ingress:
    """Serves the HTTP interface; Ray asks for the app once, in the replica."""

    def __init__(self, service: ImageService, config: EncoderConfig, limits: ApiLimits) -> None:
        self._service = service
        self._config = config
        self._limits = limits

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._service, self._config, self._limits)
