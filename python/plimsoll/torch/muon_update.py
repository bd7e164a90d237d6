"""Muon for matrices and AdamW for all other parameters, as one optimizer of torch whose state is on the device."""

from typing import Any, Callable, Dict, List, Optional

import torch
from torch.optim.adamw import adamw

from plimsoll.torch.newton_schulz import adjusted_lr, orthogonalized


class MuonUpdate(torch.optim.Optimizer):
    """The update of both kinds of parameter groups, which ``use_muon`` tells apart.

    State has torch's names: ``momentum_buffer`` of torch.optim.Muon; ``step``, ``exp_avg`` and ``exp_avg_sq`` of
    torch.optim.AdamW. Groups are complete: see :mod:`plimsoll.torch.matrix_groups`.
    """

    def __init__(self, groups: List[Dict[str, Any]]):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["use_muon"]:
                for p in parameters:
                    self._orthogonal_step(p, group)
            elif parameters:
                self._adamw_step(parameters, group)
        return loss

    def _orthogonal_step(self, parameter: torch.Tensor, group: Dict[str, Any]) -> None:
        """The operations of torch.optim.Muon in its order, with a momentum in fp32 whatever the gradient's type."""
        state, lr = self.state[parameter], float(group["lr"])
        gradient = parameter.grad.float()
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        matrices = as_matrices(update, group["matrices"])
        direction = orthogonalized(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(direction.reshape(parameter.shape), alpha=-adjusted_lr(lr, group["adjust_lr_fn"], matrices.shape))

    def _adamw_step(self, parameters: List[torch.Tensor], group: Dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states):
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def as_matrices(tensor: torch.Tensor, declared: Optional[str]) -> torch.Tensor:
    """The matrix, or the stack of matrices, that a parameter is declared to be."""
    if declared == "flatten":
        return tensor.flatten(1)
    return tensor.flatten(0, -3) if tensor.ndim > 3 else tensor
