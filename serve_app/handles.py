"""Ray's handles behind the tiers' protocols. Errors come out as the far side raised them."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from encoders.errors import EncoderError, Overloaded
from encoders.packing import PackedBatch
from serve_app.service import Embedding, EncoderSlot, ImageItem, Rows


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise what the far side raised; a replica that is away is an `Overloaded`.

    The text of a `RayTaskError` is the remote traceback, which must not reach a client.
    """
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, EncoderError):
            raise error.cause from None
        raise
    except (RayActorError, BackPressureError, RayServeException) as error:
        raise Overloaded("a replica went away or is busy; try again") from error


@dataclass(frozen=True)
class BatcherHandle:
    """An `ImageService` that lives in another deployment."""

    handle: DeploymentHandle[Any]

    async def submit(self, images: Sequence[ImageItem]) -> list[Embedding]:
        """One embedding per image, in order."""
        with unwrapped():
            response = self.handle.submit.remote(images)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()  # type: ignore[no-untyped-call]  # else the far side would finish for a caller that left
                raise


@dataclass(frozen=True)
class EncoderHandle:
    """The slots of every replica of an Encoder deployment: `max_ongoing_requests` of each."""

    handle: DeploymentHandle[Any]

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[EncoderSlot]:
        """Wait until some replica has a free slot, and hold it.

        A plain call would freeze its batch in the router while every encoder is busy.
        """
        with unwrapped():
            encode = self.handle.options(method_name="encode")
            async with encode.choose_replica() as selection:
                yield _Slot(encode, selection)


@dataclass(frozen=True)
class _Slot:
    handle: DeploymentHandle[Any]
    selection: Any  # its type is private to Ray

    async def encode(self, batch: PackedBatch) -> Rows:
        return await self.handle.dispatch(self.selection, batch)
