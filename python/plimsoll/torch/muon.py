"""Muon for the matrices of hidden layers and AdamW for the rest, in one optimizer."""

from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Tuple

import torch

from plimsoll.torch import layout, newton_schulz
from plimsoll.torch.arguments import Number, Parameters, Sharding
from plimsoll.torch.matrix_groups import check_parameters, checked_adamw, checked_muon
from plimsoll.torch.muon_update import MuonUpdate
from plimsoll.torch.owned_step import OwnedStep
from plimsoll.torch.ranks import mesh_for


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for parameter groups with ``use_muon=True``, torch.optim.AdamW for those with
    ``use_muon=False``.

    A group that does not say is one of Muon. :func:`plimsoll.torch.muon_groups` makes the groups of a model.
    """

    def __init__(
        self,
        params: Parameters,
        lr: Number = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Tuple[float, float, float] = newton_schulz.COEFFICIENTS,
        eps: float = newton_schulz.EPS,
        ns_steps: int = newton_schulz.STEPS,
        adjust_lr_fn: Optional[str] = None,
        *,
        adamw: Optional[Mapping[str, Any]] = None,
        max_grad_norm: Optional[float] = None,
        sharding: Sharding = None,
        process_group: Optional["torch.distributed.ProcessGroup"] = None,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}: expected a number above 0, or None not to clip")
        if sharding not in (None, "zero1", "zero2"):
            raise ValueError(f"sharding is {sharding!r}: expected one of None, 'zero1', 'zero2'")
        options = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            matrices=None,
        )
        self._options = {True: checked_muon(options), False: checked_adamw(dict(adamw or {}))}
        self._model, self._named = model, list(named_parameters) if named_parameters is not None else None
        self._sharding, self._process_group = sharding, process_group
        self._together: Optional[OwnedStep] = None  # while the optimizer is open
        self._update: Optional[MuonUpdate] = None  # as long
        super().__init__(params, {})
        self.max_grad_norm = max_grad_norm
        #: Steps that were not made, because gradients were not finite.
        self.skipped = 0
        #: The norm of all gradients at the last step, before clipping; None where it was not asked for.
        self.last_grad_norm: Optional[float] = None

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a parameter group, until the state exists."""
        if self._together is not None:
            raise RuntimeError(
                "add_param_group: the state is already in memory of exactly its size: add all groups before the first step"
            )
        by_muon = bool(param_group.get("use_muon", True))
        given = {k: v for k, v in param_group.items() if k not in ("params", "param_names", "use_muon")}
        options = {**self._options[by_muon], **given}
        checked = checked_muon(options) if by_muon else checked_adamw(options)
        super().add_param_group({**param_group, **checked, "use_muon": by_muon})
        try:
            check_parameters(self.param_groups[-1:], self._names(), self._model)
        except BaseException:
            self.param_groups.pop()
            raise

    def _names(self) -> Dict[torch.Tensor, str]:
        return layout.names_of(self.param_groups, self._named, self._model)

    def open(self) -> None:
        if self._together is not None:
            return
        names, parameters = self._names(), [p for g in self.param_groups for p in g["params"]]
        mesh = mesh_for(parameters, names, self._sharding, self._process_group, self._model)
        self._together = OwnedStep(self.param_groups, names, mesh, reduces=self._sharding == "zero2")
        self._update = MuonUpdate(self._together.own_groups(self.param_groups))

    def close(self) -> None:
        if self._together is not None:
            self._together.release()
            self._together = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``sharding="zero2"`` it discards the gradients that were sent to their owners."""
        super().zero_grad(set_to_none)
        if self._together is not None:
            self._together.discard()

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.open()
        together = self._together
        together.trained.check_groups(self.param_groups)
        prepared = together.prepare(0, self.max_grad_norm is not None, None)
        self.last_grad_norm = prepared.norm
        if prepared.is_finite:
            prepared.clip(self.max_grad_norm)
            for own, group in zip(self._update.param_groups, self.param_groups):
                own.update({k: v for k, v in group.items() if k != "params"})
            self._update.step()
            together.publish()
        else:
            self.skipped += 1
        together.over()
        return loss
