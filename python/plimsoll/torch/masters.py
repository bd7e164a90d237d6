"""fp32 master weights of 16-bit parameters: whole, or as the half that the parameter lacks."""

from typing import Tuple

import torch


def join(parameter: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The master weight whose upper half is a bf16 parameter, and whose lower half is ``low``, of type int16.

    Halves are copied as integers: every bit pattern comes back, those of infinities and NaNs, too.
    """
    master = torch.empty_like(low, dtype=torch.float32)
    halves = _halves(master)
    halves[0].copy_(low)
    halves[1].copy_(parameter.detach().view(torch.int16))
    return master


def split(master: torch.Tensor, parameter: torch.Tensor, low: torch.Tensor) -> None:
    """Makes the upper half of a master weight the parameter, and the lower half ``low``."""
    halves = _halves(master)
    low.copy_(halves[0])
    parameter.detach().view(torch.int16).copy_(halves[1])


def _halves(master: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper half of each element. Processors and accelerators store the lower one first."""
    halves = _flat(master).view(torch.int16)
    strides = tuple(2 * step for step in master.stride())
    first = halves.storage_offset()
    return halves.as_strided(master.shape, strides, first), halves.as_strided(master.shape, strides, first + 1)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps, in their order in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


BLOCK = 1 << 20  # elements


def follow(master: torch.Tensor, parameter: torch.Tensor, scratch: torch.Tensor) -> None:
    """Takes the elements of a parameter that the program has changed since they were rounded from ``master``.

    ``scratch`` is like ``master``, and is overwritten. Else it needs memory for one block of elements only.
    """
    scratch.copy_(parameter)
    changed = parameter.stride() != master.stride()
    parameter = torch.empty_like(master, dtype=parameter.dtype).copy_(parameter) if changed else parameter
    for held, seen, given in zip(_flat(master).split(BLOCK), _flat(parameter).split(BLOCK), _flat(scratch).split(BLOCK)):
        torch.where(held.to(seen.dtype) != seen, given, held, out=held)
