"""What models and optimizers hold, by the components of Plimsoll's ledger."""

import weakref
from typing import Iterable

import numpy as np
import torch

from plimsoll import resident
from plimsoll.client import Arena
from plimsoll.torch.optimizer import Optimizer
from plimsoll.torch.storages import Tally

# States of optimizers that the ledger knows by name. Others, such as the number of steps, are optimizer_states.
_STATES = {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}
_MASTER_WEIGHTS = {"master_weights", "master_weight", "master_param"}


def count(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> Tally:
    """Counts parameters, buffers, gradients and optimizer states, each storage once.

    Parameters of an optimizer that the models do not have are master weights.
    """
    tally = Tally()
    parameters = [p for model in models for p in model.parameters()]
    known = set(map(id, parameters))
    optimizers = list(optimizers)
    masters = [p for o in optimizers for group in o.param_groups for p in group["params"] if id(p) not in known]
    for optimizer in optimizers:
        _count_arenas(tally, optimizer)
    for p in parameters:
        tally.add("parameters", p)
    for buffer in (b for model in models for b in model.buffers()):
        tally.add("buffers", buffer)
    for p in parameters:
        if p.grad is not None:
            tally.add("gradients", p.grad)
    for p in masters:
        tally.add("master_weights", p)
        if p.grad is not None:
            tally.add("master_gradients", p.grad)
    for optimizer in optimizers:
        _count_states(tally, optimizer)
    return tally


def _count_arenas(tally: Tally, optimizer: torch.optim.Optimizer) -> None:
    """Counts memory that our optimizers share with the service, as far as this process has touched it."""
    shards = optimizer._shards if isinstance(optimizer, Optimizer) else None
    for session in (*shards.sessions, *optimizer._overlap.sessions) if shards is not None else ():
        for component, arena in (("parameters", session.parameters), ("gradients", session.gradients)):
            address = np.frombuffer(arena.memory, np.uint8).ctypes.data
            tally.add_shared(component, address, arena.bytes, _resident(arena, address))


_touched: "weakref.WeakSet[Arena]" = weakref.WeakSet()  # arenas that are resident in full


def _resident(arena: Arena, address: int) -> int:
    if arena in _touched:
        return arena.bytes
    present = min(arena.bytes, resident.of_range(address, arena.bytes))
    if present == arena.bytes:
        _touched.add(arena)
    return present


def _count_states(tally: Tally, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, Optimizer):
        return  # the service holds its states, and shows copies of them
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            component = name if name in _STATES else "master_weights" if name in _MASTER_WEIGHTS else "optimizer_states"
            tally.add_all(component, value)
