"""A held state as the entries of torch's state_dict, on the host, and back."""

from typing import Any, Dict, Iterable, Optional

import torch

from plimsoll.torch import masters
from plimsoll.torch.cycle import Memory
from plimsoll.torch.layout import local
from plimsoll.torch.regions import MASTER, MASTER_LOW, Held, Region
from plimsoll.torch.tree import Uncarried, difference, flatten, rebuild


def read(memory: Memory, region: Region, held: Held) -> Dict[str, Any]:
    """The entry of a parameter: what the wrapped optimizer would have, and its master weight. Empty without a state."""
    control, step = memory.control, memory.control.step
    if not control.has_state(held, step):
        return {}
    host = memory.region(region, step)
    leaves: Dict[str, Any] = {s.key: s.form.whole(s.within(host).to(s.form.dtype, copy=True)) for s in held.tensors}
    leaves.update((scalar.key, control.number(scalar, step)) for scalar in held.scalars)
    entry = rebuild(held.nodes, leaves)
    if held.master is not None:
        place = held.master.within(host)
        split = held.master.key == MASTER_LOW
        entry[MASTER] = masters.join(local(held.parameter).detach().cpu(), place) if split else place.clone()
    return entry


def check(held: Held, entry: Dict[str, Any]) -> None:
    """Raises ValueError where an entry is not of this parameter and optimizer."""
    missing = sorted(set(held.nodes) - set(entry))
    if missing:
        raise ValueError(f"the state of {held.name} lacks {', '.join(missing)}: expected the state of an optimizer of the same class")
    others = sorted(set(entry) - set(held.nodes) - {MASTER})
    if others:
        raise ValueError(
            f"the state of {held.name} has also {', '.join(others)}: expected the state of an optimizer with the same options; make "
            "StateOffload of one that has the options of the saved one"
        )
    leaves = _leaves(held, entry)
    for stored in held.tensors:
        value = leaves[stored.key]
        shape = tuple(local(value).shape) if isinstance(value, torch.Tensor) else None
        if shape != stored.form.size:
            raise ValueError(
                f"the state {stored.key!r} of {held.name} has the shape {shape and list(shape)}: expected {list(stored.form.size)}"
            )


def _leaves(held: Held, entry: Dict[str, Any]) -> Dict[str, Any]:
    """The tensors and numbers of an entry. Raises ValueError where it is made otherwise than this optimizer's."""
    try:
        found = flatten({key: entry[key] for key in held.nodes})
    except Uncarried as error:
        raise ValueError(f"the state {error.path!r} of {held.name} is {error.what}: expected the state of an optimizer of the same class") from None
    for key, node in found.nodes.items():
        if node != held.nodes[key]:
            raise ValueError(
                f"the state of {held.name} differs at {difference(node, held.nodes[key], key)}, as of an optimizer of the same class "
                "and options"
            )
    return found.leaves


def step_of(entries: Iterable[Dict[str, Any]]) -> int:
    """The step of a state, if the optimizer counts steps in it; else 0."""
    return max((int(entry["step"]) for entry in entries if "step" in entry), default=0)


def on_device(entries: Dict[torch.Tensor, Dict[str, Any]], parameters: Iterable[torch.Tensor]) -> Dict[torch.Tensor, Dict[str, Any]]:
    """The entries of parameters whose state stays on the device."""
    return {p: {k: _beside(p, v) for k, v in entries[p].items() if k != MASTER} for p in parameters if entries.get(p)}


def _beside(parameter: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 and value.device.type == "cpu":
        return value
    return value.detach().to(local(parameter).device, copy=True)


def write(memory: Memory, region: Region, held: Held, entry: Optional[Dict[str, Any]], step: int) -> None:
    """Writes an entry as the state of a parameter after ``step`` steps."""
    control, host = memory.control, memory.region(region, step)
    control.set_state(held, step, bool(entry))
    if held.copy is not None:
        held.copy.within(host).copy_(local(held.parameter).detach())
    if not entry:
        return
    leaves = _leaves(held, entry)
    for stored in held.tensors:
        stored.within(host).copy_(local(leaves[stored.key]).detach())
    for scalar in held.scalars:
        control.set_number(scalar, step, _number(scalar, leaves[scalar.key]))
    if held.master is not None:
        _write_master(held, entry.get(MASTER), held.master.within(host))


def _number(scalar: Any, value: Any) -> Any:
    if scalar.dtype is not None:
        return torch.as_tensor(value).detach().cpu().to(scalar.dtype).reshape(())
    return scalar.number(value)


def _write_master(held: Held, given: Optional[torch.Tensor], place: torch.Tensor) -> None:
    """A master weight that was saved, or else the parameter itself."""
    mine = local(held.parameter).detach()
    master = torch.empty_strided(held.master.form.size, held.master.form.stride, dtype=torch.float32)
    master.copy_(mine if given is None else local(given))
    if held.master.key == MASTER_LOW:
        masters.split(master, torch.empty_like(master, dtype=torch.bfloat16), place)
    else:
        place.copy_(master)
