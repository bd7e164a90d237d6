"""What ``optimizer.state`` shows: the state that the service holds, fetched on access."""

import collections
import collections.abc
import contextlib
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, NoReturn, Optional

import torch

from plimsoll.torch.algorithm import Algorithm
from plimsoll.torch.shard import Shard
from plimsoll.torch.slot import Slot
from plimsoll.torch.state_dict import read_entry

# Operators that write their first argument although their name does not end with an underscore.
_WRITING = frozenset(("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"))
_REFUSED = (
    "optimizer.state has copies of the service's state, and writing to them changes nothing: change a copy of "
    "optimizer.state_dict(), and load it with optimizer.load_state_dict"
)


class Copy(torch.Tensor):
    """A tensor of the state. It can be read like any other; writes raise RuntimeError."""

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        name = getattr(function, "__name__", "")
        writes = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
        first = next(iter((*arguments, *options.values())), None)
        written = [options.get("out"), first if writes else None]
        if any(isinstance(x, Copy) for given in written for x in (given if isinstance(given, (list, tuple)) else [given])):
            raise RuntimeError(_REFUSED)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.plain().clone()

    def plain(self) -> torch.Tensor:
        """The same numbers as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class Entry(Dict[str, Any]):
    """The state of one parameter, as it was on access. Assigning the value that an entry already has is allowed."""

    def __setitem__(self, key: str, value: Any) -> None:
        # Tools that move the state between devices assign the values that it already has.
        if not _is_same(self.get(key, _NOTHING), value):
            raise RuntimeError(_REFUSED)

    def __delitem__(self, key: str) -> NoReturn:
        raise RuntimeError(_REFUSED)

    def clear(self) -> None:
        raise RuntimeError(_REFUSED)

    def pop(self, *arguments: Any) -> NoReturn:
        raise RuntimeError(_REFUSED)

    def popitem(self) -> NoReturn:
        raise RuntimeError(_REFUSED)

    def update(self, *arguments: Any, **values: Any) -> None:
        for key, value in dict(*arguments, **values).items():
            self[key] = value

    __ior__ = None  # type: ignore[assignment]

    def setdefault(self, key: str, value: Any = None) -> Any:
        if key not in self:
            raise RuntimeError(_REFUSED)
        return self[key]

    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), None, None, iter(self.items())  # torch.load takes these with weights_only

    def __deepcopy__(self, memo: Any) -> Dict[str, Any]:
        return {k: v.__deepcopy__(memo) if isinstance(v, torch.Tensor) else v for k, v in self.items()}


_NOTHING = object()


def _is_same(now: Any, value: Any) -> bool:
    if now is value or not (isinstance(now, Copy) and isinstance(value, torch.Tensor)):
        return now is value
    now, value = now.plain(), value.detach().cpu()
    return now.dtype == value.dtype and now.shape == value.shape and torch.allclose(now, value, rtol=0, atol=0, equal_nan=True)


class Entries(collections.abc.MutableMapping):
    """The entries of all parameters that have a state, by parameter, fetched on access.

    As with torch it is empty, and false, before the first step: torch.distributed.checkpoint then makes one. If the
    state is divided among the ranks, it shows no entries, and raises RuntimeError for the parameters of the
    optimizer.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._shown: Optional[Dict[torch.Tensor, Dict[str, Any]]] = None

    @contextlib.contextmanager
    def showing(self, entries: Dict[torch.Tensor, Dict[str, Any]]) -> Iterator[None]:
        """Shows these entries instead, as ordinary tensors, while torch makes a state_dict of them."""
        self._shown = entries
        try:
            yield
        finally:
            self._shown = None

    def _parameters(self) -> Dict[torch.Tensor, Any]:
        """The parameters that have a state, with a reader of each one's entry."""
        if self._shown is not None:
            return {p: lambda p=p: self._shown[p] for p in self._shown}
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer._readers()

    def __getitem__(self, parameter: torch.Tensor) -> Dict[str, Any]:
        read = self._parameters().get(parameter)
        if read is None:
            optimizer = self._optimizer()
            if optimizer is not None and optimizer._has_state():
                optimizer._refuse_full_state()
            return Entry()  # like torch's, which is a defaultdict
        return read()

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._parameters()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters())

    def __len__(self) -> int:
        return len(self._parameters())

    def __bool__(self) -> bool:
        # Also where this rank has no parameters of its own.
        optimizer = self._optimizer()
        return optimizer is not None and optimizer._has_state()

    def __setitem__(self, parameter: torch.Tensor, entry: Any) -> NoReturn:
        raise RuntimeError(_REFUSED)

    def __delitem__(self, parameter: torch.Tensor) -> NoReturn:
        raise RuntimeError(_REFUSED)

    def clear(self) -> NoReturn:
        raise RuntimeError(_REFUSED)

    def pop(self, *arguments: Any) -> NoReturn:
        raise RuntimeError(_REFUSED)

    def setdefault(self, parameter: torch.Tensor, default: Any = None) -> Any:
        if parameter not in self:
            raise RuntimeError(_REFUSED)
        return self[parameter]

    def __repr__(self) -> str:
        return f"<the state of {len(self)} parameters, held by the optimizer service>"


def readers(
    shards: Iterable[Shard], algorithm: Algorithm, synchronize: Callable[[], None]
) -> Dict[torch.Tensor, Callable[[], Entry]]:
    """A reader of the entry of each parameter. It calls ``synchronize`` first."""

    def reader(shard: Shard, slot: Slot) -> Callable[[], Entry]:
        def read() -> Entry:
            synchronize()
            values = read_entry(shard, slot, algorithm)
            return Entry({k: v.as_subclass(Copy) if type(v) is torch.Tensor else v for k, v in values.items()})

        return read

    return {p: reader(shard, slot) for shard in shards for p, slot in shard.slots.items()}
