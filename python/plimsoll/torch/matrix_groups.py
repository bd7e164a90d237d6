"""Which parameters Muon updates, and which AdamW: parameter groups, their options, and what is refused."""

import fnmatch
import warnings
from typing import Any, Dict, Iterable, List, Optional, Sequence

import torch

from plimsoll.torch import layout
from plimsoll.torch.algorithm import OFFLOADED, TORCHS
from plimsoll.torch.newton_schulz import ADJUSTMENTS

Group = Dict[str, Any]

# What AdamW has not here, with what has it.
_INSTEAD = {"differentiable": TORCHS, "amsgrad": OFFLOADED}
_DECLARED = (None, "flatten", "stack")
_FOR_ADAMW = "put it into a group with use_muon=False, or let plimsoll.torch.muon_groups(model) make the groups"


def muon_groups(
    model: torch.nn.Module,
    *,
    head: Optional[Iterable[torch.nn.Module]] = None,
    adamw: Sequence[str] = (),
    flatten: Sequence[str] = (),
    stack: Sequence[str] = (),
) -> List[Group]:
    """Parameter groups for :class:`plimsoll.torch.Muon`: hidden matrices by Muon, all else by AdamW.

    AdamW gets embeddings, the output head, parameters of other than two dimensions, and 2-D parameters with "embed"
    in their names. The output head is what ``model.get_output_embeddings()`` returns, or else the last ``nn.Linear``.

    Args:
        model: the model; frozen parameters are left out.
        head: the modules that are the output head, () for none.
        adamw: patterns of the names of further parameters that AdamW shall have, as ["*.router.weight"].
        flatten: patterns of convolution kernels that Muon shall have as matrices of (output channels, all else).
        stack: patterns of parameters that are stacks of matrices, as fused experts are: Muon takes each by itself.
    """
    apart = {id(p) for p in layout.embeddings_of(model)}
    apart |= {id(p) for module in (heads_of(model) if head is None else head) for p in module.parameters()}
    groups: Dict[Any, Group] = {}
    unmatched = {*adamw, *flatten, *stack}

    def matches(name: str, patterns: Sequence[str]) -> bool:
        found = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        unmatched.difference_update(found)
        return bool(found)

    for name, p in model.named_parameters():
        asked = matches(name, adamw)
        declared = "flatten" if matches(name, flatten) else "stack" if matches(name, stack) else None
        if not p.requires_grad:
            continue
        hidden = p.ndim > 2 if declared else p.ndim == 2 and "embed" not in name
        by_muon = hidden and id(p) not in apart and not asked
        options = {"use_muon": True, "matrices": declared} if by_muon else {"use_muon": False}
        groups.setdefault(tuple(options.values()), {"params": [], **options})["params"].append(p)
    if unmatched:
        raise ValueError(f"no parameter of the model has a name like {', '.join(sorted(unmatched))}: expected patterns of its names")
    return sorted(groups.values(), key=lambda g: not g["use_muon"])


def heads_of(model: torch.nn.Module) -> List[torch.nn.Module]:
    """The output head of a model, as far as the model tells: a list of one module or none."""
    inner = getattr(model, "module", model)  # of DistributedDataParallel
    try:
        head = inner.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    linear = [m for m in inner.modules() if isinstance(m, torch.nn.Linear)]
    return [head] if head is not None else linear[-1:]


def checked_muon(options: Group) -> Group:
    """The options of a Muon group. Raises ValueError for those out of torch.optim.Muon's ranges."""
    if isinstance(options["lr"], torch.Tensor) and options["lr"].numel() != 1:
        raise ValueError("lr is a tensor of several elements: expected one element")
    for name in ("lr", "momentum", "weight_decay"):
        if not options[name] >= 0.0:
            raise ValueError(f"{name} is {options[name]}: expected 0 or more")
    if options["adjust_lr_fn"] not in ADJUSTMENTS:
        raise ValueError(f"adjust_lr_fn is {options['adjust_lr_fn']!r}: expected one of {', '.join(map(repr, ADJUSTMENTS))}")
    if not 0 <= options["ns_steps"] < 100:
        raise ValueError(f"ns_steps is {options['ns_steps']}: expected 0 to 99")
    if len(options["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients has {len(options['ns_coefficients'])} numbers: expected 3")
    if options["matrices"] not in _DECLARED:
        raise ValueError(f"matrices is {options['matrices']!r}: expected one of {', '.join(map(repr, _DECLARED))}")
    return options


def checked_adamw(options: Group) -> Group:
    """The options of an AdamW group, complete. Raises what torch.optim.AdamW raises, and ValueError."""
    known = torch.optim.AdamW([torch.zeros(1)]).defaults
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]} is no option of AdamW: expected one of {', '.join(known)}")
    for flag in _INSTEAD:
        if options.get(flag):
            raise ValueError(f"{flag} is True in a group of AdamW: expected False; or give these parameters {_INSTEAD[flag]}")
    taken = {k: v for k, v in options.items() if k != "decoupled_weight_decay"}
    return torch.optim.AdamW([torch.zeros(1)], **taken).defaults


def check_parameters(groups: Sequence[Group], names: Dict[torch.Tensor, str], model: Optional[torch.nn.Module]) -> None:
    """Refuses parameters that Muon cannot have, each with the reason. Warns of an output head."""
    layout.refuse_inference(groups, names)
    layout.refuse_fsdp1([p for g in groups for p in g["params"]], names)
    embeddings = {id(p) for p in layout.embeddings_of(model)}
    heads = {id(p) for m in (heads_of(model) if model is not None else ()) for p in m.parameters()}
    for group in groups:
        layout.check_types(group["params"], lambda: names)
        for p in group["params"]:
            if group["use_muon"]:
                _check_matrix(p, names[p], group["matrices"], id(p) in embeddings)
                if id(p) in heads:
                    warnings.warn(
                        f"parameter {names[p]} looks like the output head, and its group has use_muon=True: Muon is defined "
                        f"for hidden layers, and trainers leave the head to AdamW; {_FOR_ADAMW}"
                    )


def _check_matrix(parameter: torch.Tensor, name: str, declared: Optional[str], is_embedding: bool) -> None:
    shape = tuple(parameter.shape)
    if is_embedding:
        raise ValueError(
            f"parameter {name} is the weight of an embedding, or a head that is tied to one: its gradient has zero rows, which "
            f"Muon would update as much as all others; {_FOR_ADAMW}"
        )
    if parameter.ndim < 2:
        raise ValueError(
            f"parameter {name} has the shape {shape}: expected a matrix, which Muon orthogonalizes. Biases and norms have no "
            "rows and columns, and a parameter that another program has flattened (DeepSpeed's ZeRO, FSDP1) has lost them; "
            f"{_FOR_ADAMW}"
        )
    if parameter.ndim > 2 and declared is None:
        raise ValueError(
            f"parameter {name} has the shape {shape}: expected a matrix. Say in its group how it is one: matrices='flatten' for "
            "convolution kernels (output channels are the rows), matrices='stack' where the last two dimensions are a matrix "
            "each, as in fused experts; or put it into a group with use_muon=False"
        )
