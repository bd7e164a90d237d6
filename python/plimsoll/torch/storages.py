"""Bytes of tensors, each storage counted once however many tensors view it."""

from typing import Any, Dict, Iterator, List, Set, Tuple

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor: those of its parts if it is sparse, distributed or quantized."""
    kind = type(tensor)
    if kind not in _PLAIN:
        local = getattr(tensor, "_local_tensor", None)  # a DTensor
        if local is not None:
            yield from storages(local)
            return
        if hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                yield from storages(getattr(tensor, name))
            return
    if tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices().untyped_storage(), tensor._values().untyped_storage())


class Tally:
    """Sums by device and component. A storage counts for the component that it is first added to."""

    def __init__(self) -> None:
        self._seen: Set[Tuple[torch.device, int]] = set()
        self._sums: Dict[torch.device, Dict[str, List[int]]] = {}  # bytes and storages
        self._shared: List[Tuple[str, int, int]] = []  # component, first address, and the one behind the last

    def add(self, component: str, tensor: torch.Tensor) -> None:
        for storage in storages(tensor):
            self.add_storage(component, storage)

    def add_storage(self, component: str, storage: torch.UntypedStorage) -> bool:
        """Counts a storage, unless it has been counted before or has no memory. Returns whether it counts."""
        device, size = storage.device, storage.nbytes()
        if not size or device.type == "meta":
            return False
        address = storage.data_ptr()
        key = (device, address)
        if key in self._seen or device.type == "cpu" and self.is_shared(address):
            return False
        self._seen.add(key)
        self._sum(device, component, size)
        return True

    def add_shared(self, component: str, address: int, size: int, resident: int) -> None:
        """Counts the resident part of shared memory. Storages within it do not count again."""
        self._shared.append((component, address, address + size))
        if resident:
            self._sum(torch.device("cpu"), component, resident)

    def is_shared(self, address: int) -> bool:
        """Whether an address is in shared memory that was counted."""
        return any(first <= address < end for _, first, end in self._shared)

    @property
    def has_shared(self) -> bool:
        """Whether any shared memory was counted."""
        return bool(self._shared)

    def _sum(self, device: torch.device, component: str, size: int) -> None:
        sums = self._sums.setdefault(device, {}).setdefault(component, [0, 0])
        sums[0] += size
        sums[1] += 1

    def add_all(self, component: str, tree: Any) -> None:
        """Counts every tensor in lists, tuples and dictionaries."""
        for tensor in tensors(tree):
            self.add(component, tensor)

    def holdings(self, device: torch.device) -> List[Dict[str, Any]]:
        """What a device holds, as the records of ``plimsoll.samples/1`` say it."""
        return [
            {"component": component, "bytes": size, "why": f"{count} storages of tensors"}
            for component, (size, count) in self._sums.get(device, {}).items()
        ]


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)
