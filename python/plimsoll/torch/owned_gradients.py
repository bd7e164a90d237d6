"""Gradients on their way to the ranks that own their parameters."""

import collections
import os
import threading
from typing import Any, Deque, Dict, List, Tuple

import torch
import torch.distributed

from plimsoll.torch.matrix_owners import Owners
from plimsoll.torch.reducer import Reducer
from plimsoll.torch.transfer import HostTransfer

_IN_FLIGHT_BYTES = 64 << 20


class OwnedGradients:
    """Averages each gradient to the owner of its parameter as soon as autograd has it, and frees it on other ranks.

    An owner adds up the averages of several backward passes. In the step they are the gradients of its parameters.
    """

    def __init__(self, owners: Owners, names: Dict[torch.Tensor, str], device: torch.device, transfer: HostTransfer):
        self._owners, self._names, self._transfer = owners, names, transfer
        self._reducer = Reducer(owners.parameters, owners.mesh, device, self._reduce)
        self._lock = threading.RLock()  # hooks run on autograd's threads
        self._in_flight: Deque[Tuple[Any, torch.Tensor, torch.Tensor]] = collections.deque()
        self._sums: Dict[torch.Tensor, torch.Tensor] = {}
        process = os.getpid()

        def hook(parameter: torch.Tensor) -> None:
            if os.getpid() == process:  # in a forked child, gradients are its own
                self._came(parameter)

        self._hooks: List[Any] = [p.register_post_accumulate_grad_hook(hook) for p in owners.parameters]

    def _came(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter.grad.layout is not torch.strided:
            raise TypeError(f"the gradient of parameter {self._names[parameter]} is sparse: expected a dense one (sparse=False)")
        with self._lock:
            self._reducer.came(parameter)

    @torch.no_grad()
    def _reduce(self, parameter: torch.Tensor, has_come: bool) -> None:
        """Sends a gradient to the owner, or zeros if there is none."""
        gradient = torch.zeros_like(parameter)
        if has_come and parameter.grad is not None:
            gradient, parameter.grad = parameter.grad.detach(), None
        work = None
        if self._owners.mesh.world > 1:
            gradient = gradient.contiguous().div_(self._owners.mesh.world)
            work = torch.distributed.reduce(
                gradient, self._owners.root(parameter), group=self._owners.mesh.group, async_op=True
            )
        self._in_flight.append((work, gradient, parameter))
        self._receive(_IN_FLIGHT_BYTES)

    def _receive(self, leave_bytes: int) -> None:
        """Adds gradients that have arrived from all ranks, until at most so many bytes are in flight."""
        while self._in_flight and sum(g.nbytes for _, g, _ in self._in_flight) > leave_bytes:
            work, gradient, parameter = self._in_flight.popleft()
            if work is not None:
                work.wait()
                self._transfer.keep(gradient)  # autograd may have made it on another stream than the one that waits
            if not self._owners.is_own(parameter):
                continue
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                self._sums[parameter] = gradient

    @torch.no_grad()
    def finish(self) -> bool:
        """Gives this rank's own parameters their gradients, once all ranks have sent theirs. Returns whether any rank
        has one.
        """
        with self._lock:
            self._reducer.finish()
            self._receive(0)
            for parameter, gradient in self._sums.items():
                parameter.grad = gradient if parameter in self._reducer.all else None
            return bool(self._reducer.all)

    def over(self) -> None:
        """Takes the gradients of a step away, as the step was made."""
        for parameter in self._sums:
            parameter.grad = None
        self._sums.clear()
        self._reducer.over()

    def discard(self) -> None:
        """Discards the gradients since the last step."""
        with self._lock:
            self._reducer.discard()
            self._receive(0)
            self._sums.clear()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
