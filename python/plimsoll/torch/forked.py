"""Parameters in shared memory after a fork.

With torch's optimizers a forked child keeps the weights of the fork. Here the parent's next step would change them
under the child. A copy for every child would cost the model's memory for each worker of a data loader, which never
uses it. So the child copies the parameters when it first uses one. If the parent has changed them by then, the use is
an error.
"""

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any, Dict, List, Type

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from plimsoll.torch.samples import Samples


_GONE = (
    "this process was forked, and its parent has changed the parameters since: their values at the fork are gone. Use a "
    "parameter before the parent goes on (p.shape is enough: the child then has a copy of its own), give the child a copy "
    "of the model from before the fork (copy.deepcopy(model)), or start it by spawn"
)


class Generation:
    """Counts the optimizer's changes of parameters, in memory that forked children read. An odd count means that a
    change is under way.
    """

    def __init__(self) -> None:
        self._count = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)[:1]

    def begin(self) -> None:
        self._count += 1 if self.is_stable() else 2

    def end(self) -> None:
        if not self.is_stable():
            self._count += 1

    def number(self) -> int:
        return int(self._count[0])

    def is_stable(self) -> bool:
        return self.number() % 2 == 0


class SharedParameters:
    """Parameters in an arena, for as long as the optimizer may change them."""

    def __init__(self, parameters: List[torch.Tensor], samples: Samples):
        self.generation = Generation()
        self._parameters, self._samples = parameters, samples
        self._classes: Dict[torch.Tensor, Type[torch.Tensor]] = {}
        _shared.add(self)

    def remember(self) -> None:
        """Runs before a fork. A child that forks before it has used its parameters leaves them to the first parent.
        """
        if self._classes:
            return
        self._number, self._bits = self.generation.number(), self._samples.in_arena()

    def leave_to_parent(self) -> None:
        """Runs in the child. The next use of a parameter copies all parameters, or fails."""
        for parameter in self._parameters if not self._classes else ():
            self._classes[parameter] = type(parameter)
            parameter.__class__ = _left_to_parent(type(parameter))
            _left[id(parameter)] = self

    def copy(self) -> None:
        """Gives the child the parameters of the fork. Raises RuntimeError if the parent has changed them since."""
        with torch._C.DisableTorchFunctionSubclass():
            values = [_copy(parameter.detach()) for parameter in self._parameters]
            bits = self._samples.in_arena()
            same_number = self.generation.is_stable() and self.generation.number() == self._number
            if not same_number or (bits != self._bits).any():
                raise RuntimeError(_GONE)
            for parameter, value in zip(self._parameters, values):
                parameter.data = value
                parameter.__class__ = self._classes.pop(parameter)
                del _left[id(parameter)]
            _shared.discard(self)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy made by this thread alone. A forked child has no other threads, and OpenMP would wait for the parent's.
    """
    copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    ctypes.memmove(copied.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return copied


_shared: "weakref.WeakSet[SharedParameters]" = weakref.WeakSet()
_left: Dict[int, SharedParameters] = {}  # in a child: of parameters by their id


@functools.lru_cache(maxsize=None)
def _left_to_parent(original: Type[torch.Tensor]) -> Type[torch.Tensor]:
    """The class of parameters of ``original`` that a child has not used yet."""

    def use(cls: Any, function: Any, classes: Any, arguments: Any = (), options: Any = None) -> Any:
        used = {_left[id(x)] for x in tree_flatten((arguments, options))[0] if id(x) in _left}
        for shared in used or set(_left.values()):  # parameters of other optimizers may be gone, and nobody needs them
            shared.copy()
        return function(*arguments, **(options or {}))

    return type(original)(original.__name__, (original,), {"__torch_function__": classmethod(use)})


def _before_fork() -> None:
    for shared in list(_shared):
        shared.remember()


def _after_fork_in_child() -> None:
    for shared in list(_shared):
        shared.leave_to_parent()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
