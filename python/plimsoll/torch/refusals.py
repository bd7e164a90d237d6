"""What StateOffload refuses, and why."""

import inspect
from typing import Any, Callable, Dict, Sequence

import torch

from plimsoll.torch.entries import Entries
from plimsoll.torch.layout import local
from plimsoll.torch.probing import refuse_dependent
from plimsoll.torch.settings import choose
from plimsoll.torch.wrapped import plain_step

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
    for g, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(f"differentiable is True in parameter group {g}: autograd cannot follow the state to the host; {_LEAVE}")
    if chunked:
        refuse_dependent(optimizer)


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
