"""What a request brings -> compressed images: JSON, one image, or a multipart form."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from fastapi import Request
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from encoders import errors
from encoders.config import EncoderConfig
from serve_app import decoding, refusals, schemas
from serve_app.service import ImageItem
from serve_app.sources import image_bytes

TIMEOUT_HEADER = "x-request-timeout-seconds"
CHUNK_BYTES = 64 * 1024
TAIL_BYTES = 1024
"""Where the closing boundary of a multipart body is looked for."""


def timeout(request: Request) -> float:
    """Seconds that the client grants, or infinity. Ray's own header, which its proxy reads too."""
    text = request.headers.get(TIMEOUT_HEADER, "inf")
    try:
        seconds = float(text)
    except ValueError as error:
        raise errors.InvalidRequest(f"{TIMEOUT_HEADER} is {text[:40]!r}, not a number") from error
    if not seconds > 0:  # NaN too; to Ray's proxy zero means for ever
        raise errors.InvalidRequest(f"{TIMEOUT_HEADER} is {text[:40]}, it has to be above 0")
    return seconds


def check_count(num_images: int, max_images: int) -> None:
    """Raise unless a request has at least one image, and not too many."""
    if num_images == 0:
        raise errors.InvalidRequest("the request has 0 images, at least 1 is needed")
    if num_images > max_images:
        raise errors.RequestTooLarge(
            f"the request has {num_images} images, the limit is {max_images}"
        )


async def check_patches(
    items: Sequence[ImageItem], config: EncoderConfig, max_patches: int, what: str
) -> None:
    """Raise if the images become too many patches. Their headers are read in a thread."""
    patches = await asyncio.to_thread(decoding.count_patches, items, config)
    if patches > max_patches:
        raise errors.RequestTooLarge(
            f"the images become {patches} patches, the limit of {what} is {max_patches}"
        )


def parse(body: bytes, max_images: int) -> tuple[schemas.EmbeddingsRequest, list[ImageItem]]:
    """OpenAI's request, and its images. Raises a `RequestError` that names the item."""
    try:
        wanted = schemas.EmbeddingsRequest.model_validate_json(body)
    except ValidationError as error:
        raise errors.InvalidRequest(refusals.describe(error.errors())) from error
    single = not isinstance(wanted.input, list)
    values = [wanted.input] if single else list(wanted.input)
    check_count(len(values), max_images)
    items = []
    for index, value in enumerate(values):
        name = "input" if single else f"input[{index}]"
        try:
            items.append(ImageItem(name, image_bytes(value, modality=wanted.modality)))
        except errors.EncoderError as error:
            raise error.named(name) from error
    return wanted, items


async def uploads(request: Request, max_images: int) -> list[ImageItem]:
    """The files of a multipart body, or the body itself as one image. Raises a `RequestError`."""
    kind = request.headers.get("content-type", "").lower()
    if not kind.startswith("multipart/form-data"):
        return [ImageItem("image", await request.body())]
    _, parameters = parse_options_header(request.headers["content-type"])
    end = b"--" + parameters.get(b"boundary", b"") + b"--"
    # Parsed as it arrives: 60 MB at once held the loop up for 0.1 s, and lay in memory twice.
    # Of too many files, the first that is one too many ends it: each costs a file and an object.
    parser = MultiPartParser(request.headers, _chunks(request, end), max_files=max_images + 1)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            message = (
                f"the request has more than {max_images + 1} images, the limit is {max_images}"
            )
            raise errors.RequestTooLarge(message) from error
        raise errors.InvalidRequest(error.message) from error
    except UnicodeError as error:
        raise errors.InvalidRequest("the form's charset cannot be decoded") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        check_count(len(files), max_images)
        return [ImageItem(f"file[{i}]", await file.read()) for i, file in enumerate(files)]
    finally:
        await form.close()


async def _chunks(request: Request, end: bytes) -> AsyncGenerator[bytes, None]:
    """The body in pieces that are soon parsed. It has to close with the boundary `end`.

    The parser itself would drop a last file that is cut off, silently; told of it from here, it
    also closes what it has opened.
    """
    tail = bytearray()
    async for message in request.stream():  # a server may hand over the whole body in one
        for start in range(0, max(len(message), 1), CHUNK_BYTES):
            chunk = message[start : start + CHUNK_BYTES]
            tail += chunk[-TAIL_BYTES:]
            del tail[:-TAIL_BYTES]
            yield chunk
            await asyncio.sleep(0)  # others' turn
    if end not in tail:
        raise MultiPartException("the multipart body ends before its closing boundary")
