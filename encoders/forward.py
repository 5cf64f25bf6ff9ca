"""A tower's forward, eager: what a layout needs is made on the host, and rows come back to it.

Shapes: P = patches, C = values of a patch, R = rows of a result, D = their width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from encoders.attention import AttentionLayout, Backend
from encoders.packing import Call, PackedLayout
from encoders.towers import Tower
from encoders.transfer import Moment, download, upload


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


class WayBack:
    """A stream of its own for rows on their way to the host: the next batch need not wait for them.

    It is never captured, so what it filled may be dropped at any time: see `download`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> Moment:
        """Before a batch's first work on the current stream."""
        return Moment(self._device)

    @contextmanager
    def behind(self) -> Iterator[None]:
        """The block's device work follows what the current stream has to do, and nothing later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


class Results:
    """A batch's rows on their way to the host. Any thread may wait for them."""

    def __init__(
        self,
        packed: Tensor,
        row_counts: Sequence[int] | None,
        order: Sequence[int],
        begin: Moment,
        way: WayBack,
    ) -> None:
        self._row_counts = row_counts
        self._order = order
        self._begin = begin
        self._packed: Tensor | None = packed  # nobody else may have its memory before it is read
        with way.behind():
            self._host = download(packed)
            self._end = Moment(packed.device)

    def wait(self) -> list[Tensor]:
        """One host tensor per image, in order of arrival, in memory that belongs to the caller."""
        self._end.wait()
        self._packed = None
        counts = self._row_counts
        results = list(self._host if counts is None else torch.split(self._host, list(counts)))
        arrived = sorted(zip(self._order, results, strict=True), key=lambda pair: pair[0])
        return [result for _, result in arrived]

    @property
    def milliseconds(self) -> float:
        """From the first that the device did of the batch to its last. After `wait`."""
        return self._end.milliseconds_since(self._begin)
