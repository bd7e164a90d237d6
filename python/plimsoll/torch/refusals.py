"""What StateOffload refuses, and why."""

import inspect
import random
from typing import Any, Callable, Dict, Sequence

import torch

from plimsoll.torch.entries import Entries
from plimsoll.torch.layout import local
from plimsoll.torch.probing import refuse_dependent, refuse_shared
from plimsoll.torch.settings import choose
from plimsoll.torch.tree import Node, described, flatten, keep
from plimsoll.torch.wrapped import Setting, Wrapped, plain_step

_LEAVE = "leave it to the optimizer itself"


def check_arguments(mode: str, chunk_bytes: int, fraction: float, master: Any, moments: str) -> None:
    choose("mode", mode, ("chunked", "whole"))
    choose("master", master, ("fp32", "split", None))
    choose("moments", moments, ("fp32", "bf16"))
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes!r}: expected a number of bytes, such as 64 << 20")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction!r}: expected 0 to 1")


def refuse_optimizer(optimizer: Any, *, chunked: bool) -> None:
    """Raises for optimizers whose step StateOffload cannot make."""
    _refuse_kind(optimizer)
    for g, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(f"differentiable is True in parameter group {g}: autograd cannot follow the state to the host; {_LEAVE}")
    wrapped = Wrapped(optimizer)
    for g in range(len(optimizer.param_groups)):
        _refuse_unseen(type(optimizer).__name__, wrapped.settings_of(g))
    (refuse_dependent if chunked else refuse_shared)(wrapped)


def _refuse_kind(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer")
    name = type(optimizer).__name__
    if isinstance(optimizer.state, Entries):
        raise TypeError(f"optimizer is a {name} of plimsoll.torch, whose state is on the host already: use it without StateOffload")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(f"optimizer is a {name}, whose gradients are sparse: {_LEAVE}")
    if _asks_closure(type(optimizer)):
        raise TypeError(f"optimizer is a {name}, which calls the closure itself, several times in a step: {_LEAVE}")
    if getattr(optimizer, "is_paged", False):
        raise TypeError(f"optimizer is a {name} whose state is paged (is_paged), in memory of its own on the host: make it without")
    if any(isinstance(getattr(type(optimizer), key, None), property) for key in ("param_groups", "state")):
        raise TypeError(f"optimizer is a {name}, which shows the parameter groups or the state of another optimizer: {_LEAVE}")


_UNSEEN = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Generator, random.Random)


def _refuse_unseen(name: str, settings: Dict[Setting, Any]) -> None:
    """Refuses what has a state of its own, which steps change unseen, and what is looked up by parameter: StateOffload
    has others in their place.
    """

    def unknown(path: str, value: Any) -> Node:
        if isinstance(value, dict):
            raise TypeError(
                f"{name} has {described(value)} in {path}, beside the state of its parameters: expected what it keeps of them in their "
                f"state, which StateOffload can hold; {_LEAVE}"
            )
        if isinstance(value, _UNSEEN):
            raise TypeError(f"{name} has {described(value)} in {path}, whose state StateOffload does not see: {_LEAVE}")
        return keep(path, value)

    flatten(settings, unknown)


def _asks_closure(kind: type) -> bool:
    parameters = list(inspect.signature(plain_step(kind)).parameters.values())[1:]
    return issubclass(kind, torch.optim.LBFGS) or any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )


def refuse_sparse(groups: Sequence[Dict[str, Any]], names: Callable[[], Dict[torch.Tensor, str]]) -> None:
    """Raises TypeError for gradients that are not dense."""
    for p in (p for g in groups for p in g["params"]):
        if p.grad is not None and local(p.grad).layout is not torch.strided:
            raise TypeError(
                f"the gradient of {names()[p]} is {p.grad.layout}: expected a dense one; make it so (sparse=False), or {_LEAVE}"
            )
