"""Our own loggers, in processes that Ray starts."""

import logging
from functools import cache

LEASE_WARNING = "Failed to route request after"
"""How Ray's router begins a warning at every 50th attempt."""


def speak_up(name: str, level: int) -> None:
    """Log a package to stderr, which Ray forwards to whoever ran `serve run`."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())


@cache
def hush_router() -> None:
    """Drop, in this process, the router's warnings that a request still waits for a replica.

    For those who wait for slots, which is what they do while encoders are busy; they ask so often
    that it would be a line a second. `encoder_lease_wait_ms` tells how long they wait.
    """
    logging.getLogger("ray.serve").addFilter(
        lambda record: not str(record.msg).startswith(LEASE_WARNING)
    )
