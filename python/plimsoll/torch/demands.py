"""What of an optimizer is held, and in which form: from its parameters and the settings to a layout."""

import math
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from plimsoll.torch.control import settings_bytes
from plimsoll.torch.layout import local
from plimsoll.torch.probing import NumberKind, Prober
from plimsoll.torch.regions import MASTER, MASTER_LOW, PARAMETER, Form, Layout, Scalar, Sharding, Stored, Wanted, lay_out
from plimsoll.torch.wrapped import Wrapped

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Demands(NamedTuple):
    """How the state is held: the arguments of StateOffload."""

    whole: bool
    chunk_bytes: int
    fraction: float
    master: Optional[str]
    moments: str
    recovery: bool
    #: Whether a step can be finished from what is held: see :meth:`Prober.is_alone`.
    is_alone: bool = True

    @property
    def keeps_parameters(self) -> bool:
        """Whether the arenas also have the parameters, which a load brings to the model."""
        return self.recovery and self.fraction == 1

    @property
    def recovers(self) -> bool:
        """Whether the next process can go on from the arenas alone: they then have gradients, too."""
        return self.keeps_parameters and self.is_alone

    def has_master(self, parameter: torch.Tensor) -> bool:
        return self.master is not None and parameter.dtype in _SIXTEEN_BITS

    @property
    def chunk_limit(self) -> Optional[int]:
        # A step that is made at once cannot be finished in parts. So all of it moves as one region, which leaves the
        # old state whole.
        return None if self.whole and self.recovers else self.chunk_bytes


Placed = Tuple[Demands, Layout, List[Tuple[int, torch.Tensor]]]


def demanded(wrapped: Wrapped, names: Dict[torch.Tensor, str], demands: Demands) -> Placed:
    """How the state can be held, its layout, and the parameters whose state stays on the device, with their groups."""
    optimizer, prober = wrapped.optimizer, Prober(wrapped)
    is_alone = True
    for g, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            is_alone &= not p.requires_grad or prober.is_alone(p, names[p], g, _dtype(p, demands))
    # Options that a step changes die with the process. And ranks that died at other chunks of a step that they make
    # together would not do the same when they finish it.
    demands = demands._replace(is_alone=is_alone)
    wrapped.expect_changes(prober.changed)
    wanted = [
        _wanted(p, names[p], g, prober, demands)
        for g, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p.requires_grad
    ]
    total, taken, count = sum(w.state_bytes for w in wanted), 0, 0
    while count < len(wanted) and taken < math.ceil(total * demands.fraction):
        taken += wanted[count].state_bytes
        count += 1
    if demands.fraction == 1:
        count = len(wanted)  # also those without any state
    layout = lay_out(wanted[:count], demands.chunk_limit, settings_bytes(optimizer.param_groups, count), wrapped.has_more)
    return demands, layout, [(w.group, w.parameter) for w in wanted[count:]]


def _dtype(parameter: torch.Tensor, demands: Demands) -> torch.dtype:
    """That of what the optimizer updates."""
    return torch.float32 if demands.has_master(parameter) else parameter.dtype


def _wanted(parameter: torch.Tensor, name: str, g: int, prober: Prober, demands: Demands) -> Wanted:
    mine = local(parameter).detach()
    has_master = demands.has_master(mine)
    kinds = prober.kinds(parameter, name, g, _dtype(parameter, demands))
    tensors = [Stored(path, kind, _at_rest(kind, mine, demands)) for path, kind in kinds.leaves.items() if isinstance(kind, Form)]
    scalars = [Scalar(path, kind.number, kind.dtype) for path, kind in kinds.leaves.items() if isinstance(kind, NumberKind)]
    gradient_dtype = getattr(parameter, "grad_dtype", None) or mine.dtype
    keeps_gradient = demands.recovers and not demands.whole
    return Wanted(
        parameter=parameter,
        name=name,
        group=g,
        nodes=kinds.nodes,
        tensors=tuple(tensors),
        scalars=tuple(scalars),
        master=_master(parameter, name, demands) if has_master else None,
        copy=Stored(PARAMETER, Form.of(mine), mine.dtype) if demands.keeps_parameters else None,
        gradient=Stored("gradient", Form.of(mine, gradient_dtype), gradient_dtype) if keeps_gradient else None,
    )


def _at_rest(form: Form, parameter: torch.Tensor, demands: Demands) -> torch.dtype:
    is_moment = form.dtype == torch.float32 and form.size == tuple(parameter.shape) and parameter.dim() > 0
    return torch.bfloat16 if demands.moments == "bf16" and is_moment else form.dtype


def _master(parameter: torch.Tensor, name: str, demands: Demands) -> Stored:
    form = Form.of(local(parameter).detach(), torch.float32, Sharding.of(parameter))
    if demands.master == "fp32":
        return Stored(MASTER, form, torch.float32)
    if parameter.dtype != torch.bfloat16:
        raise ValueError(
            f"master is 'split', but {name} is {parameter.dtype}, which is not the upper half of an fp32 number: use master='fp32'"
        )
    return Stored(MASTER_LOW, form, torch.int16)
