"""Copies between the shared arenas and the device of the parameters.

All operations take flat tensors of one type and length. What is asked of a
:class:`CudaTransfer` happens later, in order; ``begin`` and ``join`` tie it to
the operations of PyTorch's current stream.
"""

from typing import Any, List, Tuple

import torch

from plimsoll.client import Arena


class HostTransfer:
    """Parameters are in host memory: every copy is done when the call returns."""

    #: Whether the model's parameters and gradients may lie in the arenas themselves.
    shares = True

    def register(self, arena: Arena) -> None:
        """Prepares an arena for copies."""

    def store(self, arena: torch.Tensor, gradient: torch.Tensor) -> Any:
        """Copies a gradient into the arena. What :meth:`is_done` takes."""
        arena.copy_(gradient)

    def add(self, arena: torch.Tensor, gradient: torch.Tensor) -> Any:
        """Adds a gradient to that in the arena."""
        arena.add_(gradient)

    def is_done(self, token: Any) -> bool:
        return True

    def finish(self, token: Any) -> None:
        """Waits until the copy is done."""

    def settle(self) -> None:
        """Waits until nothing reads from arenas or writes to them any more."""

    def begin(self) -> None:
        """Copies from here on come after what was computed so far."""

    def fetch(self, parameter: torch.Tensor, arena: torch.Tensor) -> None:
        """Copies from the arena into a parameter."""
        parameter.copy_(arena)

    def join(self) -> None:
        """What is computed from here on comes after all copies."""

    def release(self) -> None:
        """Undoes register, for all arenas."""


class CudaTransfer(HostTransfer):
    """Parameters are on a CUDA device: copies are on a stream of their own, to and from pinned memory."""

    shares = False

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._registered: List[Tuple[int, Arena]] = []

    def register(self, arena: Arena) -> None:
        # Pages of an arena are pinned as they are: exactly what is there, and
        # not a copy rounded up to a power of two as in PyTorch's pinned memory.
        address = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(self._device):
            error = torch.cuda.cudart().cudaHostRegister(address, len(arena.memory), 0)
        if int(error) != 0:
            raise RuntimeError(
                f"cudaHostRegister of arena {arena.name}, {len(arena.memory)} bytes: {error}; "
                "pinned memory may be limited (ulimit -l, or the limit of a container)"
            )
        self._registered.append((address, arena))

    def _after_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def store(self, arena: torch.Tensor, gradient: torch.Tensor) -> torch.cuda.Event:
        self._after_current()
        with torch.cuda.stream(self._stream):
            arena.copy_(gradient, non_blocking=True)
            return self._mark(gradient)

    def add(self, arena: torch.Tensor, gradient: torch.Tensor) -> torch.cuda.Event:
        # On the device: the host's cores are the optimizer's.
        self._after_current()
        with torch.cuda.stream(self._stream):
            total = arena.to(self._device, non_blocking=True).add_(gradient)
            arena.copy_(total, non_blocking=True)
            return self._mark(gradient)

    def _mark(self, gradient: torch.Tensor) -> torch.cuda.Event:
        # The allocator may not give the gradient's memory away before it is read.
        gradient.record_stream(self._stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def is_done(self, token: torch.cuda.Event) -> bool:
        return token.query()

    def finish(self, token: torch.cuda.Event) -> None:
        token.synchronize()

    def settle(self) -> None:
        self._stream.synchronize()

    def begin(self) -> None:
        self._after_current()

    def fetch(self, parameter: torch.Tensor, arena: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            parameter.copy_(arena, non_blocking=True)
            parameter.record_stream(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def release(self) -> None:
        self._stream.synchronize()
        for address, _ in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()


def transfer_for(device: torch.device) -> HostTransfer:
    if device.type == "cpu":
        return HostTransfer()
    if device.type == "cuda":
        return CudaTransfer(device)
    raise ValueError(f"parameters are on {device}: expected cpu or cuda")
