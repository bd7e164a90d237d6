"""What an optimizer's state is made of, found out before there is any."""

import collections
import contextlib
import math
import random
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Set, Union

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll.torch.layout import is_sharded, local
from plimsoll.torch.regions import Form, Sharding
from plimsoll.torch.tree import Node, Spans, Uncarried, branches, by_type, difference, flatten, is_same, keep
from plimsoll.torch.wrapped import Changed, Failed, Setting, State, Wrapped, check_setting, options_of


class NumberKind(NamedTuple):
    """A number on the host: one of Python, or a tensor without dimensions."""

    number: type
    dtype: Optional[torch.dtype]


#: What a leaf of the state is: a tensor on the device, or a number on the host.
Kind = Union[Form, NumberKind]
_TRIALS = 12  # some optimizers do more in every tenth step
_STEPS = 2  # what differs between them has no place that is known before


class Kinds(NamedTuple):
    """The trees of a parameter's state, by key, and the kinds of their leaves, by path."""

    nodes: Dict[str, Node]
    leaves: Dict[str, Kind]


class Asked(NamedTuple):
    """What two steps of a parameter have shown."""

    kinds: Kinds
    is_collective: bool  # ranks update it together
    changed: FrozenSet[Setting]  # by the steps


class Prober:
    """Asks an optimizer once for each kind of parameter and options."""

    def __init__(self, wrapped: Wrapped):
        self._wrapped, self._optimizer = wrapped, wrapped.optimizer
        self._name = type(wrapped.optimizer).__name__
        self._found: Dict[Any, Asked] = {}

    def is_alone(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> bool:
        """Whether a step can be finished from what is held: it changes no options or attributes, such as a count of steps,
        and no other rank takes part in it.
        """
        asked = self._asked(parameter, name, g, dtype)
        return not (asked.changed or asked.is_collective)

    @property
    def changed(self) -> Set[Setting]:
        """What steps change beside the state of parameters."""
        return {key for asked in self._found.values() for key in asked.changed}

    def kinds(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> Kinds:
        """The state that a parameter has in group ``g``, if it is a parameter of ``dtype``."""
        state = self._optimizer.state.get(parameter)
        if state:  # it is there already
            return _kinds(self._name, parameter, state, name)
        return self._asked(parameter, name, g, dtype).kinds

    def _asked(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> Asked:
        where = getattr(parameter, "placements", None)
        key = (g, tuple(parameter.shape), tuple(local(parameter).shape), local(parameter).stride(), dtype, where)
        if key not in self._found:
            self._found[key] = self._ask(parameter, name, g, dtype)
        return self._found[key]

    def _ask(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> Asked:
        """Has it step a parameter that has no memory. Some optimizers read a number in between: they get a real one."""
        _start_autograd()
        with _undisturbed(local(parameter).device):
            try:
                before = self._wrapped.settings_of(g)
                if any(isinstance(v, torch.Tensor) for v in flatten(_without_rate(before), keep).leaves.values()):
                    raise ValueError("a tensor without memory shows no change")
                made = self._wrapped.twin()
                with FakeTensorMode(allow_non_fake_inputs=True):
                    return self._steps(made, parameter, name, g, dtype)
            except Exception:  # whatever it is: a real parameter will tell
                return self._ask_with_numbers(parameter, name, g, dtype)

    def _ask_with_numbers(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> Asked:
        """The same, with a parameter that has memory."""
        try:
            found = self._steps(self._wrapped.twin(), parameter, name, g, dtype)
        except Failed as error:
            raise TypeError(_failed(self._wrapped, error)) from error
        with contextlib.suppress(Failed):
            of_zeros = self._steps(self._wrapped.twin(), parameter, name, g, dtype, scale=0)
            _refuse_changing(self._name, name, found.kinds, of_zeros.kinds, "for others", "for a parameter of zeros")
        return found

    def _steps(
        self, made: Wrapped, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype, scale: float = 1
    ) -> Asked:
        group, before = made.groups[g], self._wrapped.settings_of(g)
        asked = _numbers_like(parameter, dtype, scale).requires_grad_()
        group["params"], found, kinds = [asked], {}, []
        with _collectives(parameter) as count:
            for _ in range(_STEPS):
                asked.grad = _numbers_like(parameter, dtype)
                found = made.call_alone(group, {**found})
                kinds.append(_kinds(self._name, parameter, found.get(asked, {}), name, asked))
        _refuse_changing(self._name, name, *kinds)
        after = made.settings_of(g)
        changed = frozenset(key for key in after if key not in before or not is_same(before[key], after[key]))
        for key in changed:
            check_setting(self._optimizer, key, after[key])
        return Asked(kinds[-1], count() > 0, changed)


def _numbers_like(parameter: torch.Tensor, dtype: torch.dtype, scale: float = 1) -> torch.Tensor:
    """Numbers in the place of a parameter or its gradient. They differ, and are not all 0: some optimizers then do nothing."""
    mine = torch.zeros_like(local(parameter).detach(), dtype=dtype)
    return like(parameter, mine.copy_(torch.linspace(-scale, scale, mine.numel(), device=mine.device).view(mine.shape)))


def _without_rate(settings: Dict[Setting, Any]) -> Dict[Setting, Any]:
    return {setting: value for setting, value in settings.items() if setting.key != "lr"}


def _refuse_changing(
    owner: str, name: str, first: Kinds, second: Kinds, one: str = "after a step", other: str = "after two"
) -> None:
    """Refuses a state that has two forms."""
    keys = [key for key in {**first.nodes, **second.nodes} if first.nodes.get(key) != second.nodes.get(key)]
    paths = [path for path in second.leaves if first.leaves.get(path) != second.leaves[path]]
    if not keys and not paths:
        return
    if not keys:
        what = f"{paths[0]!r} is {_of_kind(second.leaves[paths[0]])} {other}: expected {_of_kind(first.leaves[paths[0]])}, as {one}"
    elif keys[0] in first.nodes and keys[0] in second.nodes:
        what = f"{difference(second.nodes[keys[0]], first.nodes[keys[0]], keys[0])} {other}, as {one}"
    else:
        what = f"{keys[0]!r} is there {other if keys[0] in second.nodes else one} alone: expected it always"
    raise TypeError(f"{owner}: the state of {name} changes its form. {what}: its place is fixed before the first step. {_LEAVE}")


def _of_kind(kind: Kind) -> str:
    if isinstance(kind, Form):
        return f"a tensor of {list(kind.size)} of {kind.dtype}"
    return f"a number of type {kind.number.__name__ if kind.dtype is None else kind.dtype}"


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leaves the random numbers of the program as they are, and tells whether some were drawn."""
    numbers, more, before = random.getstate(), np.random.get_state(), _drawn(device)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield lambda: _drawn(device) != before
    finally:
        random.setstate(numbers)
        np.random.set_state(more)


def _drawn(device: torch.device) -> List[Any]:
    """How far random numbers are."""
    _, keys, place, *_ = np.random.get_state()
    of_torch = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [random.getstate(), keys.tobytes(), place, *(state.numpy().tobytes() for state in of_torch)]


@contextlib.contextmanager
def _collectives(parameter: torch.Tensor) -> Iterator[Callable[[], int]]:
    """Counts what the ranks that share a DTensor do together."""
    if not is_sharded(parameter):
        yield lambda: 0
        return
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        yield mode.get_total_counts


def _start_autograd() -> None:
    """Has autograd start its threads for the devices that there are.

    FakeTensorMode registers CUDA devices where there are none. A first backward pass after it would start a thread for
    each, and forked children could not make a backward pass any more.
    """
    if not torch.cuda.is_available():
        with torch.enable_grad():
            torch.zeros((), requires_grad=True).mul(1).backward()


def like(parameter: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """A tensor that is sharded as a parameter is, from this rank's elements."""
    sharding = Sharding.of(parameter)
    return elements if sharding is None else sharding.whole(elements)


def _kinds(
    owner: str, parameter: torch.Tensor, state: Dict[str, Any], name: str, asked: Optional[torch.Tensor] = None
) -> Kinds:
    """The kinds of a state, which ``asked`` has in place of the parameter."""
    try:
        found = flatten(state, beside=parameter if asked is None else asked)
        for node in found.nodes.values():
            _refuse_growing(node)
    except Uncarried as error:
        raise TypeError(
            f"{owner}: the state {error.path!r} of {name} is {error.what}: expected tensors and numbers, in lists, dicts and objects of "
            f"them, each with memory of its own, which StateOffload can hold. {_LEAVE}"
        ) from None
    return Kinds(found.nodes, {path: _kind(f"{owner}: the state {path!r} of {name}", parameter, value) for path, value in found.leaves.items()})


def _refuse_growing(node: Node) -> None:
    for branch in branches(node):
        if branch.kind is collections.deque:
            raise Uncarried(branch.path, "a deque, which grows")


def _kind(what: str, parameter: torch.Tensor, value: Any) -> Kind:
    if not isinstance(value, torch.Tensor):
        return NumberKind(type(value), None)
    mine = local(value)
    if mine.layout is not torch.strided:
        raise TypeError(f"{what} is {mine.layout}: expected a dense tensor. {_LEAVE}")
    if mine.device == local(parameter).device and (mine.dim() or mine.device.type != "cpu"):
        return Form.of(mine, sharding=Sharding.of(value))
    if mine.dim() == 0 and mine.device.type == "cpu" and mine.element_size() <= 8:
        return NumberKind(torch.Tensor, mine.dtype)
    raise TypeError(
        f"{what} is on {mine.device}, but the parameter is on {local(parameter).device}: expected both on one device. {_LEAVE}"
    )


_LEAVE = "Leave these parameters to the optimizer itself"


def refuse_dependent(wrapped: Wrapped) -> None:
    """Raises ValueError if an update depends on other parameters: if a few small ones get other bits one by one."""
    together, alone = _Trial(wrapped), _Trial(wrapped)
    try:
        for step in range(_TRIALS):
            together.step(step, at_once=True)
            together.refuse_shared()
            try:
                alone.step(step, at_once=False)
            except Changed:
                break
    except Failed as error:
        raise TypeError(_failed(wrapped, error)) from error
    if together.draws:
        raise ValueError(
            f"{type(wrapped.optimizer).__name__} draws random numbers in the order of the parameters, so its step cannot be made chunk "
            "by chunk: use mode='whole'"
        )
    if not together.same_as(alone):
        raise ValueError(
            f"{type(wrapped.optimizer).__name__} updates a parameter by what it finds in others, so its step cannot be made chunk by "
            "chunk: use mode='whole'"
        )


def refuse_shared(wrapped: Wrapped) -> None:
    """Raises TypeError if the states of parameters are not apart."""
    together, alone = _Trial(wrapped), _Trial(wrapped)
    with contextlib.suppress(Failed, Changed):  # that parameters which are small are refused is no matter here
        together.step(0, at_once=True)
        together.refuse_shared()
        alone.step(0, at_once=False)
        together.refuse_other_keys(alone)


def _failed(wrapped: Wrapped, error: Failed) -> str:
    return (
        f"a step of {type(wrapped.optimizer).__name__} failed in a trial, by which StateOffload learns what its state is, with other "
        f"parameters, without a closure and a graph of the gradients: {str(error).rstrip('.')}{_hint(wrapped, error)}. {_LEAVE}"
    )


def _hint(wrapped: Wrapped, error: Failed) -> str:
    if isinstance(error.__cause__, NotImplementedError):
        return ", so it has no step: it updates parameters elsewhere, as in the backward pass"
    if isinstance(error.__cause__, KeyError) and any(isinstance(key, torch.Tensor) for key in wrapped.optimizer.state):
        return ", which is in the state that it makes before its first step: other parameters have none"
    return ""


def _different(groups: List[Dict[str, Any]]) -> List[int]:
    """Groups that differ in more than numbers, such as learning rates: two of each kind, as there may be one for each layer."""
    kinds: Dict[str, List[int]] = {}
    for g, group in enumerate(groups):
        kinds.setdefault(repr([(k, v) for k, v in options_of(group).items() if type(v) not in (int, float)]), []).append(g)
    return sorted(g for alike in kinds.values() for g in alike[:2])


class _Trial:
    """Small parameters of all groups, and an optimizer for them, which takes them in the calls of a step."""

    def __init__(self, wrapped: Wrapped):
        self._wrapped = wrapped.twin()
        self._state: State = {}
        self.draws = False  # random numbers
        self.parameters: List[torch.Tensor] = []
        self._groups: List[int] = []
        for g in _different(self._wrapped.groups):
            group = self._wrapped.groups[g]
            if "lr" in group and not group["lr"]:
                group["lr"] = 1e-2  # with 0, as before a warm-up, no update depends on anything
            for p in [p for p in group["params"] if p.requires_grad and local(p).numel()][:2]:
                size = [min(4, n) for n in p.shape]
                made = torch.linspace(-1, 1, math.prod(size), device=local(p).device).view(size).to(p.dtype)
                self.parameters.append(made.requires_grad_())
                self._groups.append(g)

    def step(self, step: int, *, at_once: bool) -> None:
        """Makes a step, in one call or in one for each parameter."""
        for i, p in enumerate(self.parameters):
            p.grad = torch.full_like(p, (-1.0) ** i * 10.0 ** (i % 3 - step % 3))
        numbers = range(len(self.parameters))
        calls = [list(numbers)] if at_once else [[i] for i in numbers]
        with contextlib.ExitStack() as stack:
            draws = [stack.enter_context(_undisturbed(device)) for device in {p.device for p in self.parameters}]
            self._wrapped.begin()
            for call in calls:
                self._call(call)
            self._wrapped.end()
            self.draws |= any(has_drawn() for has_drawn in draws)

    def _call(self, numbers: List[int]) -> None:
        groups: Dict[int, List[torch.Tensor]] = {}
        for i in numbers:
            groups.setdefault(self._groups[i], []).append(self.parameters[i])
        state = {self.parameters[i]: self._state[self.parameters[i]] for i in numbers if self.parameters[i] in self._state}
        self._state.update(self._wrapped.call(groups, state))

    def refuse_shared(self) -> None:
        spans = Spans()
        for parameter, entry in self._state.items():
            for path, value in flatten(entry, keep).leaves.items():
                other = spans.take(value, (parameter,)) if isinstance(value, torch.Tensor) else None
                if other is not None and other[0] is not parameter:
                    raise TypeError(
                        f"{self._name} has one tensor in the state {path!r} of several parameters: expected one for each, which "
                        f"StateOffload can hold. {_LEAVE}"
                    )

    def refuse_other_keys(self, alone: "_Trial") -> None:
        for mine, other in zip(self.parameters, alone.parameters):
            if set(self._state.get(mine, {})) != set(alone._state.get(other, {})):
                raise TypeError(
                    f"{self._name} makes another state for a parameter that it updates beside others than for one alone, by which "
                    f"StateOffload learns what its state is. {_LEAVE}"
                )

    @property
    def _name(self) -> str:
        return type(self._wrapped.optimizer).__name__

    def same_as(self, other: "_Trial") -> bool:
        pairs = list(zip(self.parameters, other.parameters))
        return (
            all(torch.equal(mine, others) for mine, others in pairs)
            and all(is_same(self._state.get(mine), other._state.get(others), by_type) for mine, others in pairs)
            and all(is_same(self._wrapped.settings_of(g), other._wrapped.settings_of(g)) for g in set(self._groups))
        )
