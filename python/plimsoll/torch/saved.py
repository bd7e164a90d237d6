"""What autograd has saved for a backward pass, read off its graph without changing it."""

from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import torch

from plimsoll.torch.storages import storages, tensors

_names: Dict[type, Tuple[str, ...]] = {}  # of the saved tensors of each kind of node

# Older releases of torch do not show a saved tensor without running the hooks that somebody has put on it.
CAN_READ = hasattr(torch._C._autograd, "SavedTensor") and hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


class Graph:
    """The graph of one backward pass, from the loss to the parameters.

    ``outputs`` are the tensors that the model has returned. Nodes between the loss and them belong to the loss.
    """

    def __init__(self, roots: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]):
        starts = [t.grad_fn for t in roots if t.grad_fn is not None]
        ends = {t.grad_fn for t in outputs if t.grad_fn is not None} - set(starts)
        seen: Set[Any] = set()
        self.loss = list(_walk(starts, seen, ends)) if ends else []
        self.model = list(_walk(starts if not ends else [end for end in ends if end in self._reached(ends)], seen, set()))

    def _reached(self, ends: Set[Any]) -> Set[Any]:
        return {node for loss in self.loss for node, _ in loss.next_functions if node in ends}


def _walk(starts: Sequence[Any], seen: Set[Any], ends: Set[Any]) -> Iterator[Any]:
    """The nodes of a graph from ``starts`` on, without ``ends`` and what only they lead to."""
    waiting = [node for node in starts if node not in ends]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(n for n, _ in node.next_functions if n is not None and n not in seen and n not in ends)


def saved_by(node: Any) -> Iterator[torch.UntypedStorage]:
    """The storages that a node keeps for its backward pass."""
    kind = type(node)
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    for name in names:
        try:
            found = getattr(node, name)
        except RuntimeError:  # freed: the pass was made before
            continue
        for saved in found if isinstance(found, (list, tuple)) else (found,):
            yield from _of(saved)


def _of(saved: Any) -> Iterator[torch.UntypedStorage]:
    if saved is None:
        return
    if saved.unpack_hook is None:
        if saved.data is not None:
            yield from storages(saved.data)
        return
    # A hook has put something else there: a copy on another device, or nothing if the tensor is to be computed again.
    for tensor in tensors(saved.data):
        yield from storages(tensor)
    for cell in getattr(saved.unpack_hook, "__closure__", None) or ():
        # torch.utils.checkpoint keeps the inputs of the region.
        kept = getattr(cell.cell_contents, "input_saver", None)
        if kept is not None:
            yield from saved_by(kept)


def storages_of(nodes: List[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages that nodes keep, some more than once."""
    for node in nodes:
        yield from saved_by(node)
