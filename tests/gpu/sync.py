"""Whether code waits for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_sync() -> Iterator[None]:
    """Every operation that waits for the device raises."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that this mode does not find everything
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
