"""Host tensors to the device and back, without a wait for it."""

import time

import torch
from torch import Tensor

from encoders.attention_kernels import is_rocm

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a value -> the type that has as many."""


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; on a GPU the copy is under way when this returns."""
    # From pageable memory the copy would wait for the device.
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def refill(view: Tensor, tensor: Tensor) -> None:
    """Overwrite what a captured graph is about to read with a tensor from anywhere, bit by bit."""
    if is_rocm():
        # A kernel has to write it: after a plain copy, replayed kernels may find the old values in
        # the scalar cache (ROCm/hip#3902).
        write(view, tensor if tensor.device == view.device else upload(tensor, view.device))
    elif tensor.device == view.device:
        view.copy_(tensor)
    else:
        view.copy_(tensor.pin_memory(), non_blocking=True)


def write(view: Tensor, tensor: Tensor) -> None:
    """Overwrite a tensor with one of the same device by a kernel, bit by bit."""
    torch.bitwise_or(as_integers(tensor), 0, out=as_integers(view))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal as whole numbers. Waits for both."""
    return torch.equal(as_integers(a), as_integers(b))


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers, so that every bit counts: those of NaN and -0 too."""
    return tensor.view(INTEGERS[tensor.element_size()])


class Moment:
    """A point in what the current stream does, or of the clock where there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = time.perf_counter()
        if device.type == "cuda":
            # A waiting thread sleeps: else it would take a core from those that decode.
            event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            self._event = event

    def wait(self) -> None:
        """Until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def milliseconds_since(self, earlier: "Moment") -> float:
        """Between two that have come."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event)
        return (self._seconds - earlier._seconds) * 1e3


def download(tensor: Tensor) -> Tensor:
    """Its copy on the host, in memory of its own; from a GPU it is under way when this returns.

    Not for a stream that is ever captured. Whoever drops the copy makes torch record an event on
    the stream that filled it, from any thread and at any time: amid a capture, into the graph.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    # torch keeps pinned memory that is dropped, and gives it away again: none is allocated anew.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
