"""The kinds of overlap that an optimizer may have, and their steps."""

from typing import Any, Optional, Union

import torch

from plimsoll.torch.delayed import Delayed
from plimsoll.torch.gradients import Gradients
from plimsoll.torch.modes import Async, ZenFlow
from plimsoll.torch.overlap import Serial, overlap_for
from plimsoll.torch.scaling import Scaling
from plimsoll.torch.selective import Selective, SelectiveStep
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.step import Step


def overlap_of(settings: Settings, model: Optional[torch.nn.Module], lock: Any) -> Serial:
    """What the argument ``overlap`` of an optimizer asks for."""
    if isinstance(settings.overlap, Async):
        return Delayed(settings.overlap, model, lock)
    if isinstance(settings.overlap, ZenFlow):
        return Selective(settings, model, lock)
    return overlap_for(settings.overlap, model, lock)


def step_of(
    shards: Shards, gradients: Gradients, overlap: Serial, scaling: Scaling, max_norm: Optional[float]
) -> Union[Step, SelectiveStep]:
    """A step of an open optimizer."""
    if isinstance(overlap, Selective):
        return SelectiveStep(overlap, gradients, scaling, max_norm)
    return Step(shards, gradients, overlap, scaling, max_norm)
