"""The state of an optimizer as a tree: containers and objects, whose leaves are tensors and numbers."""

import collections
import dataclasses
import enum
import types
from typing import Any, Callable, Dict, Hashable, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch

from plimsoll.torch.layout import local

NUMBERS = (bool, int, float)
_CONSTANTS = (
    type(None), str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, slice,
    type, enum.Enum, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip
_LISTS = (list, tuple, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_SETS = (set, frozenset)
_NODES = 10_000  # of one value: a larger one refers to the program, such as its model, and is no state


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor or a number, which is found by its path."""

    path: str


@dataclasses.dataclass(frozen=True)
class Again:
    """What is at another place already: the same object."""

    path: str


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """What stays as it is: a name, a type or a function."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        one, two = self.value, other.value
        return one is two or type(one) is type(two) and isinstance(one, _CONSTANTS) and one == two


@dataclasses.dataclass(frozen=True)
class Branch:
    """A container or an object, with the keys of what it has. ``how`` is what else it is made with."""

    kind: type
    keys: Tuple[Hashable, ...]
    children: Tuple["Node", ...]
    path: str
    how: Any = None


Node = Union[Place, Again, Constant, Branch]


class Flat(NamedTuple):
    """A dict of trees as nodes, by its keys, and their leaves, by path."""

    nodes: Dict[str, Node]
    leaves: Dict[str, Any]


class Uncarried(TypeError):
    """A value that is no part of a tree."""

    def __init__(self, path: str, what: str):
        super().__init__(f"{path!r} is {what}")
        self.path, self.what = path, what


Unknown = Callable[[str, Any], Node]


def refuse(path: str, value: Any) -> Node:
    """Raises for what is no part of a tree."""
    raise Uncarried(path, described(value))


def keep(path: str, value: Any) -> Node:
    """Takes what is no part of a tree as it is."""
    return Constant(value)


def by_type(path: str, value: Any) -> Node:
    """Takes the type alone of what is no part of a tree."""
    return Constant(type(value))


def flatten(values: Mapping[Any, Any], unknown: Unknown = refuse, beside: Optional[torch.Tensor] = None) -> Flat:
    """The trees of a dict's values. ``unknown`` decides on values that are no part of a tree.

    Where these are refused, so are tensors in the memory of each other or of the parameter ``beside`` them: apart they
    would not follow each other.
    """
    walk = _Walk(unknown)
    if beside is not None:
        walk.take_span("the parameter", beside)
    return Flat({key: walk.node(value, str(key)) for key, value in values.items()}, walk.leaves)


class _Walk:
    def __init__(self, unknown: Unknown):
        self.leaves: Dict[str, Any] = {}
        self._unknown, self._nodes = unknown, 0
        self._seen: Dict[int, Tuple[str, Any]] = {}  # by id, with the value, so that it lives while its id counts
        self._spans = Spans()

    def node(self, value: Any, path: str) -> Node:
        self._nodes += 1
        if isinstance(value, NUMBERS) and type(value) in NUMBERS:
            return self._leaf(path, value)
        if isinstance(value, _CONSTANTS):
            return Constant(value)
        if id(value) in self._seen:
            return Again(self._seen[id(value)][0])
        if isinstance(value, torch.Tensor):
            if self._unknown is refuse:
                self.take_span(path, value)
            return self._leaf(path, value)
        parts = _parts(value)
        if parts is None or self._nodes > _NODES:
            return self._unknown(path, value)
        self._seen[id(value)] = path, value
        children = tuple(self.node(v, f"{path}.{k}") for k, v in zip(parts.keys, parts.values))
        return Branch(type(value), parts.keys, children, path, parts.how)

    def _leaf(self, path: str, value: Any) -> Place:
        if path in self.leaves:
            raise Uncarried(path, "the name of two parts of the state")
        self.leaves[path] = value
        if isinstance(value, torch.Tensor):
            self._seen[id(value)] = path, value
        return Place(path)

    def take_span(self, path: str, tensor: torch.Tensor) -> None:
        other = self._spans.take(tensor, path)
        if other is not None:
            raise Uncarried(path, f"in the memory of {other}")


class Spans:
    """The bytes of memory that tensors have, each with a name of its tensor."""

    def __init__(self) -> None:
        self._of: Dict[int, List[Tuple[int, int, Any]]] = {}  # by storage

    def take(self, tensor: torch.Tensor, name: Any) -> Optional[Any]:
        """Takes the bytes of a tensor. Returns the name of one that has some of them already."""
        mine = local(tensor)
        if mine.layout is not torch.strided or mine.numel() == 0:
            return None
        begin = mine.storage_offset()
        end = begin + 1 + sum((n - 1) * step for n, step in zip(mine.shape, mine.stride()))
        begin, end = begin * mine.element_size(), end * mine.element_size()
        spans = self._of.setdefault(mine.untyped_storage()._cdata, [])
        found = next((other for first, last, other in spans if begin < last and first < end), None)
        spans.append((begin, end, name))
        return found


class _Parts(NamedTuple):
    keys: Tuple[Hashable, ...]
    values: Tuple[Any, ...] = ()
    how: Any = None


def _parts(value: Any) -> Optional[_Parts]:
    """What a container or an object has, or None if it is neither."""
    kind = type(value)
    if kind in _LISTS or isinstance(value, tuple) and hasattr(kind, "_make"):
        return _Parts(tuple(range(len(value))), tuple(value), getattr(value, "maxlen", None))
    if kind in _DICTS:
        if any(isinstance(key, torch.Tensor) for key in value):
            return None
        return _Parts(tuple(value), tuple(value.values()), getattr(value, "default_factory", None))
    if kind in _SETS:
        return _Parts((), (), frozenset(value))
    if is_plain_object(value):
        return _Parts(tuple(vars(value)), tuple(vars(value).values()))
    return None


def is_plain_object(value: Any) -> bool:
    """Whether an object is made of what it has in ``__dict__`` alone, by a class that is no part of PyTorch or Python."""
    kind = type(value)
    if not hasattr(value, "__dict__") or kind.__new__ is not object.__new__:
        return False
    owners = [k for k in kind.__mro__ if k is not object]
    return not any(k.__module__.split(".")[0] in _OTHERS or k.__dict__.get("__slots__") for k in owners)


_OTHERS = {"builtins", "torch", "logging", "threading", "weakref", "functools", "plimsoll"}


def rebuild(nodes: Mapping[Any, Node], leaves: Mapping[str, Any]) -> Dict[Any, Any]:
    """The dict of which these are the trees."""
    made: Dict[str, Any] = {}
    return {key: _made(node, leaves, made) for key, node in nodes.items()}


def _made(node: Node, leaves: Mapping[str, Any], made: Dict[str, Any]) -> Any:
    if isinstance(node, Constant):
        return node.value
    if isinstance(node, Place):
        return leaves[node.path]
    if isinstance(node, Again):
        return made[node.path] if node.path in made else leaves[node.path]
    found = _empty(node)
    if found is not None:  # before what it has, which may lead back to it
        made[node.path] = found
    children = [_made(child, leaves, made) for child in node.children]
    if isinstance(found, (list, collections.deque)):
        found.extend(children)
    elif isinstance(found, dict):
        found.update(zip(node.keys, children))
    elif found is None:
        found = made[node.path] = node.kind._make(children) if hasattr(node.kind, "_make") else tuple(children)
    elif not isinstance(found, _SETS):
        vars(found).update(zip(node.keys, children))
    return found


def _empty(node: Branch) -> Any:
    """A container or an object without what it has, or None for a tuple, which is made of that."""
    if issubclass(node.kind, tuple):
        return None
    if node.kind is collections.defaultdict:
        return collections.defaultdict(node.how)
    if node.kind is collections.deque:
        return collections.deque(maxlen=node.how)
    if node.kind in _SETS:
        return node.kind(node.how)
    return object.__new__(node.kind) if node.kind not in (*_LISTS, *_DICTS) else node.kind()


def branches(node: Node) -> List[Branch]:
    """All containers and objects of a tree."""
    return [node, *(b for child in node.children for b in branches(child))] if isinstance(node, Branch) else []


def difference(found: Node, expected: Node, path: str) -> str:
    """Where two trees differ first: a path, and what is there."""
    if isinstance(found, Branch) and isinstance(expected, Branch) and (found.kind, found.keys, found.how) == (
        expected.kind, expected.keys, expected.how,
    ):  # fmt: skip
        for key, mine, other in zip(found.keys, found.children, expected.children):
            if mine != other:
                return difference(mine, other, f"{path}.{key}")
    return f"{path!r}, which is {_what(found)}: expected {_what(expected)}"


def _what(node: Node) -> str:
    if isinstance(node, Branch):
        return f"a {node.kind.__name__} of {len(node.keys)}"
    if isinstance(node, Again):
        return f"the same as {node.path!r}"
    return repr(node.value) if isinstance(node, Constant) else "a tensor or a number"


def described(value: Any) -> str:
    """What a value is, in the words of messages."""
    if isinstance(value, dict) and any(isinstance(key, torch.Tensor) for key in value):
        return "a dict with parameters for keys"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


# Trees as values


def copied(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Values that may be changed without a change of these: containers, objects, and tensors of few elements."""
    flat = flatten(values, keep)
    return rebuild(flat.nodes, {p: _copied(v) for p, v in flat.leaves.items()})


SMALL = 1024  # the elements of a tensor that counts as a number, and not as state of parameters


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() <= SMALL and not value.requires_grad:
        return value.detach().clone()
    return value


def is_same(one: Any, other: Any, unknown: Unknown = keep) -> bool:
    """Whether two trees have the same containers, objects, numbers and tensors."""
    if one is other:
        return True
    (a, mine), (b, others) = flatten({"": one}, unknown), flatten({"": other}, unknown)
    return a == b and mine.keys() == others.keys() and all(_is_same(mine[path], others[path]) for path in mine)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and (one == other or one != one and other != other)
