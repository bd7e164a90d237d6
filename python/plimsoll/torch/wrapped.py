"""The optimizer that StateOffload wraps, called for some of its parameters at a time."""

import types
from collections import OrderedDict, defaultdict
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

import torch

from plimsoll.torch.documents import decode, encode, encode_all, put
from plimsoll.torch.tree import SMALL, Uncarried, copied, flatten, is_same, keep

_Options = Dict[str, Any]
State = Dict[torch.Tensor, Dict[str, Any]]


class Changed(RuntimeError):
    """Two calls of a step have changed the same option in different ways."""


class Failed(RuntimeError):
    """The optimizer itself has raised in a trial."""


class Setting(NamedTuple):
    """A value beside the state of parameters: an option of parameter group ``scope``, an attribute, or state under a name."""

    scope: int
    key: Any

    def __str__(self) -> str:
        return _SETTINGS.get(self.scope, "the option {!r} of its parameter groups").format(self.key)


_ITSELF, _NAMED = -1, -2  # in place of a group: the optimizer's own attributes, and its state under names
_SETTINGS = {_ITSELF: "its attribute {!r}", _NAMED: "its state {!r}"}


class Wrapped:
    """An optimizer whose parameter groups and state are exchanged for each call.

    The options of its parameter groups, its own attributes and its state under names are those of before the step in
    every call. All calls of a step must leave the same: otherwise the update of a parameter depends on others, and
    cannot be made in parts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_trial: bool = False):
        self.optimizer, self._is_trial = optimizer, is_trial
        self.named: Dict[Any, Any] = {}
        self.find_named()
        self._before: Dict[int, _Options] = {}  # by group, _ITSELF and _NAMED
        self._after: Dict[int, _Options] = {}
        #: The attributes that steps have changed, as they were before.
        self.originals: _Options = {}
        #: Whether it has a state beside that of its parameters.
        self.has_more = False

    @property
    def groups(self) -> List[Dict[str, Any]]:
        return self.optimizer.param_groups

    def find_named(self) -> None:
        """Finds the state that the optimizer has under names, beside that of its parameters."""
        self.named = {k: v for k, v in self.optimizer.state.items() if not isinstance(k, torch.Tensor)}

    def take_state(self) -> State:
        """Leaves the optimizer without a state. Returns that of its parameters, and has what is under names itself."""
        self.find_named()
        found, self.optimizer.state = dict(self.optimizer.state), {}
        return {p: entry for p, entry in found.items() if isinstance(p, torch.Tensor)}

    def twin(self) -> "Wrapped":
        """An optimizer of the same class and settings for trials, which shares nothing that a step changes."""
        return Wrapped(twin(self.optimizer, self.named), is_trial=True)

    def settings_of(self, g: int) -> Dict[Setting, Any]:
        """What the optimizer has beside the state of the parameters of a group."""
        scopes = {g: options_of(self.groups[g]), _ITSELF: attributes_of(self.optimizer), _NAMED: self.named}
        return {Setting(scope, key): value for scope, values in scopes.items() for key, value in values.items()}

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
        """Begins a step: takes the options of all groups, the attributes and the named state, as they are now."""
        self._before, self._after = {g: options_of(group) for g, group in enumerate(self.groups)}, {}
        self._before[_ITSELF], self._before[_NAMED] = attributes_of(self.optimizer), self.named

    def call(self, parameters: Dict[int, List[torch.Tensor]], state: State) -> State:
        """Makes an update of these parameters, by group, with this state. Returns the new state."""
        given = {g: copied(self._before[g]) for g in (*parameters, _ITSELF, _NAMED)}
        groups = {g: {**given[g], "params": params} for g, params in parameters.items()}
        self.optimizer.__dict__.update(given[_ITSELF])
        try:
            found, named = self._run(list(groups.values()), state, given[_NAMED])
            left = {_ITSELF: attributes_of(self.optimizer), _NAMED: named, **{g: options_of(group) for g, group in groups.items()}}
        finally:
            _replace_attributes(self.optimizer, self._before[_ITSELF])
        for g, options in left.items():
            self._note(g, _with_originals(options, given[g], self._before[g]))
        return found

    def call_alone(self, group: _Options, state: State) -> State:
        """Makes an update of one group. What it changes beside the state stays changed: this is for trials."""
        found, self.named = self._run([group], state, self.named)
        return found

    def _run(self, groups: List[_Options], state: State, named: Dict[Any, Any]) -> Tuple[State, Dict[Any, Any]]:
        try:
            found = call(self.optimizer, groups, {**state, **named})
        except Exception as error:
            if self._is_trial:
                raise Failed(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
            raise
        return found, {k: found.pop(k) for k in list(found) if not isinstance(k, torch.Tensor)}

    def _note(self, g: int, options: _Options) -> None:
        for key, value in options.items():
            if not is_same(self._after.setdefault(g, options).get(key), value):
                raise Changed(
                    f"{type(self.optimizer).__name__} changes {Setting(g, key)} by what it finds in the parameters of a call: its "
                    "update depends on all parameters together; use mode='whole'"
                )

    def end(self) -> None:
        """Ends a step: the groups and the optimizer get what it has left."""
        for g, options in self._after.items():
            place = self._place(g)
            for key, value in options.items():
                if g == _ITSELF and value is not place.get(key, _MISSING):
                    self._keep_original(key)
                put(place, key, value)

    def _place(self, scope: int) -> Dict[Any, Any]:
        return {_ITSELF: self.optimizer.__dict__, _NAMED: self.named}[scope] if scope < 0 else self.groups[scope]

    # Beside the state of parameters: in checkpoints

    def expect_changes(self, settings: Iterable[Setting]) -> None:
        """Says that steps change these."""
        settings = set(settings)
        self.has_more = bool(settings or self.named)
        for setting in settings:
            if setting.scope == _ITSELF:
                self._keep_original(setting.key)
        self.document()  # so that what cannot be saved is refused before there is a state

    def _keep_original(self, key: str) -> None:
        attributes = self.optimizer.__dict__
        if key not in self.originals:
            self.originals[key] = copied({key: attributes[key]})[key] if key in attributes else _MISSING

    def document(self) -> Dict[str, Any]:
        """The options of all groups, the attributes that steps change, and the named state, as JSON."""
        own = attributes_of(self.optimizer)
        try:
            return {
                **_together([encode_all(options_of(group)) for group in self.groups]),
                "attributes": {key: encode(own[key], key) for key in self.originals if key in own},
                "named": [[encode(key, "state"), encode(value, str(key))] for key, value in self.named.items()],
            }
        except Uncarried as error:
            raise TypeError(
                f"{type(self.optimizer).__name__} has {error.path!r}, which is {error.what}, beside the state of its parameters: expected numbers, tensors of at most "
                f"{SMALL} elements, and lists and dicts of them, which a checkpoint can hold; leave these parameters to the optimizer itself"
            ) from None

    def load_document(self, document: Dict[str, Any], device: torch.device) -> None:
        """Takes what :meth:`document` has written. Raises ValueError for that of an optimizer with other groups."""
        saved = len(document["groups"])
        if saved != len(self.groups):
            raise ValueError(
                f"the checkpoint is of an optimizer with {saved} parameter groups, and this one has {len(self.groups)}: make the same "
                "groups"
            )
        for group, own in zip(self.groups, document["groups"]):
            options = {**document["shared"], **own}
            for key in set(encode_all(options_of(group))) - {*options, *self.optimizer.defaults}:
                del group[key]  # a step has added it since
            for key, value in options.items():
                put(group, key, decode(value, device))
        self._load_attributes({key: decode(value, device) for key, value in document["attributes"].items()})
        self.named = {decode(key, device): decode(value, device) for key, value in document["named"]}

    def _load_attributes(self, saved: _Options) -> None:
        own = self.optimizer.__dict__
        for key in {*saved, *self.originals}:
            self._keep_original(key)
            value = saved.get(key, self.originals[key])
            if value is _MISSING:
                own.pop(key, None)
            else:
                put(own, key, value)


_MISSING = object()


def _together(groups: List[_Options]) -> Dict[str, Any]:
    """Options of groups, with those that all groups share once: a message has little room."""
    first, *others = groups or [{}]
    shared = {key: value for key, value in first.items() if all(key in g and g[key] == value for g in others)}
    return {"shared": shared, "groups": [{k: v for k, v in group.items() if k not in shared} for group in groups]}


def call(optimizer: Any, groups: List[_Options], state: Dict[Any, Any]) -> Dict[Any, Any]:
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


def twin(optimizer: torch.optim.Optimizer, named: Dict[Any, Any]) -> Any:
    """An optimizer of the same class and settings that shares nothing that a step changes."""
    made = object.__new__(type(optimizer))
    made.__dict__.update({**optimizer.__dict__, **copied(attributes_of(optimizer))})
    made.__dict__.pop("step", None)
    made.param_groups = [{**copied(options_of(g)), "params": g["params"]} for g in optimizer.param_groups]
    made.state = defaultdict(dict, copied(named))
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


def _with_originals(options: _Options, given: _Options, before: _Options) -> _Options:
    """What a call has left, with the values of before in place of copies that it has not changed."""

    def is_unchanged(key: str, value: Any) -> bool:
        if isinstance(value, torch.Tensor) and value is given.get(key):
            return value._version == 0  # without a look at its elements, for which a device would have to be waited for
        return key in before and is_same(value, before[key])

    return {k: before[k] if is_unchanged(k, v) else v for k, v in options.items()}


def check_setting(optimizer: Any, setting: Setting, value: Any) -> None:
    """Raises TypeError for a value that a step changes and that no checkpoint could hold."""
    name = type(optimizer).__name__
    many = [v for v in flatten({"": value}, keep).leaves.values() if isinstance(v, torch.Tensor) and v.numel() > 1]
    try:
        encode(value, str(setting))
    except Uncarried as error:
        if not many and "parameters" not in error.what:
            raise TypeError(
                f"a step of {name} changes {setting}, and {error.path} is {error.what}: expected numbers, which a checkpoint can "
                "hold; leave these parameters to the optimizer itself"
            ) from None
        many = many or [value]
    if many and not isinstance(value, torch.Tensor) or any(v.numel() > SMALL for v in many if isinstance(v, torch.Tensor)):
        raise TypeError(
            f"{name} has tensors of its parameters in {setting}, beside their state: expected all of them in the state of the "
            "parameters, which StateOffload can hold; leave these parameters to the optimizer itself"
        )


def encoded(groups: Sequence[Dict[str, Any]]) -> List[_Options]:
    """Options of groups that JSON can hold. Others are left to the program that makes the optimizer again."""
    return [encode_all(options_of(g), limit=1) for g in groups]


def restore(groups: Sequence[Dict[str, Any]], options: Sequence[Dict[str, Any]], device: torch.device) -> None:
    """Gives groups the options that :func:`encoded` has written."""
    if len(groups) != len(options):
        raise ValueError(
            f"the optimizer has {len(groups)} parameter groups, but the step under way had {len(options)}: make the same groups"
        )
    for group, given in zip(groups, options):
        for key, value in given.items():
            put(group, key, decode(value, device))
