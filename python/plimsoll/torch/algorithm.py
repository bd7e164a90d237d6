"""How the service sees an optimizer of torch, and the options of its parameter groups."""

import functools
from numbers import Real
from typing import Any, Callable, Dict, Iterable, NamedTuple, Sequence, Tuple, Type

import torch

# The range of fp32. The service treats smaller numbers as zeros.
SMALLEST, _LARGEST = 2.0**-126, torch.finfo(torch.float32).max
LARGEST_SCALE = 1 / SMALLEST
# What makes steps that the service cannot make. StateOffload has torch's own code make them.
TORCHS = "an optimizer of torch"
OFFLOADED = f"{TORCHS}, whose states plimsoll.torch.StateOffload can keep on the host"
# Features of torch's optimizers that these lack, with the reason and what has them: first what StateOffload lacks, too.
_REFUSED = {
    "differentiable": ("autograd cannot follow a step into the service", TORCHS),
    "amsgrad": ("it needs a third moment, and the service holds two", OFFLOADED),
}
# Flags of torch, with the values that apply if a parameter group does not name them and torch says nothing else.
_FLAGS = {
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
    "maximize": False,
    "amsgrad": False,
    "nesterov": False,
    "decoupled_weight_decay": False,
}
# Arguments that the constructors of torch 2.1 do not have, or check against the devices of parameters.
_UNKNOWN_TO_OLD_TORCH = ("fused", "differentiable", "decoupled_weight_decay")


Numbers = Sequence[Sequence[float]]  # seven for each parameter group, in protocol order


class Rule(NamedTuple):
    """How the states are updated, and the initial first moments of each parameter group."""

    optimizer: str
    first_moments: Sequence[float]


class Algorithm(NamedTuple):
    """What distinguishes one optimizer from the others, and which parameter groups it can make steps of.

    Its functions take a parameter group. ``name`` is the name of the optimizer, for messages.
    """

    reference: Type[torch.optim.Optimizer]  # the torch optimizer whose constructor checks the hyperparameters
    moments: Tuple[str, ...]  # what torch calls them
    rule: Callable[[Dict[str, Any]], str]  # what the protocol calls the optimizer
    hyperparameters: Callable[[Dict[str, Any]], Sequence[float]]  # the seven of a step, in protocol order
    first_moment: Callable[[Dict[str, Any]], float] = lambda group: 0.0  # what it begins with
    moment_formats: Tuple[str, ...] = ("fp32", "bf16")
    counts_steps: bool = True
    has_state_at_once: bool = False  # before a parameter's first gradient

    def checked(self, options: Dict[str, Any], name: str) -> Dict[str, Any]:
        """The options of a parameter group, as torch has them. Raises what torch's constructor raises, and
        ValueError.
        """
        if options.get("fused") and options.get("foreach"):
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self.check_flags(options, name)
        given = {option: value for option, value in options.items() if option not in _UNKNOWN_TO_OLD_TORCH}
        taken = self.reference([torch.zeros(1, device="cpu")], **given).defaults
        options = {**options, **{option: taken[option] for option in given}}
        for option, value in options.items():
            for number in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(number, (Real, torch.Tensor)):
                    _check_number(option, float(number))
        return options

    def check_group(self, groups: Sequence[Dict[str, Any]], g: int, defaults: Dict[str, Any], name: str) -> None:
        """Refuses the group ``g`` if no step could be made of it."""
        try:
            self.checked({option: groups[g][option] for option in defaults}, name)
        except ValueError as error:
            raise ValueError(f"parameter group {g}: {error}") from None
        self.check_agreement(groups)

    def check_flags(self, group: Dict[str, Any], name: str) -> None:
        for flag, (reason, instead) in _REFUSED.items():
            if group.get(flag):
                raise ValueError(
                    f"{flag} is {group[flag]}, and there is no {flag} in {name} here: {reason}. Leave it False, or "
                    f"give these parameters {instead}"
                )

    def check_agreement(self, groups: Sequence[Dict[str, Any]], opened: Iterable[str] = ()) -> None:
        """Refuses groups whose steps differ in kind from each other, or from the states that are ``opened``."""
        for option in ("maximize", "decoupled_weight_decay"):
            if len({bool(group.get(option)) for group in groups}) > 1:
                raise ValueError(
                    f"{option} is True in some parameter groups and False in others: expected one value, as all groups make "
                    "one step; give each kind an optimizer of its own (name=)"
                )
        rule = self.rule(groups[0])
        others = set(opened) - {rule}
        if others:
            raise ValueError(
                f"the parameter groups say {rule} now, but the state is one of {others.pop()}: decoupled_weight_decay was "
                "changed. Give it to the constructor"
            )

    def complete(
        self, groups: Sequence[Dict[str, Any]], defaults: Dict[str, Any], name: str, opened: Iterable[str]
    ) -> None:
        """Adds the flags that groups of an older release of torch lack, and checks all groups."""
        for group in groups:
            for flag, value in flags_of(self.reference).items():
                if flag in defaults:
                    group.setdefault(flag, value)
            self.check_flags(group, name)
        self.check_agreement(groups, opened)

    def rule_of(self, groups: Sequence[Dict[str, Any]]) -> Rule:
        return Rule(self.rule(groups[0]), [self.first_moment(group) for group in groups])

    def numbers(self, groups: Sequence[Dict[str, Any]], name: str, opened: Iterable[str]) -> Numbers:
        """The hyperparameters of a step."""
        for group in groups:
            self.check_flags(group, name)
        self.check_agreement(groups, opened)
        return [[float(x) for x in self.hyperparameters(group)] for group in groups]


@functools.lru_cache(maxsize=None)
def flags_of(reference: Type[torch.optim.Optimizer]) -> Dict[str, Any]:
    """The values that an optimizer of torch gives to flags which a loaded parameter group lacks."""
    parameter = torch.zeros(1, device="cpu")
    group: Dict[str, Any] = {"params": [parameter]}
    reference([parameter]).__setstate__({"state": {}, "param_groups": [group]})
    return {flag: group.get(flag, value) for flag, value in _FLAGS.items()}


def _check_number(name: str, value: float) -> None:
    """Refuses a hyperparameter that fp32, the type of the service's steps, cannot hold."""
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{name} is {value:g}: expected a magnitude of at most {_LARGEST:.3g}, as steps compute in fp32")
    if name == "eps" and 0 < value < SMALLEST:
        raise ValueError(f"eps is {value:g}: expected 0, or at least {SMALLEST:.3g}, as steps compute in fp32")
