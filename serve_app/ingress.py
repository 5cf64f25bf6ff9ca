"""HTTP replicas: the front door over whatever turns images into embeddings. Imports no torch."""

import logging
from collections.abc import Callable

from fastapi import FastAPI

from encoders.config import EncoderConfig
from serve_app.api import build_api
from serve_app.endpoints import ApiLimits
from serve_app.logs import speak_up
from serve_app.middleware import Traffic
from serve_app.service import ImageService, Stats
from serve_app.sglang.routers import SGLang, SGLangSettings

MakeService = Callable[[], ImageService]
"""Called once in each replica: threads and models do not travel."""


class Ingress:
    """Serves the HTTP interface; Ray asks for the app once, in the replica."""

    def __init__(
        self,
        make_service: MakeService,
        config: EncoderConfig,
        limits: ApiLimits,
        sglang: SGLangSettings | None = None,
    ) -> None:
        speak_up("serve_app", logging.INFO if limits.access_log else logging.WARNING)
        self._service = make_service()
        self._config = config
        self._limits = limits
        self._traffic = Traffic()
        self._sglang = None
        if sglang:
            limit, timeout_s = limits.max_images, limits.request_timeout_s
            self._sglang = SGLang(self._service, sglang, limit, timeout_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        more = (self._sglang.calls, self._sglang.v1) if self._sglang else ()
        return build_api(self._service, self._config, self._limits, self._traffic, *more)

    async def check_health(self) -> None:
        """Raise if what this process runs besides HTTP is stuck."""
        await self._service.check_health()

    def record_autoscaling_stats(self) -> Stats:
        """What this process runs besides HTTP."""
        return self._service.record_autoscaling_stats()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new images, wait for those under way. How many requests are left running."""
        if self._sglang:
            await self._sglang.leave()
        return await self._traffic.drain(timeout_s)
