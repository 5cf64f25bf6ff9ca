"""The part of an Ingress replica that is SGLang's: its routes, and what lives beside them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import APIRouter

from serve_app.service import ImageService
from serve_app.sglang.bootstrap import Bootstrap
from serve_app.sglang.calls import Calls
from serve_app.sglang.chat import Chat
from serve_app.sglang.delivery import Delivery
from serve_app.sglang.encoding import PartEncoder
from serve_app.sglang.settings import SGLangSettings

__all__ = ["SGLang", "SGLangSettings"]

Described = dict[int | str, dict[str, Any]]
REFUSED: Described = {
    status: {"description": "`status`, `message`, `req_id`"} for status in (400, 413, 422, 502, 503)
}


class SGLang:
    """Two routers: SGLang's own calls, which carry no key, and chat for this service's clients."""

    def __init__(
        self, service: ImageService, settings: SGLangSettings, max_images: int, timeout_s: float
    ) -> None:
        self._delivery = Delivery(settings)
        self._bootstrap = Bootstrap(settings, service)
        self._chat = Chat(settings, settings.chat_url) if settings.chat_url else None
        encoder = PartEncoder(service, settings, max_images, timeout_s)
        calls = Calls(encoder, self._delivery)
        self.calls = APIRouter(lifespan=self._lifespan)
        self.calls.post("/encode", responses=REFUSED)(calls.encode)
        self.calls.post("/scheduler_receive_url", responses=REFUSED)(calls.scheduler_receive_url)
        self.v1 = APIRouter()
        if self._chat:
            self.v1.post("/chat/completions")(self._chat.completions)

    async def leave(self) -> None:
        """Let SGLang send nothing more, since the whole service is about to end."""
        await self._bootstrap.leave()

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:  # one that fails keeps no other from closing
            stack.push_async_callback(self._delivery.close)
            if self._chat:
                stack.push_async_callback(self._chat.close)
            stack.push_async_callback(self._bootstrap.stop)
            self._bootstrap.start()
            yield
