"""Copies between the shared arenas and the device of the parameters.

All operations take flat tensors of one type and length. A :class:`StreamTransfer` runs operations later, in order.
``begin`` and ``join`` order them with the operations of PyTorch's current stream.
"""

import contextlib
from typing import Any, Optional, Set

import torch

from plimsoll.client import Arena
from plimsoll.torch.pinning import DRIVERS, PinnedArenas


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

    def catch_up(self) -> None:
        """Orders later computation after all copies, if only that of other streams is yet."""

    def release(self) -> None:
        """Undoes register, for all arenas."""


class StreamTransfer(HostTransfer):
    """Parameters are on an accelerator with streams, such as CUDA. Copies run on their own streams, one for each
    direction, to and from pinned memory.

    ``runtime`` is the module of the device's type: ``torch.cuda``, or what ``torch.get_device_module`` returns.
    """

    shares = False

    def __init__(self, device: torch.device, runtime: Any, arenas: PinnedArenas):
        self._device, self._runtime, self._arenas = device, runtime, arenas
        self._to_host, self._to_device = runtime.Stream(device), runtime.Stream(device)
        self._joined: Optional[Set[Any]] = None  # the streams that wait for the last fetch, once there was one

    def register(self, arena: Arena) -> None:
        self._arenas.add(arena)

    def is_capturing(self) -> bool:
        # Only CUDA has graphs in every release of PyTorch.
        asks = getattr(self._runtime, "is_current_stream_capturing", None)
        return asks is not None and asks()

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._runtime.current_stream(self._device))

    def _after_current(self, stream: Any) -> None:
        stream.wait_stream(self._runtime.current_stream(self._device))

    def store(self, arena: torch.Tensor, gradient: torch.Tensor) -> Any:
        self._after_current(self._to_host)
        with self._runtime.stream(self._to_host):
            arena.copy_(gradient, non_blocking=True)
            return self._mark(gradient)

    def add(self, arena: torch.Tensor, gradient: torch.Tensor) -> Any:
        # Add on the device: the host's cores belong to the optimizer. Both directions use the stream of the copies
        # that are added to.
        self._after_current(self._to_host)
        with self._runtime.stream(self._to_host):
            total = arena.to(self._device, non_blocking=True).add_(gradient)
            arena.copy_(total, non_blocking=True)
            return self._mark(gradient)

    def _mark(self, gradient: torch.Tensor) -> Any:
        # The allocator must not reuse the gradient's memory before it is read.
        gradient.record_stream(self._to_host)
        event = self._runtime.Event()
        event.record(self._to_host)
        return event

    def is_done(self, token: Any) -> bool:
        return token.query()

    def finish(self, token: Any) -> None:
        token.synchronize()

    def settle(self) -> None:
        self._to_host.synchronize()
        self._to_device.synchronize()

    def begin(self) -> None:
        self._after_current(self._to_device)

    def fetch(self, parameter: torch.Tensor, arena: torch.Tensor) -> None:
        with self._runtime.stream(self._to_device):
            parameter.copy_(arena, non_blocking=True)
            parameter.record_stream(self._to_device)
        self._joined = set()

    def join(self) -> None:
        # A thread may begin another fetch meanwhile, and with it another set.
        current, joined = self._runtime.current_stream(self._device), self._joined
        current.wait_stream(self._to_device)
        if joined is not None:
            joined.add(current)

    def catch_up(self) -> None:
        if self._joined is not None and self._runtime.current_stream(self._device) not in self._joined:
            self.join()

    def release(self) -> None:
        # After a kernel has failed, as by an assertion, every call fails, and nothing is under way. That failure is
        # being raised; what it leads to here is not.
        with contextlib.suppress(RuntimeError):
            self.settle()
        self._arenas.release()


def transfer_for(device: torch.device) -> HostTransfer:
    if device.type == "cpu":
        return HostTransfer()
    return StreamTransfer(device, runtime_of(device), pinned_arenas(device))


def runtime_of(device: torch.device) -> Any:
    """The module of the device's type: ``torch.cuda``, or what ``torch.get_device_module`` returns."""
    runtime = getattr(torch, device.type, None)  # torch 2.1 does not have get_device_module
    if not all(hasattr(runtime, name) for name in ("Stream", "Event", "stream", "current_stream")):
        raise ValueError(f"parameters are on {device}: expected cpu, cuda, or another accelerator with streams")
    return runtime


def pinned_arenas(device: torch.device) -> PinnedArenas:
    driver = DRIVERS.get(device.type)
    return PinnedArenas(driver(device) if driver else None)
