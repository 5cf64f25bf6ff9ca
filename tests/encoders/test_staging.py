"""A staging buffer for which there is no memory. The rest of it needs a GPU: tests/gpu."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from encoders.staging import STEP, Slot


class Event:
    """One that has come."""

    def synchronize(self) -> None: ...


class Stream:
    device = torch.device("cpu")


def test_a_slot_that_found_no_memory_gets_it_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, full = torch.empty, [True]

    def allocate(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if "device" in options and full.pop():
            raise torch.OutOfMemoryError
        return empty(*size, **options)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "empty", allocate)
    slot = Slot()

    with pytest.raises(torch.OutOfMemoryError):
        slot.reserve(10, Stream())
    assert len(slot.host) == len(slot.device) == 0
    full.append(False)
    slot.reserve(10, Stream())

    assert len(slot.host) == len(slot.device) == STEP
