"""The update of the parameters of a region: from the bytes in the window to the wrapped optimizer, and back."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from plimsoll.torch import masters
from plimsoll.torch.control import Control
from plimsoll.torch.layout import local
from plimsoll.torch.probing import like
from plimsoll.torch.regions import MASTER_LOW, Held, Region, Stored
from plimsoll.torch.wrapped import Wrapped

Resident = Dict[torch.Tensor, Dict[str, Any]]  # the state of parameters whose state stays on the device, by parameter


class Batch:
    """Parameters that are updated in one call of the wrapped optimizer, and their state as it takes it."""

    def __init__(self, wrapped: Wrapped, control: Optional[Control], step: int):
        self._wrapped, self._control, self._step = wrapped, control, step
        self._groups: Dict[int, List[torch.Tensor]] = {}
        self._state: Dict[torch.Tensor, Dict[str, Any]] = {}
        self._targets: List[Tuple[Held, torch.Tensor, Optional[torch.Tensor]]] = []  # with the slot's bytes

    def add(self, region: Region, memory: Optional[torch.Tensor]) -> None:
        """Takes the parameters of a region. ``memory`` is its slot, or None if none of them has a state."""
        for held in region.held:
            self._add(held, memory)

    def add_resident(self, parameters: Sequence[Tuple[int, torch.Tensor]], state: Resident) -> None:
        for g, parameter in parameters:
            self._groups.setdefault(g, []).append(parameter)
            self._state[parameter] = state.get(parameter, {})

    def _add(self, held: Held, memory: Optional[torch.Tensor]) -> None:
        has_state = memory is not None and self._control.has_state(held, self._step)
        target = held.parameter
        if held.parameter.grad is not None:
            if held.master is not None:
                target = _proxy(held, memory if has_state else None)
            if has_state:
                self._state[target] = self._entry(held, memory)
        self._groups.setdefault(held.group, []).append(target)
        self._targets.append((held, target, memory))

    def _entry(self, held: Held, memory: torch.Tensor) -> Dict[str, Any]:
        entry: Dict[str, Any] = dict.fromkeys(held.keys)
        for stored in held.tensors:
            entry[stored.key] = stored.form.whole(stored.within(memory).to(stored.form.dtype))
        for scalar in held.scalars:
            entry[scalar.key] = self._control.number(scalar, self._step)
        return entry

    def update(self) -> Dict[torch.Tensor, Dict[str, Any]]:
        """Makes the update. Returns the state that the wrapped optimizer has left."""
        if not self._groups:
            return {}
        groups = dict(sorted(self._groups.items()))
        self._state = self._wrapped.call(groups, self._state)
        return self._state

    def put_back(self, memories: Dict[int, torch.Tensor]) -> None:
        """Writes what the update has changed into the bytes of the slots, and numbers into the control arena.

        ``memories`` has the slot of each parameter, by its index. The memory that the optimizer allocated is free then.
        """
        for held, target, before in self._targets:
            if held.parameter.grad is None:
                self._control.keep_numbers(held, self._step)
                continue
            self._put_back(held, target, memories[held.index])
        self._targets, self._state = [], {}

    def _put_back(self, held: Held, target: torch.Tensor, memory: torch.Tensor) -> None:
        entry = self._state.get(target, {})
        _check_keys(held, entry)
        for stored in held.tensors:
            value, place = _of_form(held, stored, entry[stored.key]), stored.within(memory)
            if value.data_ptr() != place.data_ptr() or value.dtype != place.dtype:
                place.copy_(value)
        for scalar in held.scalars:
            self._control.set_number(scalar, self._step + 1, _of_kind(held, scalar, entry[scalar.key]))
        self._control.set_state(held, self._step + 1, True)
        if held.master is None:
            return
        mine, master, place = local(held.parameter).detach(), local(target).detach(), held.master.within(memory)
        if held.master.key == MASTER_LOW:
            masters.split(master, mine, place)
            return
        mine.copy_(master)
        if master.data_ptr() != place.data_ptr():
            place.copy_(master)


def _proxy(held: Held, memory: Optional[torch.Tensor]) -> torch.Tensor:
    """The fp32 parameter that is updated in place of a 16-bit one."""
    mine, form = local(held.parameter).detach(), held.master.form
    gradient = torch.empty_strided(form.size, form.stride, dtype=torch.float32, device=mine.device)
    if memory is None:
        master = torch.empty_like(gradient).copy_(mine)
    elif held.master.key == MASTER_LOW:
        master = masters.join(mine, held.master.within(memory))
    else:
        master = held.master.within(memory)
        masters.follow(master, mine, gradient)
    proxy = like(held.parameter, master).requires_grad_()
    proxy.grad = like(held.parameter, gradient.copy_(local(held.parameter.grad)))
    return proxy


def _check_keys(held: Held, entry: Dict[str, Any]) -> None:
    if set(entry) != set(held.keys):
        raise RuntimeError(
            f"the optimizer has the state {', '.join(sorted(entry)) or 'of no key'} for {held.name}: expected "
            f"{', '.join(held.keys) or 'none'}, as in its first two steps; its state must not grow"
        )


def _of_form(held: Held, stored: Stored, value: Any) -> torch.Tensor:
    found = local(value) if isinstance(value, torch.Tensor) else None
    if found is None or tuple(found.shape) != stored.form.size or found.dtype != stored.form.dtype:
        what = type(value).__name__ if found is None else f"{found.dtype} of {list(found.shape)}"
        raise RuntimeError(
            f"the optimizer has made the state {stored.key!r} of {held.name} {what}: expected {stored.form.dtype} of "
            f"{list(stored.form.size)}, as in its first two steps"
        )
    return found.detach()


def _of_kind(held: Held, scalar: Any, value: Any) -> Any:
    if type(value) is not scalar.number and not (scalar.dtype is not None and isinstance(value, torch.Tensor)):
        raise RuntimeError(
            f"the optimizer has made the state {scalar.key!r} of {held.name} a {type(value).__name__}: expected a "
            f"{scalar.number.__name__}, as in its first two steps"
        )
    return value
