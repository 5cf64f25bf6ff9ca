"""`POST /v1/chat/completions`: passed to the configured SGLang, and streamed back."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from http import HTTPStatus

import httpx
from fastapi import Request, Response
from starlette.responses import StreamingResponse

from encoders.errors import EncoderError, Overloaded, PeerTimeout, PeerUnreachable
from serve_app.sglang.settings import SGLangSettings
from serve_app.sglang.slots import Slots

CONNECT_TIMEOUT_S = 3.0
EVENT_STREAM = "text/event-stream"


class Chat:
    """Passes one kind of request on. Nothing of the other server's failures is shown."""

    def __init__(self, settings: SGLangSettings, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._timeout_s = settings.chat_timeout_s
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if settings.chat_key is not None:
            self._headers["authorization"] = f"Bearer {settings.chat_key.get_secret_value()}"
        self._slots = Slots(settings.queue_for_s)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(self._timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),  # the slots are the limit
            trust_env=False,
        )

    async def completions(self, request: Request) -> Response:
        """The other server's answer, as it comes; 502 if it fails, 504 if it is slow."""
        body = await request.body()
        async with AsyncExitStack() as stack:
            # Each of these makes SGLang call us back: they must not take every slot for that.
            await stack.enter_async_context(self._slots.one())
            reply = await self._send(body)
            stack.push_async_callback(reply.aclose)
            kind = reply.headers.get("content-type", "application/json")
            if reply.status_code != 200 or not kind.startswith(EVENT_STREAM):
                return Response(await self._whole(reply), reply.status_code, media_type=kind)
            # The stream outlives this call, and with it the slot and the connection: it is begun
            # here, since of a generator that never ran nothing would give them back.
            events = self._events(reply, stack.pop_all())
            await anext(events)
            return StreamingResponse(events, media_type=kind)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _send(self, body: bytes) -> httpx.Response:
        request = self._client.build_request("POST", self._url, content=body, headers=self._headers)
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._client.send(request, stream=True)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._said(error) from error
        if failed := problem(reply.status_code):
            await reply.aclose()
            raise failed
        return reply

    async def _whole(self, reply: httpx.Response) -> bytes:
        try:
            return await reply.aread()
        except httpx.HTTPError as error:
            raise self._said(error) from error

    async def _events(
        self, reply: httpx.Response, stack: AsyncExitStack
    ) -> AsyncGenerator[bytes, None]:
        async with stack:
            yield b""
            try:
                async for chunk in reply.aiter_raw():
                    yield chunk
            except httpx.HTTPError as error:  # too late for a status
                said = {"error": {"message": str(self._said(error)), "type": "server_error"}}
                yield f"data: {json.dumps(said)}\n\n".encode()

    def _said(self, error: Exception) -> PeerTimeout | PeerUnreachable:
        if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout | TimeoutError):
            return PeerTimeout(f"the language model server did nothing for {self._timeout_s:g} s")
        return PeerUnreachable("the language model server cannot be reached, or broke off")


def problem(status: int) -> EncoderError | None:
    """What a status of the other server is to the caller, unless its answer is passed on."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return Overloaded("the language model server is overloaded, or has no encoder; try again")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):  # it is our key, not the caller's
        return PeerUnreachable("the language model server refuses this service")
    if status == HTTPStatus.OK or 400 <= status < 500:
        return None
    return PeerUnreachable(f"the language model server failed with status {status}")
