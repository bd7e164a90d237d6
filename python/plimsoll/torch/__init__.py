"""Optimizers for PyTorch whose state the optimizer service holds and updates, and :func:`watch`, which marks the phases
of a training loop for ``plimsoll run --record``.

Each optimizer takes the arguments of the torch optimizer of its name, in torch's order and with torch's defaults. Lion has the
defaults of its paper, arXiv 2302.06675. Each also has keyword options of its own: see ``help(plimsoll.torch.AdamW)``.
"""

from typing import Any, Dict, Iterable, Optional, Tuple

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "plimsoll.torch needs PyTorch, which is not installed: pip install torch", name="torch"
    ) from None

from plimsoll.torch.algorithm import Algorithm
from plimsoll.torch.arguments import (
    Gradients,
    MissingGradients,
    Moments,
    MomentsOfAdam,
    Number,
    Overlap,
    Parameters,
    Sharding,
    StateFormat,
    Tier,
    described,
)
from plimsoll.torch.matrix_groups import muon_groups
from plimsoll.torch.modes import Async, ZenFlow
from plimsoll.torch.muon import Muon
from plimsoll.torch.optimizer import Optimizer
from plimsoll.torch.state_offload import StateOffload
from plimsoll.torch.tenants import Tenants
from plimsoll.torch.watching import Watch, watch

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Async",
    "Lion",
    "Muon",
    "SGD",
    "StateOffload",
    "Tenants",
    "Watch",
    "ZenFlow",
    "muon_groups",
    "watch",
]

_MOMENTS_OF_ADAM = (
    '"fp32"; "bf16", which takes 4 bytes a parameter less; or "int8", 6 less. With "int8", tensors of less than 4096 elements '
    "keep fp32 moments, and so do embeddings where model is given."
)


@described(moments=_MOMENTS_OF_ADAM)
class Adam(Optimizer):
    """torch.optim.Adam: weight decay is added to the gradient."""

    _algorithm = Algorithm(
        reference=torch.optim.Adam,
        moments=("exp_avg", "exp_avg_sq"),
        rule=lambda group: "adamw" if group["decoupled_weight_decay"] else "adam",
        hyperparameters=lambda g: (g["lr"], *g["betas"], g["eps"], g["weight_decay"], 0, 0),
        moment_formats=("fp32", "bf16", "int8"),
    )

    def __init__(
        self,
        params: Parameters,
        lr: Number = 1e-3,
        betas: Tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: Optional[bool] = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        decoupled_weight_decay: bool = False,
        state: StateFormat = "split",
        moments: MomentsOfAdam = "fp32",
        max_grad_norm: Optional[float] = None,
        sharding: Sharding = None,
        process_group: Optional["torch.distributed.ProcessGroup"] = None,
        missing_gradients: MissingGradients = "keep",
        gradients: Gradients = "backward",
        overlap: Overlap = None,
        delta: bool = False,
        tier: Tier = None,
        memory: Optional[str] = None,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                amsgrad=amsgrad,
                maximize=maximize,
                foreach=foreach,
                capturable=capturable,
                differentiable=differentiable,
                fused=fused,
                decoupled_weight_decay=decoupled_weight_decay,
            ),
            state=state,
            moments=moments,
            max_grad_norm=max_grad_norm,
            sharding=sharding,
            process_group=process_group,
            missing_gradients=missing_gradients,
            gradients=gradients,
            overlap=overlap,
            delta=delta,
            tier=tier,
            memory=memory,
            model=model,
            named_parameters=named_parameters,
            name=name,
            job=job,
            socket=socket,
        )


@described(moments=_MOMENTS_OF_ADAM, weight_decay="is what a weight loses in a step, times lr and itself.")
class AdamW(Adam):
    """torch.optim.AdamW: weight decay shrinks the weights."""

    def __init__(
        self,
        params: Parameters,
        lr: Number = 1e-3,
        betas: Tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: Optional[bool] = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        state: StateFormat = "split",
        moments: MomentsOfAdam = "fp32",
        max_grad_norm: Optional[float] = None,
        sharding: Sharding = None,
        process_group: Optional["torch.distributed.ProcessGroup"] = None,
        missing_gradients: MissingGradients = "keep",
        gradients: Gradients = "backward",
        overlap: Overlap = None,
        delta: bool = False,
        tier: Tier = None,
        memory: Optional[str] = None,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            state=state,
            moments=moments,
            max_grad_norm=max_grad_norm,
            sharding=sharding,
            process_group=process_group,
            missing_gradients=missing_gradients,
            gradients=gradients,
            overlap=overlap,
            delta=delta,
            tier=tier,
            memory=memory,
            model=model,
            named_parameters=named_parameters,
            name=name,
            job=job,
            socket=socket,
        )

    def __setstate__(self, state: Dict[str, Any]) -> None:
        # AdamW states that older releases of torch saved do not have the flag.
        for group in state["param_groups"]:
            group["decoupled_weight_decay"] = True
        super().__setstate__(state)


