"""The hottest graphs of an encoder in a file, so that the next one has them before it is ready."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, PositiveInt, ValidationError

from encoders.config import EncoderConfig, Settings
from encoders.packing import Call, Output, PackedLayout

logger = logging.getLogger(__name__)

REORDER_EVERY_S = 60.0
"""The file of the same graphs in another order is not written more often."""


class HotCall(Settings):
    """A batch whose graph was in use."""

    grid_thw: tuple[tuple[PositiveInt, PositiveInt, PositiveInt], ...] = Field(min_length=1)
    output: Output


class HotCalls(Settings):
    """What the file holds, hottest first."""

    encoder: str
    patch_size: int
    merge_size: int
    calls: tuple[HotCall, ...]


class GraphProfile:
    """A file of hot calls of one encoder; without a path nothing is read or written."""

    def __init__(self, path: Path | None, config: EncoderConfig, num_prefix: int) -> None:
        self._path = path
        self._config = config
        self._num_prefix = num_prefix
        self._written: tuple[HotCall, ...] = ()
        self._written_at = 0.0

    def read(self) -> list[Call]:
        """The calls, hottest first. A file that is missing, spoilt or another encoder's is no
        reason not to start.
        """
        if self._path is None or not self._path.exists():
            return []
        try:
            hot = HotCalls.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError) as error:
            logger.warning("the graph profile %s is left aside: %s", self._path, error)
            return []
        if hot != self._of(hot.calls):
            logger.warning("the graph profile %s is of %s, not used", self._path, hot.encoder)
            return []
        calls = [x for x in hot.calls if self._is_whole(x)]
        return [Call(PackedLayout.of(x.grid_thw, self._num_prefix), x.output) for x in calls]

    def write(self, calls: Sequence[Call]) -> None:
        """Replace the file by these, hottest first, if they are others than were written last."""
        if self._path is None:
            return
        hot = tuple(HotCall(grid_thw=call.layout.grid_thw, output=call.output) for call in calls)
        reordered = hot != self._written and time.monotonic() > self._written_at + REORDER_EVERY_S
        if not hot or not (reordered or {*hot} != {*self._written}):
            return
        try:
            # Whole or not at all: several replicas may share the file.
            draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.{id(self)}")
            draft.write_text(self._of(hot).model_dump_json(), encoding="utf-8")
            draft.replace(self._path)
        except (OSError, ValueError) as error:
            logger.warning("the graph profile %s was not written: %s", self._path, error)
        self._written, self._written_at = hot, time.monotonic()

    def _of(self, calls: tuple[HotCall, ...]) -> HotCalls:
        config = self._config
        sizes = {"patch_size": config.patch_size, "merge_size": config.merge_size}
        return HotCalls(encoder=config.name, calls=calls, **sizes)

    def _is_whole(self, hot: HotCall) -> bool:
        """Whether all its images are whole blocks of merged patches."""
        merge = self._config.merge_size
        return all(rows % merge == columns % merge == 0 for _, rows, columns in hot.grid_thw)
