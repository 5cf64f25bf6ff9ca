"""Errors -> HTTP: one table of statuses, one body."""

import logging
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from encoders import errors
from encoders.errors import EncoderError
from serve_app.metrics import counter

logger = logging.getLogger(__name__)

STATUS: dict[type[EncoderError], HTTPStatus] = {
    errors.InvalidRequest: HTTPStatus.BAD_REQUEST,
    errors.Unauthorized: HTTPStatus.UNAUTHORIZED,
    errors.UnknownModel: HTTPStatus.NOT_FOUND,
    errors.NotAcceptable: HTTPStatus.NOT_ACCEPTABLE,
    errors.DeadlineExceeded: HTTPStatus.REQUEST_TIMEOUT,
    errors.RequestTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.UnsupportedImageType: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    errors.InvalidImage: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.Overloaded: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.ReplicaLost: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.PeerUnreachable: HTTPStatus.BAD_GATEWAY,
    errors.PeerTimeout: HTTPStatus.GATEWAY_TIMEOUT,
}
HEADERS = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "1"},
}


def install(app: FastAPI) -> None:
    """Answer every exception of `app` from the table."""
    app.add_exception_handler(EncoderError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _routing)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(Exception, _failed)


class Verdict(NamedTuple):
    """What a client is told of an error."""

    status: HTTPStatus
    message: str
    code: str | None = None


def verdict(error: BaseException) -> Verdict:
    """Status and words for an error, which is counted; one that no client can mend is logged."""
    status = STATUS.get(type(error)) if isinstance(error, EncoderError) else None
    if status is None:
        logger.error("%s", error, exc_info=error)
        return Verdict(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
    code = snake_case(type(error).__name__)
    counter("encoder_refusals_total").inc(tags={"reason": code})
    return Verdict(status, str(error), code)


def refusal(error: EncoderError) -> JSONResponse:
    """The reply to an error of the tree; one that no client can mend is a plain 500."""
    status, message, code = verdict(error)
    return reply(status, message, code=code, param=error.item if code else None)


def reply(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> JSONResponse:
    """OpenAI's `error` object; `detail` for the clients that read that, `message` for SGLang."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    content = {"error": error, "detail": message, "message": message}
    return JSONResponse(content, status, headers=HEADERS.get(HTTPStatus(status)))


def snake_case(name: str) -> str:
    """`ImageTooLarge` -> `image_too_large`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def describe(problems: Iterable[Mapping[str, Any]]) -> str:
    """pydantic's findings in one line, without the input: that may be megabytes."""
    places = ((".".join(str(part) for part in p["loc"]), p["msg"]) for p in problems)
    return "; ".join(f"{place}: {message}" if place else message for place, message in places)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EncoderError)
    return refusal(error)


async def _malformed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return refusal(errors.InvalidRequest(describe(error.errors())))


async def _routing(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    response = reply(error.status_code, str(error.detail))
    response.headers.update(error.headers or {})  # `Allow` of a 405
    return response


async def _left(_: Request, error: Exception) -> JSONResponse:
    return reply(HTTPStatus.BAD_REQUEST, "the client left while it sent")  # nobody reads this


async def _failed(_: Request, error: Exception) -> JSONResponse:
    return reply(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
