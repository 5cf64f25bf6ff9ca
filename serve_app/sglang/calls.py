"""The calls of SGLang: `/encode` and `/scheduler_receive_url`."""

import asyncio
import time
from contextlib import AsyncExitStack

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from encoders.errors import EncoderError, InvalidRequest, RequestTooLarge
from serve_app.metrics import counter
from serve_app.refusals import Verdict, verdict
from serve_app.sglang.delivery import Delivery
from serve_app.sglang.encoding import PartEncoder
from serve_app.sglang.wire import Frames, Part, Registration, failure, parse

MAX_REGISTRATION = 16 * 1024
"""Bytes of the body of a registration."""


class Calls:
    """One method per call. SGLang repeats none, and waits for minutes for a message."""

    def __init__(self, encoder: PartEncoder, delivery: Delivery) -> None:
        self._encoder = encoder
        self._delivery = delivery
        self._serving = set[tuple[str, int, str | None]]()

    async def encode(self, request: Request) -> Response:
        """Encode a part and send its rows, one message to each receiver; then answer 200.

        A failure is another status, and a message that says so: SGLang looks at statuses only when
        all its calls for a request have ended.
        """
        part: Part | None = None
        try:
            part = await asyncio.to_thread(parse, Part, await request.body())
            named = self._delivery.named(part)
            key = part.req_id, part.part_idx, named
            if key in self._serving:
                raise InvalidRequest(f"{part.req_id[:80]!r} is being encoded already")
        except EncoderError as error:  # there is nobody to send a message to
            return refused(verdict(error), part.req_id if part else "")
        # Whatever goes wrong, not only what was thought of: else SGLang waits in vain.
        self._serving.add(key)
        try:
            (outcome,) = await asyncio.gather(self._serve(part, named), return_exceptions=True)
        finally:
            self._serving.discard(key)
        counter("encoder_parts_total").inc(tags={"result": "failed" if outcome else "sent"})
        if isinstance(outcome, BaseException):
            outcome = verdict(outcome)
        return refused(outcome, part.req_id) if outcome else JSONResponse(None)

    async def scheduler_receive_url(self, request: Request) -> Response:
        """Note one receiver of a part that names none. Waits for nothing."""
        registration: Registration | None = None
        try:
            registration = parse(Registration, await _short_body(request))
            await self._delivery.register(registration)
        except EncoderError as error:
            return refused(verdict(error), registration.req_id if registration else "")
        return JSONResponse(None)

    async def _serve(self, part: Part, named: str | None) -> Verdict | None:
        """Why a part could not be encoded, after its receivers were told; None if it was sent.

        What goes wrong with the sending itself is raised: no message would arrive either.
        """
        timeout_s = self._encoder.timeout_s
        end = time.monotonic() + timeout_s
        async with AsyncExitStack() as stack:
            encoding = self._in_turn(part, stack)
            (frames,) = await asyncio.gather(encoding, return_exceptions=True)
            if isinstance(frames, BaseException):
                said = verdict(frames)
                await self._delivery.tell(part, named, failure(part, said.message, said.status))
                return said
            late = failure(part, f"not every receiver registered within {timeout_s:g} s", 504)
            left_s = max(end - time.monotonic(), 0)
            await self._delivery.deliver(part, named, frames, late, left_s)
            return None

    async def _in_turn(self, part: Part, stack: AsyncExitStack) -> Frames:
        await stack.enter_async_context(self._encoder.turn())
        return await self._encoder.encode(part)


async def _short_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_REGISTRATION:
            raise RequestTooLarge(
                f"the body has {len(body)} bytes or more, the limit is {MAX_REGISTRATION}"
            )
    return bytes(body)


def refused(said: Verdict, req_id: str) -> JSONResponse:
    """The reply that SGLang's receivers read."""
    content = {"status": "error", "message": said.message, "req_id": req_id}
    return JSONResponse(content, said.status)
