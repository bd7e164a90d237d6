"""The update of the parameters of a region: from the bytes in the window to the wrapped optimizer, and back."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from plimsoll.torch import masters
from plimsoll.torch.control import Control
from plimsoll.torch.layout import local
from plimsoll.torch.probing import like
from plimsoll.torch.regions import MASTER_LOW, Held, Region, Sharding, Stored
from plimsoll.torch.tree import Uncarried, difference, flatten, rebuild
from plimsoll.torch.wrapped import Wrapped

Resident = Dict[torch.Tensor, Dict[str, Any]]  # the state of parameters whose state stays on the device, by parameter


class Batch:
    """Parameters that are updated in one call of the wrapped optimizer, and their state as it takes it."""

    def __init__(self, wrapped: Wrapped, control: Optional[Control], step: int):
        self._wrapped, self._control, self._step = wrapped, control, step
        self._name = type(wrapped.optimizer).__name__
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
        leaves: Dict[str, Any] = {s.key: s.form.whole(s.within(memory).to(s.form.dtype)) for s in held.tensors}
        leaves.update((scalar.key, self._control.number(scalar, self._step)) for scalar in held.scalars)
        return rebuild(held.nodes, leaves)

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
        leaves = _leaves(self._name, held, self._state.get(target, {}), target)
        moved = [(v, p) for v, p in _values(self._name, held, leaves, memory) if v.data_ptr() != p.data_ptr() or v.dtype != p.dtype]
        slot = memory.untyped_storage().data_ptr()
        # Optimizers may exchange the tensors of two keys: none may be overwritten before it is read.
        moved = [(v.clone() if v.untyped_storage().data_ptr() == slot else v, p) for v, p in moved]
        for value, place in moved:
            place.copy_(value)
        for scalar in held.scalars:
            self._control.set_number(scalar, self._step + 1, _of_kind(self._name, held, scalar, leaves[scalar.key]))
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


def _leaves(name: str, held: Held, entry: Dict[str, Any], target: torch.Tensor) -> Dict[str, Any]:
    """The tensors and numbers of an entry that is made as in the first two steps."""
    if set(entry) != set(held.nodes):
        raise RuntimeError(
            f"{name} has the state {', '.join(sorted(entry)) or 'of no key'} for {held.name}: expected "
            f"{', '.join(held.nodes) or 'none'}, as in its first two steps; its state must not grow"
        )
    try:
        found = flatten({key: entry[key] for key in held.nodes}, beside=target)
    except Uncarried as error:
        raise RuntimeError(
            f"{name} has made the state {error.path!r} of {held.name} {error.what}: expected what it was in its first two steps"
        ) from None
    for key, node in found.nodes.items():
        if node != held.nodes[key]:
            raise RuntimeError(
                f"{name} has changed the state {difference(node, held.nodes[key], key)}, for {held.name}, as in its first two "
                "steps; its state must not grow"
            )
    return found.leaves


def _values(name: str, held: Held, leaves: Dict[str, Any], memory: torch.Tensor) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that the optimizer has left, with their places in the slot."""
    return [(_of_form(name, held, stored, leaves[stored.key]), stored.within(memory)) for stored in held.tensors]


def _of_form(name: str, held: Held, stored: Stored, value: Any) -> torch.Tensor:
    found = local(value) if isinstance(value, torch.Tensor) else None
    if found is None or tuple(found.shape) != stored.form.size or found.dtype != stored.form.dtype:
        what = type(value).__name__ if found is None else f"{found.dtype} of {list(found.shape)}"
        raise RuntimeError(
            f"{name} has made the state {stored.key!r} of {held.name} {what}: expected {stored.form.dtype} of "
            f"{list(stored.form.size)}, as in its first two steps"
        )
    if Sharding.of(value) != stored.form.sharding:
        raise RuntimeError(f"{name} has sharded the state {stored.key!r} of {held.name} in another way than in its first two steps")
    return found.detach()


def _of_kind(name: str, held: Held, scalar: Any, value: Any) -> Any:
    found, expected = getattr(value, "dtype", None) or type(value).__name__, scalar.dtype or scalar.number.__name__
    if found != expected:
        raise RuntimeError(
            f"{name} has made the state {scalar.key!r} of {held.name} a {found}: expected a {expected}, as in its first two steps"
        )
    return value
