"""Host tensors to the device, without a wait for it."""

import torch
from torch import Tensor

from encoders.attention_kernels import is_rocm


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; on a GPU the copy is under way when this returns."""
    # From pageable memory the copy would wait for the device.
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def refill(view: Tensor, tensor: Tensor) -> None:
    """Overwrite what a captured graph is about to read with a tensor from anywhere, bit by bit."""
    if is_rocm():
        # A kernel has to write it: after a plain copy, replayed kernels may find the old values in
        # the scalar cache (ROCm/hip#3902). A product with 1 keeps every bit, -0 and NaN too.
        torch.mul(upload(tensor, view.device), 1, out=view)
    elif tensor.device == view.device:
        view.copy_(tensor)
    else:
        view.copy_(tensor.pin_memory(), non_blocking=True)
