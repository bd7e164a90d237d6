"""Temporary tensors of torch's optimizers in a step, where they are known by formula."""

from typing import Any, Dict, List, Optional, Tuple

import torch

_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def of_step(optimizer: torch.optim.Optimizer) -> Optional[Dict[str, Any]]:
    """The temporary tensors in host memory of Adam's and AdamW's step, or None if no formula is known.

    With ``foreach`` a step has the denominators of all parameters of a group and dtype at once. Without, it has those of one
    parameter, in two tensors, and a copy of its gradient for the weight decay of Adam and for ``maximize``. With
    ``foreach`` these copies are gone before the denominators come. ``fused`` has none.
    """
    if type(optimizer) not in _ADAM:
        return None
    most, why = 0, "fused: none"
    for group in optimizer.param_groups:
        if group["capturable"] or group["differentiable"]:
            return None
        sizes: Dict[torch.dtype, List[int]] = {}
        for p in group["params"]:
            if p.grad is not None and p.device.type == "cpu" and type(p) in (torch.Tensor, torch.nn.Parameter):
                sizes.setdefault(p.dtype, []).append(p.numel() * p.element_size())
        for of_dtype in sizes.values() if not group["fused"] else ():
            size, formula = _of_list(group, of_dtype)
            if size > most:
                most, why = size, formula
    return {"component": "optimizer_temporaries", "bytes": most, "why": why}


def _of_list(group: Dict[str, Any], sizes: List[int]) -> Tuple[int, str]:
    if group["foreach"]:
        return sum(sizes), f"foreach: the denominators of {len(sizes)} parameters at once"
    copies = group["maximize"] or (group["weight_decay"] and not group.get("decoupled_weight_decay", True))
    tensors = 3 if copies else 2
    return tensors * max(sizes), f"one parameter after the other: {tensors} x {max(sizes)} B for the largest"
