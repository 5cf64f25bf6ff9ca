"""What is remembered of the encoders that answered."""

import time
from collections import OrderedDict

from encoders.graph_stats import GraphStats
from serve_app.service import Encoded, EncoderGraphs

FORGET_AFTER_S = 600.0
MAX_ENCODERS = 1024


class HeardOf:
    """How each encoder stood when it last answered; the silent and the dead are forgotten."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[float, GraphStats]] = OrderedDict()

    def heard(self, encoded: Encoded) -> None:
        """Remember what came with a batch."""
        self._last.pop(encoded.encoder, None)
        self._last[encoded.encoder] = time.monotonic(), encoded.graphs
        if len(self._last) > MAX_ENCODERS:
            self._last.popitem(last=False)

    def graphs(self) -> EncoderGraphs:
        """By encoder."""
        oldest = time.monotonic() - FORGET_AFTER_S
        return {name: stats for name, (heard, stats) in self._last.items() if heard > oldest}
