"""The hottest graphs of an encoder in a file, so that the next one has them before it is ready."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from encoders.config import Settings
from encoders.packing import Call, GridTHW, Output, PackedLayout

logger = logging.getLogger(__name__)


class HotCall(Settings):
    """A batch whose graph was in use."""

    grid_thw: tuple[GridTHW, ...]
    output: Output


HOT_CALLS = TypeAdapter(list[HotCall])


class GraphProfile:
    """A file of hot calls; without a path nothing is read or written."""

    def __init__(self, path: Path | None, num_prefix: int) -> None:
        self._path = path
        self._num_prefix = num_prefix
        self._written: list[HotCall] | None = None

    def read(self) -> list[Call]:
        """The calls, hottest first. A file that is missing or spoilt is no reason not to start."""
        if self._path is None or not self._path.exists():
            return []
        try:
            hot = HOT_CALLS.validate_json(self._path.read_bytes())
        except (OSError, ValidationError) as error:
            logger.warning("the graph profile %s is left aside: %s", self._path, error)
            return []
        return [Call(PackedLayout.of(x.grid_thw, self._num_prefix), x.output) for x in hot]

    def write(self, calls: Sequence[Call]) -> None:
        """Replace the file by these, hottest first, if there are others than were written last."""
        if self._path is None:
            return
        hot = [HotCall(grid_thw=call.layout.grid_thw, output=call.output) for call in calls]
        if not hot or (self._written is not None and {*hot} == {*self._written}):
            return
        text = json.dumps([call.model_dump() for call in hot])
        try:
            # Whole or not at all: replicas of one machine may share the file.
            draft = self._path.with_suffix(f".{id(self)}.tmp")
            draft.write_text(text, encoding="utf-8")
            draft.replace(self._path)
        except OSError as error:
            logger.warning("the graph profile %s was not written: %s", self._path, error)
        self._written = hot
