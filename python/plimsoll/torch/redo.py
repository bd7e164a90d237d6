"""A held state that another process left: its parameters go into the model, and a step that it began is finished."""

import torch

from plimsoll.torch.cycle import Cycle, Memory
from plimsoll.torch.layout import local
from plimsoll.torch.probing import like
from plimsoll.torch.regions import Held
from plimsoll.torch.wrapped import Wrapped, restore


def restore_parameters(memory: Memory) -> None:
    """Copies the parameters of the held state into the model. Of a step under way, some have made it."""
    step, committed = memory.control.moment
    for i, region in enumerate(memory.layout.order(step)):
        host = memory.region(region, step + (i < committed))
        for held in region.held:
            if held.copy is not None:
                local(held.parameter).detach().copy_(held.copy.within(host))


def finish_step(memory: Memory, wrapped: Wrapped, cycle: Cycle) -> None:
    """Finishes the step under way by the code that makes all steps, with the gradients that it began with."""
    control = memory.control
    options, without = control.described_step()
    restore(wrapped.groups, options, _device(memory))
    gradients = [(h.parameter, h.parameter.grad) for h in memory.layout.held]
    try:
        for held in memory.layout.held:
            held.parameter.grad = None if held.index in without else _gradient(memory, held)
        cycle.go_on(control.moment.committed)
        cycle.settle()
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _device(memory: Memory) -> torch.device:
    return local(memory.layout.held[0].parameter).device


def _gradient(memory: Memory, held: Held) -> torch.Tensor:
    mine = held.gradient.within(memory.gradients).to(local(held.parameter).device)
    return like(held.parameter, mine)
