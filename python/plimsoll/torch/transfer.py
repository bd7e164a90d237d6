"""Copies between the shared arenas and the device of the parameters.

All operations take flat tensors of one type and length. A :class:`CudaTransfer` runs operations later, in order.
``begin`` and ``join`` order them with the operations of PyTorch's current stream.
"""

import contextlib
import os
import platform
from typing import Any, List, Tuple

import torch

from plimsoll.client import Arena
from plimsoll.errors import PlimsollError


class HostTransfer:
    """Parameters are in host memory: every copy is done when the call returns."""

    #: Whether the model's parameters and gradients may lie in the arenas themselves.
    shares = True

    def register(self, arena: Arena) -> None:
        """Prepares an arena for copies."""

    def is_capturing(self) -> bool:
        """Whether operations are being recorded for a graph, and not run. Then nothing may be copied or queried."""
        return False

    def keep(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of a tensor that was sent to other ranks until the current stream, which waits for the
        send, gets here.
        """

    def store(self, arena: torch.Tensor, gradient: torch.Tensor) -> Any:
        """Copies a gradient into the arena. Returns a token for :meth:`is_done`."""
        arena.copy_(gradient)

    def add(self, arena: torch.Tensor, gradient: torch.Tensor) -> Any:
        """Adds a gradient to the one in the arena."""
        arena.add_(gradient)

    def is_done(self, token: Any) -> bool:
        return True

    def finish(self, token: Any) -> None:
        """Waits until the copy is done."""

    def settle(self) -> None:
        """Waits until nothing reads from arenas or writes to them any more."""

    def begin(self) -> None:
        """Orders later copies after earlier computation."""

    def fetch(self, parameter: torch.Tensor, arena: torch.Tensor) -> None:
        """Copies from the arena into a parameter."""
        parameter.copy_(arena)

    def join(self) -> None:
        """Orders later computation after all copies."""

    def release(self) -> None:
        """Undoes register, for all arenas."""


class CudaTransfer(HostTransfer):
    """Parameters are on a CUDA device. Copies run on their own streams, one for each direction, to and from pinned
    memory.
    """

    shares = False

    def __init__(self, device: torch.device):
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._registered: List[Tuple[int, Arena]] = []

    def register(self, arena: Arena) -> None:
        # Pages of an arena are pinned in place: exactly these pages, not a copy rounded up to a power of two as in
        # PyTorch's pinned memory.
        address = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(self._device):
            error = torch.cuda.cudart().cudaHostRegister(address, len(arena.memory), 0)
        if int(error) != 0:
            text = torch.cuda.cudart().cudaGetErrorString(error)
            _take_last_error(self._device)
            pinned = sum(len(a.memory) for _, a in self._registered)
            raise PlimsollError(
                f"the CUDA driver cannot pin arena {arena.name} of {len(arena.memory)} bytes: {text} (cudaHostRegister, error {int(error)}). "
                f"This optimizer has pinned {pinned} bytes before, and {_total_memory()}; {_where_to_look()}"
            )
        self._registered.append((address, arena))

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def _after_current(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))

    def store(self, arena: torch.Tensor, gradient: torch.Tensor) -> torch.cuda.Event:
        self._after_current(self._to_host)
        with torch.cuda.stream(self._to_host):
            arena.copy_(gradient, non_blocking=True)
            return self._mark(gradient)

    def add(self, arena: torch.Tensor, gradient: torch.Tensor) -> torch.cuda.Event:
        # Add on the device: the host's cores belong to the optimizer. Both directions use the stream of the copies
        # that are added to.
        self._after_current(self._to_host)
        with torch.cuda.stream(self._to_host):
            total = arena.to(self._device, non_blocking=True).add_(gradient)
            arena.copy_(total, non_blocking=True)
            return self._mark(gradient)

    def _mark(self, gradient: torch.Tensor) -> torch.cuda.Event:
        # The allocator must not reuse the gradient's memory before it is read.
        gradient.record_stream(self._to_host)
        event = torch.cuda.Event()
        event.record(self._to_host)
        return event

    def is_done(self, token: torch.cuda.Event) -> bool:
        return token.query()

    def finish(self, token: torch.cuda.Event) -> None:
        token.synchronize()

    def settle(self) -> None:
        self._to_host.synchronize()
        self._to_device.synchronize()

    def begin(self) -> None:
        self._after_current(self._to_device)

    def fetch(self, parameter: torch.Tensor, arena: torch.Tensor) -> None:
        with torch.cuda.stream(self._to_device):
            parameter.copy_(arena, non_blocking=True)
            parameter.record_stream(self._to_device)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)

    def release(self) -> None:
        # After a kernel has failed, as by an assertion, every call fails, and nothing is under way. That failure is
        # being raised; what it leads to here is not.
        with contextlib.suppress(RuntimeError):
            self.settle()
        failed = [int(torch.cuda.cudart().cudaHostUnregister(address)) for address, _ in self._registered]
        self._registered.clear()
        if any(failed):
            _take_last_error(self._device)


def _take_last_error(device: torch.device) -> None:
    """Clears CUDA's last error: otherwise the next kernel's check would take it for that kernel's."""
    with contextlib.suppress(RuntimeError):  # that is this kernel's check
        torch.empty(1, device=device).fill_(0)


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


def transfer_for(device: torch.device) -> HostTransfer:
    if device.type == "cpu":
        return HostTransfer()
    if device.type == "cuda":
        return CudaTransfer(device)
    raise ValueError(f"parameters are on {device}: expected cpu or cuda")
