"""How the drivers of accelerators pin pages of the host in place."""

import contextlib
import os
import platform
from typing import Callable, Dict, List, Optional, Tuple

import torch

from plimsoll.client import Arena
from plimsoll.errors import PlimsollError


class CudaDriver:
    """The driver of CUDA, and of ROCm, which PyTorch gives the same names."""

    name, call = "the CUDA driver", "cudaHostRegister"

    def __init__(self, device: torch.device):
        self._device = device

    def register(self, address: int, size: int) -> int:
        """Pins memory. Returns an error, or 0."""
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> int:
        return int(torch.cuda.cudart().cudaHostUnregister(address))

    def describe(self, error: int) -> str:
        cudart = torch.cuda.cudart()
        return cudart.cudaGetErrorString(cudart.cudaError(error))

    def take_last_error(self) -> None:
        """Clears CUDA's last error: otherwise the next kernel's check would take it for that kernel's."""
        with contextlib.suppress(RuntimeError):  # that is this kernel's check
            torch.empty(1, device=self._device).fill_(0)


#: For each type of device how pages are pinned. For others they are not: their copies are right, and may be slower.
DRIVERS: Dict[str, Callable[[torch.device], CudaDriver]] = {"cuda": CudaDriver}


class PinnedArenas:
    """The arenas that an optimizer has pinned: exactly their pages, not a copy rounded up to a power of two as in
    PyTorch's pinned memory.
    """

    def __init__(self, driver: Optional[CudaDriver]):
        self._driver = driver
        self._arenas: List[Tuple[int, Arena]] = []

    def add(self, arena: Arena) -> None:
        if self._driver is None:
            return
        address = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
        error = self._driver.register(address, len(arena.memory))
        if error != 0:
            text = self._driver.describe(error)
            self._driver.take_last_error()
            pinned = sum(len(a.memory) for _, a in self._arenas)
            raise PlimsollError(
                f"{self._driver.name} cannot pin arena {arena.name} of {len(arena.memory)} bytes: {text} ({self._driver.call}, error {error}). "
                f"This optimizer has pinned {pinned} bytes before, and {_total_memory()}; {_where_to_look()}"
            )
        self._arenas.append((address, arena))

    def release(self) -> None:
        failed = [self._driver.unregister(address) for address, _ in self._arenas]
        self._arenas.clear()
        if any(failed):
            self._driver.take_last_error()


def _total_memory() -> str:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"this host has {total} bytes of memory"


def _where_to_look() -> str:
    if "microsoft" in platform.release().lower():
        return (
            "under WSL2, Windows lets programs pin only a part of memory, about 1 GiB in some versions: use Linux itself, "
            "or a model whose gradients and parameters fit"
        )
    return (
        "the driver pins free memory of the host and the container (docker run --memory, the memory limit of a pod); "
        "ulimit -l does not limit it. See the kernel's log for NVRM messages, and give the container more memory or the "
        "optimizer a smaller part of the model (sharding)"
    )
