"""The optimizer that StateOffload wraps, called for some of its parameters at a time."""

import copy
import types
from collections import OrderedDict, defaultdict
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

_Options = Dict[str, Any]


class Changed(RuntimeError):
    """Two calls of a step have changed the same option in different ways."""


class Wrapped:
    """An optimizer whose parameter groups and state are exchanged for each call.

    The options of its parameter groups, and its own attributes, are those of before the step in every call. All calls of
    a step must leave the same: otherwise the update of a parameter depends on others, and cannot be made in parts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._before: Dict[int, _Options] = {}  # by group, and the attributes as those of _ITSELF
        self._after: Dict[int, _Options] = {}

    @property
    def groups(self) -> List[Dict[str, Any]]:
        return self.optimizer.param_groups

    def seize(self, wrapper: torch.optim.Optimizer) -> None:
        """Refuses steps that somebody asks the wrapped optimizer for itself. Its hooks become those of the wrapper."""
        for name in _ALL_HOOKS:
            hooks = getattr(self.optimizer, name)
            getattr(wrapper, name).update(hooks)
            hooks.clear()

        def step(self: Any, closure: Any = None) -> None:
            raise RuntimeError(
                "this optimizer is wrapped by plimsoll.torch.StateOffload, which holds its state: call step() of the StateOffload"
            )

        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begins a step: takes the options of all groups, and the attributes, as they are now."""
        self._before, self._after = {g: options_of(group) for g, group in enumerate(self.groups)}, {}
        self._before[_ITSELF] = attributes_of(self.optimizer)

    def call(self, parameters: Dict[int, List[torch.Tensor]], state: Dict[torch.Tensor, Dict[str, Any]]) -> Any:
        """Makes an update of these parameters, by group, with this state. Returns the new state."""
        given = {g: copied(self._before[g]) for g in (*parameters, _ITSELF)}
        groups = {g: {**given[g], "params": params} for g, params in parameters.items()}
        self.optimizer.__dict__.update(given[_ITSELF])
        try:
            found = call(self.optimizer, list(groups.values()), state)
            left = {_ITSELF: attributes_of(self.optimizer), **{g: options_of(group) for g, group in groups.items()}}
        finally:
            _replace_attributes(self.optimizer, self._before[_ITSELF])
        for g, options in left.items():
            self._note(g, _with_originals(options, given[g], self._before[g]))
        return found

    def _note(self, g: int, options: _Options) -> None:
        for key, value in options.items():
            if not is_same(self._after.setdefault(g, options).get(key), value):
                what = f"its attribute {key!r}" if g == _ITSELF else f"the option {key!r} of its parameter groups"
                raise Changed(
                    f"{type(self.optimizer).__name__} changes {what} by what it finds in the parameters of a call: its update "
                    "depends on all parameters together; use mode='whole'"
                )

    def end(self) -> None:
        """Ends a step: the groups and the optimizer get what it has left."""
        for g, options in self._after.items():
            place = self.optimizer.__dict__ if g == _ITSELF else self.groups[g]
            for key, value in options.items():
                before = place.get(key)
                if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and before.shape == value.shape:
                    if before is not value:
                        before.copy_(value)  # whoever else has the tensor sees it, as without StateOffload
                else:
                    place[key] = value


_ITSELF = -1  # in place of a group: the optimizer's own attributes


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
_ALL_HOOKS = (
    *_HOOKS,
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def plain_step(kind: type) -> Callable[..., Any]:
    """The step of a class without torch's profiler and hooks, which belong to the step of all parameters."""
    step = kind.step  # type: ignore[attr-defined]
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step


def twin(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer of the same class and settings that shares nothing that a step changes."""
    made = object.__new__(type(optimizer))
    made.__dict__.update({**optimizer.__dict__, **copied(attributes_of(optimizer))})
    made.__dict__.pop("step", None)
    made.param_groups = [{**copied(options_of(g)), "params": g["params"]} for g in optimizer.param_groups]
    made.state = defaultdict(dict)
    return made


_NO_SETTINGS = {"param_groups", "state", "defaults", "step"}


def attributes_of(optimizer: Any) -> _Options:
    """What an optimizer has in itself, such as a count of steps: all but its groups and state, and what torch keeps."""
    return {k: v for k, v in optimizer.__dict__.items() if k not in _NO_SETTINGS and "_hooks" not in k}


def _replace_attributes(optimizer: Any, attributes: _Options) -> None:
    for key in set(attributes_of(optimizer)) - set(attributes):
        del optimizer.__dict__[key]
    optimizer.__dict__.update(attributes)


def options_of(group: Dict[str, Any]) -> _Options:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def copied(options: _Options) -> _Options:
    """Options, or attributes, that a step may change without a change of these."""
    return {k: _copied(v) for k, v in options.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _with_originals(options: _Options, given: _Options, before: _Options) -> _Options:
    """What a call has left, with the tensors of before in place of copies that it has not written."""

    def unchanged(key: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value is given.get(key) and value._version == 0

    return {k: before[k] if unchanged(k, v) else v for k, v in options.items()}


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of an option or attribute are the same."""
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


