"""The kinds of overlap that an optimizer may have, and their steps."""

import weakref
from typing import Any, Optional, Union

import torch

from plimsoll.torch.delayed import Delayed
from plimsoll.torch.gradients import Gradients
from plimsoll.torch.modes import Async, ZenFlow
from plimsoll.torch.overlap import Forward, Serial
from plimsoll.torch.overlap_backward import Asked, Backward, BegunStep
from plimsoll.torch.scaling import Scaling
from plimsoll.torch.selective import Selective, SelectiveStep
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.step import Step


def overlap_of(optimizer: Any, settings: Settings, model: Optional[torch.nn.Module], lock: Any) -> Serial:
    """What the argument ``overlap`` of an optimizer asks for."""
    if isinstance(settings.overlap, Async):
        return Delayed(settings.overlap, model, lock)
    if isinstance(settings.overlap, ZenFlow):
        return Selective(settings, model, lock)
    if settings.overlap is None:
        return Serial()
    if model is None:
        raise ValueError(
            f"overlap is {settings.overlap!r}, but there is no model, whose modules wait for their parameters: give it (model=)"
        )
    if settings.overlap == "forward":
        return Forward(model, lock, settings.sharding)
    reference = weakref.ref(optimizer)
    return Backward(model, lock, lambda: asked_of(reference()))


def maximizes(optimizer: Any) -> bool:
    return bool(optimizer.param_groups[0].get("maximize"))


def asked_of(optimizer: Any) -> Asked:
    """What a step is made with that begins now, in the backward pass."""
    optimizer._check_awaited()
    optimizer._check_groups()
    speculation, awaits = optimizer._overlap.speculation, None
    if optimizer.max_grad_norm is not None:
        awaits = f"max_grad_norm is {optimizer.max_grad_norm}"
    elif speculation.is_scaled:
        awaits = "there is a GradScaler"
    return Asked(-1.0 if maximizes(optimizer) else 1.0, speculation.loss_scale, optimizer._numbers(), awaits)


def step_of(
    shards: Shards, gradients: Gradients, overlap: Serial, scaling: Scaling, max_norm: Optional[float]
) -> Union[Step, SelectiveStep, BegunStep]:
    """A step of an open optimizer."""
    if isinstance(overlap, Selective):
        return SelectiveStep(overlap, gradients, scaling, max_norm)
    if isinstance(overlap, Backward) and overlap.has_begun:
        return BegunStep(shards, overlap, scaling, max_norm)
    return Step(shards, gradients, overlap, scaling, max_norm)
