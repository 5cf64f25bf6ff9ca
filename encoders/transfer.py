"""Host tensors to the device, without a wait for it."""

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
