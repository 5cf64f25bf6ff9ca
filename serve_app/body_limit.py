"""A request body's bytes, counted while they arrive."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from encoders.errors import RequestTooLarge
from serve_app.refusals import refusal


class BodyLimit:
    """ASGI middleware: 413 as soon as a body is declared or grows over the limit."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose body is refused while it is read."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"")[
            :18
        ]  # past that int() gives up, and so do we
        if declared.isdigit() and int(declared) > self._max_bytes:
            return await refusal(self._too_large(int(declared)))(scope, receive, send)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:  # chunked: no length was declared
                raise self._too_large(num_bytes)
            return message

        return await self._app(scope, counted, send)

    def _too_large(self, num_bytes: int) -> RequestTooLarge:
        return RequestTooLarge(
            f"the body has {num_bytes} bytes or more, the limit is {self._max_bytes}"
        )
