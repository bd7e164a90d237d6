"""The instant at which a backward pass holds most, found by looking before every operation of it."""

import collections
import functools
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from plimsoll import resident
from plimsoll.marks import Instant
from plimsoll.torch.meter import NOTICED, Holdings
from plimsoll.torch.saved import Graph, saved_by
from plimsoll.torch.storages import Tally, storages, tensors

_MOST_NODES = 5_000  # of graphs whose every operation is looked at
_NEAR = 0.9  # of the peak: the next operation may exceed it
_CPU = torch.device("cpu")


_Held = Dict[int, Tuple[str, int]]  # component and bytes of the storage at an address


class _Kept:
    """Storages that are held for the pass, as long as they live."""

    def __init__(self) -> None:
        self._living: List[Tuple[str, int, int, StorageWeakRef]] = []  # component, address, bytes

    def add(self, component: str, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cpu" and storage.nbytes():
            self._living.append((component, storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))

    def __len__(self) -> int:
        return len(self._living)

    def held(self) -> _Held:
        """What still lives. A storage counts for the component that it was first added to."""
        self._living = [kept for kept in self._living if not kept[3].expired()]
        return {address: (component, size) for component, address, size, _ in reversed(self._living)}


class BackwardPeak:
    """Looks at resident memory before every operation of a backward pass.

    Where it is near the peak, it keeps what is held then: gradients, what autograd has not freed yet, and the gradients of
    activations. Hooks on the nodes of the graph change neither their gradients nor their order.
    """

    def __init__(self, tally: Tally, parameters: List[torch.Tensor], instant: Callable[[Optional[Holdings]], Instant]):
        """``tally`` has what is held apart from the pass. ``instant`` makes an instant of holdings."""
        self._parameters, self._instant = parameters, instant
        self._tally = tally
        # Gradients come in the pass, unless they stay in shared memory from step to step.
        found = tally.holdings(_CPU)
        size = sum(p.nbytes for p in parameters if p.requires_grad)
        self._stay = any(h["component"] == "gradients" and h["bytes"] >= size for h in found) and tally.has_shared
        self._constant = [h for h in found if h["component"] != "gradients" or self._stay]
        self._kept = _Kept()
        self._handles: List[Any] = []
        self._last: Optional[_Held] = None  # before the last operation
        self._highest = 0
        self._found: Optional[Instant] = None

    def add(self, graph: Graph, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Adds to the tally what is held for the pass."""
        self._keep("batch", (s for t in inputs for s in storages(t)))
        self._keep("logits_and_loss", (s for t in outputs for s in storages(t)))
        self._keep("logits_and_loss", (s for node in graph.loss for s in saved_by(node)))
        self._keep("activations", (s for node in graph.model for s in saved_by(node)))

    def _keep(self, component: str, found: Iterable[torch.UntypedStorage]) -> None:
        for storage in found:
            if self._tally.add_storage(component, storage):
                self._kept.add(component, storage)

    def begin(self, graph: Graph) -> None:
        """Begins to look, where anything is held on the host for the pass."""
        nodes = graph.loss + graph.model
        if not len(self._kept) or len(nodes) > _MOST_NODES:
            return
        self._last, self._highest = self._held(), resident.read().peak
        edges = collections.Counter(next_node for node in nodes for next_node, _ in node.next_functions)
        self._handles = [node.register_prehook(functools.partial(self._look, edges[node] > 1)) for node in nodes]

    def end(self) -> Optional[Instant]:
        """Ends to look. Returns the instant of the peak, if it was found."""
        if self._handles:
            self._look(False, ())
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return self._found

    def _look(self, is_sum: bool, gradients: Any) -> None:
        try:
            self._look_at(is_sum, gradients)
        except Exception:  # the backward pass goes on
            self._found, self._handles, handles = None, [], self._handles
            for handle in handles:
                handle.remove()

    def _look_at(self, is_sum: bool, gradients: Any) -> None:
        """Looks before an operation that gets ``gradients``. With ``is_sum`` they are sums of gradients."""
        now = resident.read()
        found = [storage for tensor in tensors(gradients) for storage in storages(tensor)]
        for storage in found:
            self._kept.add("activation_gradients", storage)
        grown = now.peak >= self._highest + NOTICED
        if not grown and now.all < _NEAR * self._highest:
            self._last = None
            return
        here = self._held()
        if grown:
            self._highest = now.peak
            # An operation frees nothing before it has made its results, and a sum was made of two addends.
            addends = sum(storage.nbytes() for storage in found) if is_sum else 0
            self._found = self._instant(self._holdings({**(self._last or {}), **here}, addends))
        self._last = here

    def _held(self) -> _Held:
        held = self._kept.held()
        for parameter in self._parameters:
            for storage in storages(parameter.grad) if parameter.grad is not None and not self._stay else ():
                held[storage.data_ptr()] = ("gradients", storage.nbytes())
        return held

    def _holdings(self, held: _Held, addends: int) -> Holdings:
        sums = {"activation_gradients": addends} if addends else {}
        for component, size in held.values():
            sums[component] = sums.get(component, 0) + size
        why = "tensors that live in the operation of the peak"
        found = {h["component"]: h for h in self._constant}
        for component, size in sums.items():
            size += found[component]["bytes"] if component in found else 0
            found[component] = {"component": component, "bytes": size, "why": why}
        return list(found.values())
