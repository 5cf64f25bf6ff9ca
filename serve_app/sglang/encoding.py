"""A part's images -> the message with their rows."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from encoders.errors import Overloaded
from serve_app.service import Embedding, ImageItem, ImageService, Wanted, deadline
from serve_app.sglang.items import images
from serve_app.sglang.settings import SGLangSettings
from serve_app.sglang.slots import Slots
from serve_app.sglang.wire import Frames, Part, success

PAUSE_S = 0.1
"""Between two offers of a part to a full queue."""


class PartEncoder:
    """Encodes parts by an `ImageService`, all images of one at once."""

    def __init__(
        self, service: ImageService, settings: SGLangSettings, max_images: int, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self._service = service
        self._wanted = Wanted("patch", settings.dtype)
        self._max_images = max_images
        self._queue_for_s = settings.queue_for_s
        self._slots = Slots(settings.queue_for_s)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Hold room for one part. Raises `Overloaded`."""
        return self._slots.one()

    async def encode(self, part: Part) -> Frames:
        """The rows of every image, joined in order. Raises an `EncoderError` that names the item.

        Nothing has been sent anywhere when it returns or raises.
        """
        # Megabytes of base64 and of rows: the loop serves others meanwhile.
        items = await asyncio.to_thread(images, part, self._max_images)
        async with deadline(self.timeout_s, len(items)):
            embeddings = await self._embed(items)
        return await asyncio.to_thread(success, part, embeddings, self._wanted.dtype)

    async def _embed(self, items: Sequence[ImageItem]) -> list[Embedding]:
        """SGLang shows its user the first refusal, so a full queue is asked again for a while."""
        give_up_at: float | None = None  # counted from the first refusal on
        while True:
            try:
                return await self._service.submit(items, self.timeout_s, self._wanted)
            except Overloaded:
                now = time.monotonic()
                give_up_at = give_up_at or now + self._queue_for_s
                if now + PAUSE_S > give_up_at:
                    raise
            await asyncio.sleep(PAUSE_S)
