"""Optimizers for PyTorch whose state the optimizer service holds and updates.

Each takes the arguments of torch's optimizer of its name (Lion: of its paper,
arXiv 2302.06675), and these:

``state``: how bf16 parameters are held: "split", where parameter and 16 more
bits are the fp32 master weight, or "fp32", a master weight beside. fp32
parameters are their own master weights, fp16 ones always have one beside.

``moments``: "fp32"; "bf16", which takes 4 bytes a parameter less with Adam's
two; or "int8", 6 less, for Adam and AdamW.

``max_grad_norm``: clips to this norm of all gradients, as
torch.nn.utils.clip_grad_norm_ does, and skips a step whose gradients are not
finite.

``sharding``: None; "zero1", where each rank of ``process_group`` holds a part of
the state and gradients are the same on all ranks (DDP); "zero2", where the
optimizer averages gradients itself and each rank keeps those of its part.
Without it, the ranks of ``process_group`` (where ``model`` is wrapped by
DistributedDataParallel: of that) hold copies of one state.
Parameters that fully_shard has sharded are held as they are, also where it has
replicated the shards (HSDP).

``missing_gradients``: "refuse" or "zero", for parameters without one.

``gradients``: "backward" takes gradients as the backward pass computes them; "step"
takes them in the step alone, however the program has written them until then.

``model`` or ``named_parameters``: for names in checkpoints.

``name``: where one program has several optimizers, each but one needs a name.

``job`` and ``socket``: of the service; $PLIMSOLL_JOB and $PLIMSOLL_SOCKET where
they are not given. Without a socket each process starts a service of its own.
"""

from typing import Any, Dict, Sequence, Tuple

from plimsoll.torch.optimizer import Optimizer

__all__ = ["Adagrad", "Adam", "AdamW", "Lion", "SGD"]


class AdamW(Optimizer):
    """torch.optim.AdamW."""

    _name, _moments = "adamw", ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **options)

    def _hyperparameters(self, group: Dict[str, Any]) -> Sequence[float]:
        return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], 0, 0)


class Adam(AdamW):
    """torch.optim.Adam: weight decay is added to the gradient."""

    _name = "adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class Lion(Optimizer):
    """Lion, of arXiv 2302.06675, with decoupled weight decay."""

    _name, _moments = "lion", ("exp_avg",)

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, **options: Any
    ):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **options)

    def _hyperparameters(self, group: Dict[str, Any]) -> Sequence[float]:
        return (group["lr"], *group["betas"], 0, group["weight_decay"], 0, 0)


class Adagrad(Optimizer):
    """torch.optim.Adagrad, with an initial accumulator value of 0."""

    _name, _moments = "adagrad", ("sum",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        **options: Any,
    ):
        super().__init__(params, dict(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps), **options)

    def _hyperparameters(self, group: Dict[str, Any]) -> Sequence[float]:
        return (group["lr"], 0, 0, group["eps"], group["weight_decay"], group["lr_decay"], 0)


class SGD(Optimizer):
    """torch.optim.SGD."""

    _name, _moments = "sgd", ("momentum_buffer",)
    _counts_steps = False
    _refused = ("maximize",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ):
        super().__init__(
            params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov), **options
        )

    def _hyperparameters(self, group: Dict[str, Any]) -> Sequence[float]:
        return (group["lr"], group["momentum"], 0, 0, group["weight_decay"], group["dampening"], float(group["nesterov"]))