@described(weight_decay="is what a weight loses in a step, times lr and itself.")
class Lion(Optimizer):
    """Lion, of arXiv 2302.06675, with decoupled weight decay."""

    _algorithm = Algorithm(
        reference=torch.optim.AdamW,  # its numbers have the ranges of AdamW's
        moments=("exp_avg",),
        rule=lambda group: "lion",
        hyperparameters=lambda g: (g["lr"], *g["betas"], 0, g["weight_decay"], 0, 0),
    )

    def __init__(
        self,
        params: Parameters,
        lr: Number = 1e-4,
        betas: Tuple[Number, Number] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        state: StateFormat = "split",
        moments: Moments = "fp32",
        max_grad_norm: Optional[float] = None,
        sharding: Sharding = None,
        process_group: Optional["torch.distributed.ProcessGroup"] = None,
        missing_gradients: MissingGradients = "keep",
        gradients: Gradients = "backward",
        overlap: Overlap = None,
        delta: bool = False,
        tier: Tier = None,
        memory: Optional[str] = None,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize),
            state=state,
            moments=moments,
            max_grad_norm=max_grad_norm,
            sharding=sharding,
            process_group=process_group,
            missing_gradients=missing_gradients,
            gradients=gradients,
            overlap=overlap,
            delta=delta,
            tier=tier,
            memory=memory,
            model=model,
            named_parameters=named_parameters,
            name=name,
            job=job,
            socket=socket,
        )


@described()
class Adagrad(Optimizer):
    """torch.optim.Adagrad."""

    _algorithm = Algorithm(
        reference=torch.optim.Adagrad,
        moments=("sum",),
        rule=lambda group: "adagrad",
        hyperparameters=lambda g: (g["lr"], 0, 0, g["eps"], g["weight_decay"], g["lr_decay"], 0),
        first_moment=lambda group: float(group["initial_accumulator_value"]),
        has_state_at_once=True,
    )

    def __init__(
        self,
        params: Parameters,
        lr: Number = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: Optional[bool] = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        state: StateFormat = "split",
        moments: Moments = "fp32",
        max_grad_norm: Optional[float] = None,
        sharding: Sharding = None,
        process_group: Optional["torch.distributed.ProcessGroup"] = None,
        missing_gradients: MissingGradients = "keep",
        gradients: Gradients = "backward",
        overlap: Overlap = None,
        delta: bool = False,
        tier: Tier = None,
        memory: Optional[str] = None,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr,
                lr_decay=lr_decay,
                eps=eps,
                weight_decay=weight_decay,
                initial_accumulator_value=initial_accumulator_value,
                maximize=maximize,
                foreach=foreach,
                differentiable=differentiable,
                fused=fused,
            ),
            state=state,
            moments=moments,
            max_grad_norm=max_grad_norm,
            sharding=sharding,
            process_group=process_group,
            missing_gradients=missing_gradients,
            gradients=gradients,
            overlap=overlap,
            delta=delta,
            tier=tier,
            memory=memory,
            model=model,
            named_parameters=named_parameters,
            name=name,
            job=job,
            socket=socket,
        )


@described()
class SGD(Optimizer):
    """torch.optim.SGD."""

    _algorithm = Algorithm(
        reference=torch.optim.SGD,
        moments=("momentum_buffer",),
        rule=lambda group: "sgd",
        hyperparameters=lambda g: (
            g["lr"], g["momentum"], 0, 0, g["weight_decay"], g["dampening"], float(g["nesterov"]),
        ),
        counts_steps=False,
    )

    def __init__(
        self,
        params: Parameters,
        lr: Number = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: Number = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: Optional[bool] = None,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        state: StateFormat = "split",
        moments: Moments = "fp32",
        max_grad_norm: Optional[float] = None,
        sharding: Sharding = None,
        process_group: Optional["torch.distributed.ProcessGroup"] = None,
        missing_gradients: MissingGradients = "keep",
        gradients: Gradients = "backward",
        overlap: Overlap = None,
        delta: bool = False,
        tier: Tier = None,
        memory: Optional[str] = None,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr,
                momentum=momentum,
                dampening=dampening,
                weight_decay=weight_decay,
                nesterov=nesterov,
                maximize=maximize,
                foreach=foreach,
                differentiable=differentiable,
                fused=fused,
            ),
            state=state,
            moments=moments,
            max_grad_norm=max_grad_norm,
            sharding=sharding,
            process_group=process_group,
            missing_gradients=missing_gradients,
            gradients=gradients,
            overlap=overlap,
            delta=delta,
            tier=tier,
            memory=memory,
            model=model,
            named_parameters=named_parameters,
            name=name,
            job=job,
            socket=socket,
        )
