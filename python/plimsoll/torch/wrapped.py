"""The optimizer that StateOffload wraps, called for some of its parameters at a time."""

import copy
import types
from collections import OrderedDict, defaultdict
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

_Options = Dict[str, Any]


class Wrapped:
    """An optimizer whose parameter groups and state are exchanged for each call.

    The options of its parameter groups are those of before the step in every call. All calls of a step must leave the
    same options: otherwise the update of a parameter depends on others, and cannot be made in parts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._before: List[_Options] = []
        self._after: Dict[int, _Options] = {}

    @property
    def groups(self) -> List[Dict[str, Any]]:
        return self.optimizer.param_groups

    def seize(self) -> None:
        """Refuses steps that somebody asks the wrapped optimizer for itself."""

        def step(self: Any, closure: Any = None) -> None:
            raise RuntimeError(
                "this optimizer is wrapped by plimsoll.torch.StateOffload, which holds its state: call step() of the StateOffload"
            )

        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begins a step: takes the options of all groups as they are now."""
        self._before, self._after = [options_of(g) for g in self.groups], {}

    def call(self, parameters: Dict[int, List[torch.Tensor]], state: Dict[torch.Tensor, Dict[str, Any]]) -> Any:
        """Makes an update of these parameters, by group, with this state. Returns the new state."""
        groups = [{**_copied(self._before[g]), "params": params} for g, params in parameters.items()]
        found = call(self.optimizer, groups, state)
        for g, group in zip(parameters, groups):
            self._note(g, options_of(group))
        return found

    def _note(self, g: int, options: _Options) -> None:
        for key, value in options.items():
            if not _same(self._after.setdefault(g, options).get(key), value):
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} changes the option {key!r} of its parameter groups by what it finds in the "
                    "parameters of a call: its update depends on all parameters together; use mode='whole'"
                )

    def end(self) -> None:
        """Ends a step: the groups get the options that it has left."""
        for g, options in self._after.items():
            self.groups[g].update(options)


def call(optimizer: Any, groups: List[Dict[str, Any]], state: Dict[torch.Tensor, Dict[str, Any]]) -> Any:
    """Runs the step of an optimizer's class, without hooks, on other groups and another state. Returns the new state."""
    held = {name: optimizer.__dict__.get(name) for name in ("param_groups", "state", *_HOOKS)}
    optimizer.param_groups, optimizer.state = groups, defaultdict(dict, state)
    optimizer.__dict__.update({name: OrderedDict() for name in _HOOKS})
    try:
        plain_step(type(optimizer))(optimizer)
        return optimizer.state
    finally:
        optimizer.__dict__.update(held)


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def plain_step(kind: type) -> Callable[..., Any]:
    """The step of a class without torch's profiler and hooks, which belong to the step of all parameters."""
    step = kind.step  # type: ignore[attr-defined]
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step


def twin(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer of the same class and settings that shares nothing that a step changes."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)
    made.state = defaultdict(dict)
    return made


def options_of(group: Dict[str, Any]) -> _Options:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def same_options(one: _Options, other: _Options) -> bool:
    return set(one) == set(other) and all(_same(v, other[k]) for k, v in one.items())


def _copied(options: _Options) -> _Options:
    return {k: copy.copy(v) if isinstance(v, (list, dict, set)) else v for k, v in options.items()}


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    try:
        return bool(one == other) or (one != one and other != other)
    except (TypeError, ValueError, RuntimeError):
        return False


def encoded(groups: Sequence[Dict[str, Any]]) -> List[_Options]:
    """Options of groups that JSON can hold. Others are left to the program that makes the optimizer again."""
    return [{k: e for k, v in options_of(g).items() for e in [_encode(v)] if e is not None} for g in groups]


def _encode(value: Any) -> Optional[Any]:
    if value is None:
        return {"none": True}
    if isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"tensor": value.item()}
    if isinstance(value, (tuple, list)):
        items = [_encode(v) for v in value]
        return None if None in items else {"tuple" if isinstance(value, tuple) else "list": items}
    return None


def restore(groups: Sequence[Dict[str, Any]], options: Sequence[Dict[str, Any]]) -> None:
    """Gives groups the options that :func:`encoded` has written."""
    if len(groups) != len(options):
        raise ValueError(
            f"the optimizer has {len(groups)} parameter groups, but the step under way had {len(options)}: make the same groups"
        )
    for group, given in zip(groups, options):
        for key, value in given.items():
            if isinstance(group.get(key), torch.Tensor) and "tensor" in value:
                with torch.no_grad():
                    group[key].fill_(value["tensor"])
            else:
                group[key] = _decode(value)


def _decode(value: Dict[str, Any]) -> Any:
    (kind, held), = value.items()
    if kind == "none":
        return None
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_decode(v) for v in held)
    return torch.tensor(held) if kind == "tensor" else held


