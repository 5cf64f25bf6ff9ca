"""As much of AMD's `amdsmi` as Ray 2.60 calls to find GPUs: a node with two MI355X."""

from enum import Enum


class AmdSmiInitFlags(Enum):
    """Which devices to look for."""

    INIT_AMD_GPUS = 2


class AmdSmiMemoryType(Enum):
    """Kinds of memory that can be asked about."""

    VRAM = 0


class AmdSmiLibraryException(Exception):
    """What the real one raises for a device that does not answer."""


def amdsmi_init(flags: AmdSmiInitFlags) -> None:
    """Open the library."""
    assert flags is AmdSmiInitFlags.INIT_AMD_GPUS


def amdsmi_shut_down() -> None:
    """Close it."""


def amdsmi_get_processor_handles() -> list[str]:
    """One handle for each GPU."""
    return ["first", "second"]


def amdsmi_get_gpu_id(handle: str) -> int:
    """The PCI device id: that of an MI355X."""
    return {"first": 0x75A3, "second": 0x75A3}[handle]
