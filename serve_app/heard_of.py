"""What is remembered of the encoders that answered."""

import time
from collections import OrderedDict
from dataclasses import replace

from encoders.graph_stats import Digest
from serve_app.service import Encoded, EncoderGraphs

FORGET_AFTER_S = 600.0
MAX_ENCODERS = 1024


class HeardOf:
    """How each encoder stood when it last answered; the silent and the dead are forgotten."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[float, Encoded]] = OrderedDict()

    def heard(self, replica: str, encoded: Encoded) -> None:
        """Remember what came with a batch from a replica, its rows apart."""
        self._last.pop(replica, None)
        self._last[replica] = time.monotonic(), replace(encoded, rows=())
        if len(self._last) > MAX_ENCODERS:
            self._last.popitem(last=False)

    def graphs(self) -> EncoderGraphs:
        """By encoder."""
        oldest = time.monotonic() - FORGET_AFTER_S
        recent = (encoded for heard, encoded in self._last.values() if heard > oldest)
        return {encoded.encoder: encoded.graphs for encoded in recent}

    def digest(self, replica: str) -> Digest | None:
        """What a replica could replay; None if that is not known."""
        if replica not in self._last:
            return None
        heard, encoded = self._last[replica]
        return encoded.digest if heard > time.monotonic() - FORGET_AFTER_S else None
