"""The check mode of overlap: finds operations on parameters whose update nobody has waited for."""

import contextlib
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten

from plimsoll.torch.arrivals import Arrivals
from plimsoll.torch.layout import local
from plimsoll.torch.slot import Slot

# Operators that make a tensor like another, and do not read it.
_ONLY_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_")
# Functions that read a tensor without an operator.
_EXPORTS = frozenset(("numpy", "__array__", "__dlpack__", "tolist"))

_HINT = (
    "whose update is under way, and nothing has waited for it: call optimizer.synchronize() before the program reads or writes parameters "
    "outside of the modules' forward passes (PLIMSOLL_CHECK_OVERLAP)"
)


class StaleReads:
    """Looks at all operations from the beginning of an update until all of its parameters have arrived.

    It does so with modes of torch on the stack of the thread that makes the step. They come and go outside of
    inference_mode's guards, which restore the dispatcher as they have found it.
    """

    def __init__(self, arrivals: Arrivals):
        self._arrivals = arrivals
        self._parameters: Dict[int, List[Slot]] = {}  # by the address of their storage
        self._gradients: Dict[int, List[Slot]] = {}
        self._rows: Dict[torch.Tensor, List[torch.Tensor]] = {}  # of embeddings, that have arrived
        self._is_paused = False
        self._modes = _Operators(self._check_operator), _Functions(self._check_function)

    def begin(self) -> None:
        """Begins with an update."""
        self._rows, self._parameters, self._gradients = {}, {}, {}
        for slot in self._arrivals.all_missing():
            self._parameters.setdefault(_address(slot.piece.parameter), []).append(slot)
            if slot.shown is not None:
                self._gradients.setdefault(_address(slot.shown), []).append(slot)
        for mode, stack in zip(self._modes, _stacks()):
            if mode not in stack:
                mode.__enter__()

    def end(self) -> None:
        """Takes the modes off again. Not in hooks: torch pushes a mode again after a function that it has looked at."""
        for mode, stack in zip(self._modes, _stacks()):
            if stack and stack[-1] is mode:
                mode.__exit__(None, None, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not look at the operations of the optimizer itself."""
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def allow_rows(self, parameter: torch.Tensor, ids: torch.Tensor) -> None:
        """Records that rows of an embedding have arrived."""
        self._rows.setdefault(parameter, []).append(ids.reshape(-1))

    def _check_operator(self, operator: Any, arguments: Tuple[Any, ...], named: Dict[str, Any]) -> None:
        if self._is_paused or not self._arrivals.are_underway:
            return
        name = operator._schema.name.split("::")[-1]
        for slot in self._missing(self._parameters, (arguments, named)):
            if _is_view(operator) or name.startswith(_ONLY_LIKE) or self._looks_up(name, slot, arguments):
                continue
            raise RuntimeError(f"{name} uses parameter {slot.piece.name}, {_HINT}")
        for slot in self._missing(self._gradients, _written(operator, arguments, named)):
            raise RuntimeError(f"{name} writes the gradient of parameter {slot.piece.name}, {_HINT}")

    def _check_function(self, function: Any, arguments: Tuple[Any, ...], named: Dict[str, Any]) -> None:
        name = getattr(function, "__name__", "")
        # torch.save asks a tensor for its storage, from here.
        is_pickled = name == "untyped_storage" and sys._getframe(2).f_globals.get("__name__") == "torch._tensor"
        if self._is_paused or not (is_pickled or name in _EXPORTS) or not self._arrivals.are_underway:
            return
        for slot in self._missing(self._parameters, arguments[:1]):
            raise RuntimeError(f"{name} uses parameter {slot.piece.name}, {_HINT}")

    def _missing(self, among: Dict[int, List[Slot]], values: Any) -> List[Slot]:
        """The slots with the memory of these tensors that have not arrived."""
        tensors = [t for t in tree_flatten(values)[0] if isinstance(t, torch.Tensor) and t.layout is torch.strided]
        found = [slot for tensor in tensors for slot in among.get(_address(tensor), ())]
        return [slot for slot in found if self._arrivals.missing(slot.piece.parameter) is not None]

    def _looks_up(self, name: str, slot: Slot, arguments: Sequence[Any]) -> bool:
        """Whether an operator reads rows of an embedding that have arrived."""
        arrived = self._rows.get(slot.piece.parameter)
        return name == "embedding" and bool(arrived) and bool(torch.isin(arguments[1], torch.cat(arrived)).all())


class _Operators(TorchDispatchMode):
    def __init__(self, check: Callable[..., None]):
        super().__init__()
        self._check = check

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Optional[Dict[str, Any]] = None) -> Any:
        self._check(function, arguments, named or {})
        return function(*arguments, **(named or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, check: Callable[..., None]):
        super().__init__()
        self._check = check

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Optional[Dict[str, Any]] = None) -> Any:
        self._check(function, arguments, named or {})
        return function(*arguments, **(named or {}))


def _stacks() -> Tuple[List[Any], List[Any]]:
    return _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()


def _address(tensor: torch.Tensor) -> int:
    try:
        tensor = local(tensor)
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor without memory, as compilers make them
        return 0


def _is_view(operator: Any) -> bool:
    """Whether an operator returns views of its arguments, and reads and writes nothing."""
    returned = [r.alias_info for r in operator._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _written(operator: Any, arguments: Sequence[Any], named: Dict[str, Any]) -> List[Any]:
    """The arguments that an operator writes."""
    declared = operator._schema.arguments
    given = {a.name: value for a, value in zip(declared, arguments)}
    given.update(named)
    return [given[a.name] for a in declared if a.name in given and a.alias_info is not None and a.alias_info.is_write]
