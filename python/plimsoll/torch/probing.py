"""What an optimizer's state is made of, found out before there is any."""

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll.torch.layout import DTensor, is_sharded, local
from plimsoll.torch.regions import Form
from plimsoll.torch.wrapped import call, options_of, same_options, twin


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

    def changes_options(self, parameter: torch.Tensor, name: str, g: int, dtype: torch.dtype) -> bool:
        """Whether a step changes the options of the parameter group, such as a count of steps."""
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

        def state() -> Tuple[Dict[str, Any], bool]:
            before = options_of(self._optimizer.param_groups[g])
            twins = twin(self._optimizer)
            asked = like(parameter, torch.zeros_like(local(parameter).detach(), dtype=dtype)).requires_grad_()
            found: Dict[Any, Any] = {}
            for _ in range(_STEPS):
                asked.grad = like(parameter, torch.zeros_like(local(parameter).detach(), dtype=dtype))
                group = {**before, "params": [asked]}
                found = call(twins, [group], {**found})
            return dict(found.get(asked, {})), not same_options(before, options_of(group))

        _start_autograd()
        with torch.random.fork_rng(devices=[]):
            try:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    found, changes = state()
            except Exception:  # whatever it is: a real parameter will tell
                found, changes = state()
        return _kinds(parameter, found, name), changes


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
    if not is_sharded(parameter):
        return elements
    return DTensor.from_local(
        elements, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


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
        return Form(*_geometry(mine), mine.dtype, _wrap_of(value))
    if mine.dim() == 0 and mine.device.type == "cpu" and mine.element_size() <= 8:
        return NumberKind(torch.Tensor, mine.dtype)
    raise TypeError(
        f"the state {key!r} of {name} is on {mine.device}, but its parameter is on {local(parameter).device}: expected both on "
        "one device; leave it to the optimizer itself"
    )


def _geometry(tensor: torch.Tensor) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    form = Form.of(tensor)
    return form.size, form.stride


def _wrap_of(value: torch.Tensor) -> Optional[Callable[[torch.Tensor], torch.Tensor]]:
    if not is_sharded(value):
        return None
    mesh, placements, shape, stride = value.device_mesh, value.placements, value.shape, value.stride()
    return lambda mine: DTensor.from_local(mine, mesh, placements, run_check=False, shape=shape, stride=stride)


def refuse_dependent(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if an update depends on other parameters: if a few small ones get other bits one by one."""
    together, alone = _Trial(optimizer), _Trial(optimizer)
    for step in range(3):
        together.step(step, [list(range(len(together.parameters)))])
        alone.step(step, [[i] for i in range(len(alone.parameters))])
    if not together.same_as(alone):
        raise ValueError(
            f"{type(optimizer).__name__} updates a parameter by what it finds in others, so its step cannot be made chunk by "
            "chunk: use mode='whole'"
        )


class _Trial:
    """Small parameters of all groups, and an optimizer for them."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer, self._state = twin(optimizer), {}
        self._options = [options_of(g) for g in optimizer.param_groups]
        self.parameters: List[torch.Tensor] = []
        self._groups: List[int] = []
        for g, group in enumerate(optimizer.param_groups):
            for p in [p for p in group["params"] if p.requires_grad and local(p).numel()][:2]:
                size = [min(4, n) for n in p.shape]
                made = torch.linspace(-1, 1, math.prod(size), device=local(p).device).view(size).to(p.dtype)
                self.parameters.append(made.requires_grad_())
                self._groups.append(g)

    def step(self, step: int, calls: List[List[int]]) -> None:
        for i, p in enumerate(self.parameters):
            p.grad = torch.full_like(p, (-1.0) ** i * 10.0 ** (i % 3 - step))
        after: Dict[int, Any] = {}
        for numbers in calls:
            groups: Dict[int, Dict[str, Any]] = {}
            for i in numbers:
                g = self._groups[i]
                groups.setdefault(g, {**self._options[g], "params": []})["params"].append(self.parameters[i])
            state = {self.parameters[i]: self._state[self.parameters[i]] for i in numbers if self.parameters[i] in self._state}
            self._state.update(call(self._optimizer, list(groups.values()), state))
            after.update((g, options_of(group)) for g, group in groups.items())
        for g, options in after.items():
            self._options[g] = options

    def same_as(self, other: "_Trial") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.parameters, other.parameters))
