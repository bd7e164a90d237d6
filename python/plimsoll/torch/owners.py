"""Which optimizer of this package holds the state of a parameter: one only."""

import gc
import weakref
from typing import Any, Iterable, Optional

from torch.utils.weak import WeakTensorKeyDictionary

_owners = WeakTensorKeyDictionary()  # to weak references to optimizers


def claim(optimizer: Any, parameters: Iterable[Any]) -> None:
    """Notes whose parameters these are, as far as they are nobody else's. See :func:`owner_of`."""
    for parameter in parameters:
        _owners[parameter] = weakref.ref(optimizer)


def release(optimizer: Any, parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        if _held_by(parameter) is optimizer:
            del _owners[parameter]


def owner_of(parameters: Iterable[Any], but: Any) -> Optional[Any]:
    """Another optimizer that holds the state of one of these, or None."""
    found = _other(parameters, but)
    if found is not None:
        del found
        gc.collect()  # the program may have let go of it
        found = _other(parameters, but)
    return found


def _other(parameters: Iterable[Any], but: Any) -> Optional[Any]:
    return next((o for o in map(_held_by, parameters) if o is not None and o is not but), None)


def _held_by(parameter: Any) -> Optional[Any]:
    reference = _owners.get(parameter)
    return reference() if reference is not None else None
