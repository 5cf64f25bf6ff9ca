"""Whether code waits for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_sync() -> Iterator[None]:
    """Every operation that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
