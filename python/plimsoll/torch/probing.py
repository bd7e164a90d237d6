"""What an optimizer's state is made of, found out before there is any."""

import contextlib
import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll.torch.layout import is_sharded, local
from plimsoll.torch.regions import Form, Sharding
from plimsoll.torch.storages import tensors
from plimsoll.torch.wrapped import Changed, Wrapped, attributes_of, call, is_same, options_of, twin


class NumberKind(NamedTuple):
    """A number on the host: one of Python, or a tensor without dimensions."""

    number: type
    dtype: Optional[torch.dtype]


#: What a key of the state has: a tensor on the device, a number on the host, or None.
Kind = Union[Form, NumberKind, None]
_STEPS = 2  # some optimizers complete their state in the second


class Prober:
    """Asks an optimizer once for each kind of parameter and options."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._found: Dict[Any, Tuple[Dict[str, Kind], bool]] = {}

    def is_not_alone(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> bool:
        """Whether a step cannot be finished from what is held: it changes options or attributes, such as a count of steps, or
        the ranks make it together.
        """
        return self._asked(parameter, name, g, dtype)[1]

    def kinds(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> Dict[str, Kind]:
        """The state that a parameter has in group ``g``, if it is a parameter of ``dtype``."""
        state = self._optimizer.state.get(parameter)
        if state:  # it is there already
            return _kinds(parameter, state, name)
        return self._asked(parameter, name, g, dtype)[0]

    def _asked(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> Tuple[Dict[str, Kind], bool]:
        where = getattr(parameter, "placements", None)
        key = (g, tuple(parameter.shape), tuple(local(parameter).shape), local(parameter).stride(), dtype, where)
        if key not in self._found:
            self._found[key] = self._ask(parameter, name, g, dtype)
        return self._found[key]

    def _ask(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> Tuple[Dict[str, Kind], bool]:
        """Has it step a parameter that has no memory. Some optimizers read a number in between: they get a real one."""

        def state(made: Any) -> Tuple[Dict[str, Any], bool]:
            group, before = made.param_groups[g], _settings(self._optimizer, g)
            asked = like(parameter, torch.zeros_like(local(parameter).detach(), dtype=dtype)).requires_grad_()
            group["params"], found = [asked], {}
            for _ in range(_STEPS):
                asked.grad = like(parameter, torch.zeros_like(local(parameter).detach(), dtype=dtype))
                with _collectives(parameter) as count:
                    found = call(made, [group], {**found})
            changed = [k for k, v in _settings(made, g).items() if not is_same(before.get(k), v)]
            for key in changed:
                _refuse_state_outside(self._optimizer, key, made.__dict__.get(key))
            return dict(found.get(asked, {})), bool(changed) or count() > 0

        _start_autograd()
        with torch.random.fork_rng(devices=[]):
            try:
                if any(isinstance(v, torch.Tensor) for k, v in _settings(self._optimizer, g).items() if k != "lr"):
                    raise ValueError("a tensor without memory shows no change")
                made = twin(self._optimizer)
                with FakeTensorMode(allow_non_fake_inputs=True):
                    found, changes = state(made)
            except Exception:  # whatever it is: a real parameter will tell
                found, changes = state(twin(self._optimizer))
        return _kinds(parameter, found, name), changes


@contextlib.contextmanager
def _collectives(parameter: torch.Tensor) -> Iterator[Callable[[], int]]:
    """Counts what the ranks that share a DTensor do together."""
    if not is_sharded(parameter):
        yield lambda: 0
        return
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        yield mode.get_total_counts


def _settings(optimizer: Any, g: int) -> Dict[str, Any]:
    """The options of a group, and what the optimizer has in itself."""
    return {**attributes_of(optimizer), **options_of(optimizer.param_groups[g])}


def _refuse_state_outside(optimizer: Any, key: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) and any(True for _ in tensors(value)):
        raise TypeError(
            f"{type(optimizer).__name__} has tensors of its parameters in its attribute {key!r}, beside its state: expected all of "
            "them in its state, which StateOffload can hold; leave these parameters to the optimizer itself"
        )


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


def _kinds(parameter: torch.Tensor, state: Dict[str, Any], name: str) -> Dict[str, Kind]:
    return {key: _kind(parameter, key, value, name) for key, value in state.items()}


def _kind(parameter: torch.Tensor, key: str, value: Any, name: str) -> Kind:
    if value is None:
        return None
    if isinstance(value, (bool, int, float)):
        return NumberKind(type(value), None)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"the state {key!r} of {name} is a {type(value).__name__}: expected tensors and numbers, which StateOffload can hold; "
            "leave these parameters to the optimizer itself"
        )
    mine = local(value)
    if mine.layout is not torch.strided:
        raise TypeError(f"the state {key!r} of {name} is {mine.layout}: expected a dense tensor; leave it to the optimizer itself")
    if mine.device == local(parameter).device and (mine.dim() or mine.device.type != "cpu"):
        return Form.of(mine, sharding=Sharding.of(value))
    if mine.dim() == 0 and mine.device.type == "cpu" and mine.element_size() <= 8:
        return NumberKind(torch.Tensor, mine.dtype)
    raise TypeError(
        f"the state {key!r} of {name} is on {mine.device}, but its parameter is on {local(parameter).device}: expected both on "
        "one device; leave it to the optimizer itself"
    )


def refuse_dependent(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if an update depends on other parameters: if a few small ones get other bits one by one."""
    together, alone = _Trial(optimizer), _Trial(optimizer)
    for step in range(3):
        together.step(step, [list(range(len(together.parameters)))])
        try:
            alone.step(step, [[i] for i in range(len(alone.parameters))])
        except Changed:
            break
    if not together.same_as(alone):
        raise ValueError(
            f"{type(optimizer).__name__} updates a parameter by what it finds in others, so its step cannot be made chunk by "
            "chunk: use mode='whole'"
        )


class _Trial:
    """Small parameters of all groups, and an optimizer for them, which takes them in the calls of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._wrapped = Wrapped(twin(optimizer))
        self._state: Dict[torch.Tensor, Dict[str, Any]] = {}
        self.parameters: List[torch.Tensor] = []
        self._groups: List[int] = []
        for g, group in enumerate(self._wrapped.groups):
            if "lr" in group and not group["lr"]:
                group["lr"] = 1e-2  # with 0, as before a warm-up, no update depends on anything
            for p in [p for p in group["params"] if p.requires_grad and local(p).numel()][:2]:
                size = [min(4, n) for n in p.shape]
                made = torch.linspace(-1, 1, math.prod(size), device=local(p).device).view(size).to(p.dtype)
                self.parameters.append(made.requires_grad_())
                self._groups.append(g)

    def step(self, step: int, calls: List[List[int]]) -> None:
        for i, p in enumerate(self.parameters):
            p.grad = torch.full_like(p, (-1.0) ** i * 10.0 ** (i % 3 - step))
        self._wrapped.begin()
        for numbers in calls:
            groups: Dict[int, List[torch.Tensor]] = {}
            for i in numbers:
                groups.setdefault(self._groups[i], []).append(self.parameters[i])
            state = {self.parameters[i]: self._state[self.parameters[i]] for i in numbers if self.parameters[i] in self._state}
            self._state.update(self._wrapped.call(groups, state))
        self._wrapped.end()

    def same_as(self, other: "_Trial") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.parameters, other.parameters))

