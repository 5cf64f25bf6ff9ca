"""ASGI middleware around the API: what a request leaves behind, and how large it may be."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from encoders.errors import Overloaded, RequestTooLarge
from serve_app import metrics
from serve_app.refusals import refusal

logger = logging.getLogger(__name__)

WHILE_DRAINING = ("/health", "/scheduler_receive_url")
"""Paths that are served to the end: requests under way wait for those who register."""


class Traffic:
    """The requests of one Ingress replica: how many run, and whether new ones are let in."""

    def __init__(self) -> None:
        self.draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it runs."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Let no request in any more, wait for those that run. How many are left running."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._running


class Watch:
    """ASGI middleware, outermost: counts, times and logs each request, whatever comes of it."""

    def __init__(self, app: ASGIApp, traffic: Traffic, *, access_log: bool) -> None:
        self._app = app
        self._traffic = traffic
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._traffic.request():
            try:
                await self._answer(scope)(scope, receive, noted)
            except Exception:  # a fault of ours, of which the server around us makes a 500
                status = status or 500
                raise
            finally:
                self._note(scope, status, start)

    def _answer(self, scope: Scope) -> ASGIApp:
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # the app's route prefix
        if self._traffic.draining and path not in WHILE_DRAINING:
            return refusal(Overloaded("this replica is shutting down; another may answer"))
        return self._app

    def _note(self, scope: Scope, status: int, start: float) -> None:
        metrics.counter("encoder_requests_total").inc(tags={"status": str(status)})
        metrics.observe_since("encoder_request_ms", start)
        if self._access_log:
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "client": (scope.get("client") or [None])[0],
                "method": scope["method"],
                "path": scope["path"],
                "status": status,  # 0: the client left before there was one
                "ms": round((time.perf_counter() - start) * 1e3, 1),
            }
            logger.info(json.dumps(line))


class BodyLimit:
    """ASGI middleware: 413 as soon as a body is declared or grows over the limit."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose body is refused while it is read."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # So many digits are enough to tell; of thousands int() makes an error.
        declared = dict(scope["headers"]).get(b"content-length", b"")[:18]
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
