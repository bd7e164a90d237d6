"""Which optimizer of this package holds the state of a parameter. StateOffload shares a parameter with no other."""

import gc
import weakref
from typing import Any, Dict, Iterator, Optional, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_owners = WeakTensorKeyDictionary()  # to weak references to optimizers


def claim(optimizer: Any, groups: Sequence[Dict[str, Any]]) -> None:
    """Makes an optimizer the owner of the parameters of its groups. Raises ValueError if another one holds them, and
    one of the two is a StateOffload.
    """
    if _other(optimizer, groups) is not None:
        gc.collect()  # the program may have let go of it
    other = _other(optimizer, groups)
    if other is not None:
        raise ValueError(
            f"{type(other).__name__} of plimsoll.torch holds the state of these parameters, and now {type(optimizer).__name__} is to "
            "hold it: close the first one before (optimizer.close()), or use only one of the two"
        )
    for parameter in _parameters(groups):
        _owners[parameter] = weakref.ref(optimizer)


def release(optimizer: Any, groups: Sequence[Dict[str, Any]]) -> None:
    for parameter in _parameters(groups):
        if _owner_of(parameter) is optimizer:
            del _owners[parameter]


def _other(optimizer: Any, groups: Sequence[Dict[str, Any]]) -> Optional[Any]:
    for other in map(_owner_of, _parameters(groups)):
        if other is not None and other is not optimizer and (_wraps(other) or _wraps(optimizer)):
            return other
    return None


def _wraps(optimizer: Any) -> bool:
    return getattr(type(optimizer), "wraps_optimizers", False)


def _parameters(groups: Sequence[Dict[str, Any]]) -> Iterator[torch.Tensor]:
    return (p for g in groups for p in g["params"])


def _owner_of(parameter: torch.Tensor) -> Optional[Any]:
    reference = _owners.get(parameter)
    return reference() if reference is not None else None
