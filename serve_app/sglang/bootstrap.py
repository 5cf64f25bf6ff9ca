"""SGLang servers are told where this service is: at start, again and again, and no more at the end.

They drop an encoder that they could not reach for ten minutes, and forget all when they restart.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

import httpx

from serve_app.canary import CANARY
from serve_app.metrics import counter
from serve_app.service import ImageService
from serve_app.sglang.settings import SGLangSettings
from serve_app.sglang.shared import app_ends, app_is_deleted

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 3.0
READY_TIMEOUT_S = 10.0
"""For an encoder's answer, before the first registration; then another is asked for."""


class Bootstrap:
    """Keeps one URL registered with every configured server."""

    def __init__(
        self,
        settings: SGLangSettings,
        service: ImageService,
        is_deleted: Callable[[], Awaitable[bool]] = app_is_deleted,
    ) -> None:
        self._url = settings.public_url
        self._servers = settings.bootstrap_urls
        self._every_s = settings.register_every_s
        self._service = service
        self._is_deleted = is_deleted
        self._failing = set[str]()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Register from now on, once an encoder has answered. Needs a running loop."""
        if self._servers and self._task is None:
            self._task = asyncio.create_task(self._keep_registered())

    async def leave(self) -> None:
        """Register no more, and let the servers forget the URL."""
        if await self._pause():
            await self._tell_all("DELETE", "/unregister_encoder_url")

    async def stop(self) -> None:
        """Register no more from this replica. Others may go on, unless all of them end."""
        if await self._pause() and await app_ends():
            await self._tell_all("DELETE", "/unregister_encoder_url")

    async def _pause(self) -> bool:
        """End the task; False if there was none."""
        if (task := self._task) is None:
            return False
        self._task = None
        task.cancel()
        await asyncio.wait([task])  # else a registration under way might come after
        return True

    async def _keep_registered(self) -> None:
        while not await self._encoder_answers():  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(1)
        # Ray lets replicas finish first, of which each would undo what another's end has told.
        while not await self._is_deleted():
            await self._tell_all("POST", "/register_encoder_url")
            await asyncio.sleep(self._every_s)
        await self._tell_all("DELETE", "/unregister_encoder_url")

    async def _encoder_answers(self) -> bool:
        canary = self._service.submit([CANARY], READY_TIMEOUT_S)
        (outcome,) = await asyncio.gather(canary, return_exceptions=True)
        return not isinstance(outcome, BaseException)

    async def _tell_all(self, method: Literal["POST", "DELETE"], path: str) -> None:
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            await asyncio.gather(*(self._tell(client, method, x, path) for x in self._servers))

    async def _tell(self, client: httpx.AsyncClient, method: str, server: str, path: str) -> None:
        try:
            reply = await client.request(method, server + path, json={"url": self._url})
            problem = "" if reply.status_code == 200 else f"status {reply.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = type(error).__name__
        counter("encoder_registrations_total").inc(tags={"result": "failed" if problem else "ok"})
        if problem and server not in self._failing:  # once, not every half minute
            logger.warning("%s %s%s: %s", method, server, path, problem)
        (self._failing.add if problem else self._failing.discard)(server)
