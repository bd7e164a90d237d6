"""The kinds of overlap that an optimizer may have, and their steps."""

from typing import Any, Callable, Optional, Union

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


def overlap_of(
    settings: Settings, model: Optional[torch.nn.Module], lock: Any, ask: Callable[[], Optional[Callable[[], Asked]]]
) -> Serial:
    """What the argument ``overlap`` of an optimizer asks for. ``ask`` gives what a step is made with that begins now."""
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
    return Forward(model, lock) if settings.overlap == "forward" else Backward(model, lock, ask)


def step_of(
    shards: Shards, gradients: Gradients, overlap: Serial, scaling: Scaling, max_norm: Optional[float]
) -> Union[Step, SelectiveStep, BegunStep]:
    """A step of an open optimizer."""
    if isinstance(overlap, Selective):
        return SelectiveStep(overlap, gradients, scaling, max_norm)
    if isinstance(overlap, Backward) and overlap.has_begun:
        return BegunStep(overlap)
    return Step(shards, gradients, overlap, scaling, max_norm)
