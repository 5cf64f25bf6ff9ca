"""A tower's forward, eager: what a layout needs is made on the host and uploaded.

Shapes: P = patches, C = values of a patch, R = rows of a result, D = their width.
"""

import torch
from torch import Tensor

from encoders.attention import AttentionLayout, Backend
from encoders.packing import Call, PackedLayout
from encoders.towers import Tower
from encoders.transfer import upload


class Forward:
    """A tower on its device, with the attention backend that it was built for."""

    def __init__(
        self, tower: Tower, backend: Backend, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.tower = tower
        self.backend = backend
        self.device = device
        self.dtype = dtype

    def eager(self, patches_PC: Tensor, call: Call) -> Tensor:
        """The tower's rows [R, D] on the device. Waits for nothing."""
        host = self.tower.inputs(call.layout)
        inputs = host._make(upload(values, self.device) for values in host)
        return self.tower(patches_PC, inputs, self.attention(call.layout), call.output)

    def attention(self, layout: PackedLayout) -> AttentionLayout:
        """The list form, with the boundaries where the backend reads them."""
        cu_seqlens = torch.tensor(layout.cu_seqlens, dtype=torch.int32)
        if self.backend.boundaries == "device":
            cu_seqlens = upload(cu_seqlens, self.device)
        return [cu_seqlens, layout.max_seqlen]
