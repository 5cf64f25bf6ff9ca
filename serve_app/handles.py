"""Ray's handles behind the tiers' protocols. Errors come out as the far side raised them."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from encoders.errors import EncoderError, Overloaded, ReplicaLost
from encoders.packing import PackedBatch
from serve_app.heard_of import HeardOf
from serve_app.logs import hush_router
from serve_app.service import (
    POOLED,
    Digest,
    Dtype,
    Embedding,
    Encoded,
    EncoderGraphs,
    EncoderSlot,
    ImageItem,
    Output,
    Rows,
    Stats,
    Wanted,
    deadline,
)

MAX_RETRIES = 2
"""Times that a request is submitted again after its Batcher went away."""


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise what the far side raised, `ReplicaLost` if it went away, `Overloaded` if it is full.

    The text of a `RayTaskError` is the remote traceback, which must not reach a client.
    """
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, EncoderError):
            raise error.cause from None
        raise
    except (RayActorError, ObjectLostError, ReplicaUnavailableError) as error:
        raise ReplicaLost("a replica went away; try again") from error
    except (BackPressureError, RayServeException) as error:
        raise Overloaded("no replica takes the request; try again") from error


@dataclass(frozen=True)
class BatcherHandle:
    """An `ImageService` that lives in another deployment."""

    handle: DeploymentHandle[Any]

    async def submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted = POOLED
    ) -> list[Embedding]:
        """One embedding per image, in order. A Batcher that dies is replaced by another."""
        async with deadline(timeout_s, len(images)):
            for _ in range(MAX_RETRIES):
                try:
                    return await self._submit(images, timeout_s, wanted)
                except ReplicaLost:
                    continue
            return await self._submit(images, timeout_s, wanted)

    async def _submit(
        self, images: Sequence[ImageItem], timeout_s: float, wanted: Wanted
    ) -> list[Embedding]:
        with unwrapped():
            response = self.handle.answer.remote(images, timeout_s, wanted)
            try:
                answer: list[Embedding] | EncoderError = await response
            except asyncio.CancelledError:
                # Else the far side would finish for a caller that left.
                response.cancel()  # type: ignore[no-untyped-call]
                raise
        if isinstance(answer, EncoderError):
            raise answer
        return answer

    async def encoders(self) -> EncoderGraphs:
        """What one of the Batchers has last heard of each encoder."""
        with unwrapped():
            return await self.handle.encoders.remote()

    async def check_health(self) -> None:
        """Nothing of it runs in this process."""

    def record_autoscaling_stats(self) -> Stats:
        """Nothing of it runs in this process."""
        return {}


@dataclass(frozen=True)
class EncoderHandle:
    """The slots of every replica of an Encoder deployment: `max_ongoing_requests` of each."""

    handle: DeploymentHandle[Any]
    heard_of: HeardOf = field(default_factory=HeardOf)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[EncoderSlot]:
        """Wait until some replica has a free slot, and hold it.

        A plain call would freeze its batch in the router while every encoder is busy.
        """
        hush_router()  # here: what is pickled to a replica leaves nothing behind that could
        with unwrapped():
            encode = self.handle.options(method_name="encode")
            async with encode.choose_replica() as selection:
                yield _Slot(encode, selection, self.heard_of)

    def encoders(self) -> EncoderGraphs:
        """What each encoder said of its graphs when it last answered here."""
        return self.heard_of.graphs()

    async def check_health(self) -> None:
        """Nothing of it runs in this process."""

    def record_autoscaling_stats(self) -> Stats:
        """Nothing of it runs in this process."""
        return {}


@dataclass(frozen=True)
class _Slot:
    handle: DeploymentHandle[Any]
    selection: Any  # its type is private to Ray
    heard_of: HeardOf

    @property
    def replica(self) -> str:
        return str(self.selection.replica_id)

    @property
    def digest(self) -> Digest | None:
        return self.heard_of.digest(self.replica)

    async def encode(
        self, batch: PackedBatch, output: Output, dtypes: Sequence[Dtype]
    ) -> Sequence[Rows] | Rows:
        encoded: Encoded = await self.handle.dispatch(self.selection, batch, output, dtypes)
        self.heard_of.heard(self.replica, encoded)
        return encoded.rows
