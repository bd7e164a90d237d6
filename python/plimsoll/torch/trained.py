"""The parameters of an optimizer, as they were when it was opened."""

import operator
from typing import Any, Dict, List, Sequence, Tuple

import torch

from plimsoll.torch import layout

_REGROUPED = (
    "when the optimizer was opened, and the state belongs to those parameters. Close the optimizer, and make a new one of "
    "the parameters to train from now on"
)

_CONVERTED = (
    "when the optimizer was opened (model.to(), or an assignment to its data), and the state belongs to that. Convert the model before "
    "the first step, or close the optimizer, and make a new one"
)


class Trained:
    """The parameters that have a state, and those that had none because they were frozen. Raises for parameters that
    cannot be trained.
    """

    def __init__(self, groups: Sequence[Dict[str, Any]], names: Dict[torch.Tensor, str]):
        layout.refuse_inference(groups, names)
        everything = [p for g in groups for p in g["params"]]
        layout.refuse_fsdp1(everything, names)
        self.parameters = [p for p in everything if p.requires_grad]
        self._names = names
        self._frozen = [p for p in everything if not p.requires_grad]
        self._groups: List[List[torch.Tensor]] = [list(g["params"]) for g in groups]
        self._forms = [_form(p) for p in self.parameters]

    @property
    def are_sharded(self) -> bool:
        return any(map(layout.is_sharded, self.parameters))

    @property
    def device(self) -> torch.device:
        devices = {layout.local(p).device for p in self.parameters}
        if len(devices) > 1:
            raise ValueError(
                f"parameters are on {', '.join(sorted(map(str, devices)))}: expected one device; give each an optimizer of its own"
            )
        return devices.pop() if devices else torch.device("cpu")

    def check_memory(self) -> None:
        layout.check_memory(self.parameters, self._names)

    def check_groups(self, groups: Sequence[Dict[str, Any]]) -> None:
        """Refuses parameter groups whose parameters differ from those that the state was made for."""
        if len(groups) != len(self._groups):
            raise RuntimeError(f"there are {len(groups)} parameter groups; there were {len(self._groups)} {_REGROUPED}")
        for g, (group, opened) in enumerate(zip(groups, self._groups)):
            if len(group["params"]) != len(opened) or any(map(operator.is_not, group["params"], opened)):
                raise RuntimeError(f"parameter group {g} has other parameters than {_REGROUPED}")

    def check_forms(self) -> None:
        """Refuses parameters that are of another type or shape than the state was made for, or on another device."""
        for parameter, opened in zip(self.parameters, self._forms):
            found = _form(parameter)
            if found != opened:
                raise RuntimeError(
                    f"parameter {self._names[parameter]} is {_described(found)}, and was {_described(opened)} {_CONVERTED}"
                )

    def check_frozen(self) -> None:
        """Refuses gradients of parameters that were frozen."""
        thawed = sorted(self._names[p] for p in self._frozen if p.requires_grad and p.grad is not None)
        if thawed:
            raise RuntimeError(
                f"{len(thawed)} parameters have a gradient and were frozen when the optimizer was opened, {thawed[0]} among "
                "them: there is no state for them. Call optimizer.open() before parameters are frozen: a step leaves those "
                "without a gradient alone. Or close it now, and make a new one of all parameters that are trained; state_dict() "
                "takes the others' state along"
            )


def _form(parameter: torch.Tensor) -> Tuple[torch.dtype, Tuple[int, ...], torch.device]:
    mine = layout.local(parameter)
    return parameter.dtype, tuple(parameter.shape), mine.device


def _described(form: Tuple[torch.dtype, Tuple[int, ...], torch.device]) -> str:
    dtype, shape, device = form
    return f"{dtype} of {list(shape)} on {device}"
