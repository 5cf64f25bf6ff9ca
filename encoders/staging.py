"""Pixels to the device, beside what it computes."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

DEPTH = 2
"""Batches that one engine has under way at most: a third would wait for the first one's copy."""
STEP = 1 << 20
"""Bytes that buffers grow by."""


class Slot:
    """A pinned buffer, its twin on the device, and until when each is in use."""

    def __init__(self) -> None:
        self.host = torch.empty(0, dtype=torch.uint8)
        self.device = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def reserve(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Room for so many bytes that nothing uses any more. Waits until that is so."""
        self.copied.synchronize()
        if num_bytes <= len(self.device):
            return
        # Freed memory may go to whom no stream makes wait for its last reader.
        self.read.synchronize()
        size = -(-num_bytes // STEP) * STEP
        self.host = self.device = torch.empty(0, dtype=torch.uint8)  # never both sizes at a time
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        # Memory of the stream that writes it first. Another's may be freed while kernels that use
        # it have yet to run: there it is safe by the stream's own order, and nowhere else.
        with torch.cuda.stream(stream):
            self.device = torch.empty(size, dtype=torch.uint8, device=stream.device)
        self.host = host


class Staging:
    """Uploads by a copy engine of its own while the device computes; bounded by the largest one.

    Not thread-safe: the engine thread calls it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = deque[Slot]()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._slots.extend(Slot() for _ in range(DEPTH))

    @contextmanager
    def on_device(self, values: npt.NDArray[np.uint8]) -> Iterator[Tensor]:
        """The bytes on the device, for what the block launches on the current stream."""
        if not self._slots:
            yield torch.from_numpy(values.copy())  # Ray's own are read-only, which torch is not
            return
        slot = self._slots[0]
        self._slots.rotate(-1)
        slot.reserve(values.size, self._stream)
        host, device = slot.host[: values.size], slot.device[: values.size]
        # The one copy of pixels in this process: Ray hands over pageable memory, from which the
        # device's copy would make the engine thread wait.
        np.copyto(host.numpy(), values)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.read)
            device.copy_(host, non_blocking=True)
            slot.copied.record()
        reader = torch.cuda.current_stream(self._device)
        reader.wait_event(slot.copied)
        try:
            yield device
        finally:
            slot.read.record(reader)
