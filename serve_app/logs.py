"""Our own loggers, in processes that Ray starts."""

import logging


def speak_up(name: str, level: int) -> None:
    """Log a package to stderr, which Ray forwards to whoever ran `serve run`."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
