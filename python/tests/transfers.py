"""The ways in which gradients and parameters reach the arenas: in place, or copied as from a device."""

import pytest

from plimsoll.torch import gradient_arena, parameter_arena, shards
from plimsoll.torch.transfer import HostTransfer

WAYS = ("shared", "copied")


class LateTransfer(HostTransfer):
    """Stands for a device: parameters are not in the arenas, and every copy happens as late as it may, in order."""

    shares = False

    def __init__(self):
        self._tasks = []
        self._done = 0

    def _later(self, task):
        self._tasks.append(task)
        return len(self._tasks)

    def _run(self, until):
        while self._done < until:
            self._tasks[self._done]()
            self._tasks[self._done] = None  # a device holds no gradient once it is copied
            self._done += 1

    def store(self, arena, gradient):
        return self._later(lambda: arena.copy_(gradient))

    def add(self, arena, gradient):
        return self._later(lambda: arena.add_(gradient))

    def is_done(self, token):
        self._run(len(self._tasks) - 2)  # two copies are always under way
        return self._done >= token

    def finish(self, token):
        self._run(token)

    def fetch(self, parameter, arena):
        values = arena.clone()  # the step is through with it now, or never
        self._later(lambda: parameter.copy_(values))

    def join(self):
        self._run(len(self._tasks))

    settle = join


class PromptTransfer(HostTransfer):
    """Copies at once, and holds nothing."""

    shares = False


def use_copies(monkeypatch: pytest.MonkeyPatch, transfer=LateTransfer, block_bytes=100) -> None:
    """Parameters of the CPU are treated as those of a device, in small blocks."""
    monkeypatch.setattr(shards, "transfer_for", lambda device: transfer())
    monkeypatch.setattr(parameter_arena, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(gradient_arena, "_READY_BYTES", 64)
