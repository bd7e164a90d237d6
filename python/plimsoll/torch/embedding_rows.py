"""The rows of an embedding that a forward pass reads."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

_CHUNK = 65536  # elements that the service updates at a time
_MOST_RANGES = 64
_CANDIDATES = 256  # rows that are looked at


def ids_of(module: torch.nn.Module, arguments: Tuple[Any, ...], named: Dict[str, Any]) -> Optional[torch.Tensor]:
    """The rows that a module's forward is about to read, if it reads rows of its weight and nothing else."""
    if type(module).forward is not torch.nn.Embedding.forward or "forward" in vars(module) or module.max_norm is not None:
        return None
    ids = arguments[0] if arguments else named.get("input")
    return ids.detach() if isinstance(ids, torch.Tensor) and ids.numel() else None


def ranges_of(ids: torch.Tensor, shape: Sequence[int]) -> Optional[List[Tuple[int, int]]]:
    """The elements that have these rows of a parameter, in a few ranges: (first, count). None for the whole parameter,
    where most of it is needed.
    """
    rows, width = shape
    read = torch.unique(ids).cpu().numpy().astype(np.int64)
    if read[0] < 0 or read[-1] >= rows:
        return None  # the forward raises for it
    gaps = np.diff(read) * width
    kept = np.flatnonzero(gaps > _CHUNK)
    kept = np.sort(kept[np.argsort(gaps[kept])[-(_MOST_RANGES - 1) :]])
    first, last = np.concatenate([read[:1], read[kept + 1]]), np.concatenate([read[kept], read[-1:]])
    count = last + 1 - first
    if 2 * int(count.sum()) > rows:
        return None
    return [(f * width, c * width) for f, c in zip(first.tolist(), count.tolist())]


def has_others(gradient: torch.Tensor, ids: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient is not zero in rows beside these: then something else than a look-up has read the parameter.

    It looks at some rows only.
    """
    if gradient.layout is not torch.strided:
        return False  # the step refuses it
    number = len(gradient)
    candidates = torch.linspace(0, number - 1, min(number, _CANDIDATES), dtype=torch.float64).long()
    read = torch.cat([i.reshape(-1).to("cpu", torch.int64) for i in ids])
    beside = candidates[~torch.isin(candidates, read)]
    return bool(gradient[beside.to(gradient.device)].count_nonzero())
