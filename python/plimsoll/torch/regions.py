"""Where the state of an optimizer lies: in regions, one for each chunk of parameters, of an arena.

The arena is larger than all regions by a gap, the size of the largest region. Each step moves every region over the
gap and back: the new state of a chunk overwrites only what is dead, and never the chunk's own old state.
"""

import dataclasses
import math
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from plimsoll import states
from plimsoll.torch.layout import DTensor, is_sharded
from plimsoll.torch.masters import BLOCK
from plimsoll.torch.tree import Node

ALIGNMENT = 256  # of each tensor in a region, in bytes
COUNTER = 512  # bytes of the device for the number of committed regions
MASTER, MASTER_LOW, PARAMETER = "master_weights", "master_weights_low", "parameter"


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a DTensor is made of the parts that the ranks have."""

    mesh: Any
    placements: Tuple[Any, ...]
    shape: Tuple[int, ...]
    stride: Tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Optional["Sharding"]:
        if not is_sharded(tensor):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tuple(tensor.stride()))

    def whole(self, mine: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(mine, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride)

    @property
    def even_elements(self) -> int:
        """The elements of each rank, if all had as many."""
        return -(-math.prod(self.shape) // self.mesh.size())


@dataclasses.dataclass(frozen=True)
class Form:
    """What a tensor of this rank is like. Where it is the local part of a DTensor, it has a ``sharding``."""

    size: Tuple[int, ...]
    stride: Tuple[int, ...]
    dtype: torch.dtype
    sharding: Optional[Sharding] = None

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: Optional[torch.dtype] = None, sharding: Optional[Sharding] = None) -> "Form":
        """The form of a local tensor, with its strides if they leave no gaps."""
        size = tuple(tensor.shape)
        dense = torch.empty_strided(size, tensor.stride(), device="meta")
        kept = dense.numel() == 0 or dense.untyped_storage().nbytes() == dense.nbytes and _distinct(tensor)
        stride = tensor.stride() if kept else torch.empty(size, device="meta").stride()
        return cls(size, tuple(stride), dtype or tensor.dtype, sharding)

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.sharding is None else self.sharding.whole(tensor)


def _distinct(tensor: torch.Tensor) -> bool:
    return not any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride()))


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a region: as the optimizer has it (``form``), and at rest (``dtype``). ``key`` is its path in the state."""

    key: str
    form: Form
    dtype: torch.dtype
    offset: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.form.size) * self.dtype.itemsize

    @property
    def even_bytes(self) -> int:
        """The bytes of each rank, if all had as many elements."""
        return self.bytes if self.form.sharding is None else self.form.sharding.even_elements * self.dtype.itemsize

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor itself, in the bytes of its region."""
        found = memory[self.offset : self.offset + self.bytes].view(self.dtype)
        return found.as_strided(self.form.size, self.form.stride)


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A number of the state that is on the host, at ``place`` in the table of numbers. ``dtype`` is None for a number
    of Python, of type ``number``.
    """

    key: str
    number: type
    dtype: Optional[torch.dtype]
    place: int = 0


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter whose state is held, and where."""

    index: int
    parameter: torch.Tensor
    name: str
    group: int
    nodes: Mapping[str, Node]  # the trees of the state, by key, in the optimizer's order
    tensors: Tuple[Stored, ...]
    scalars: Tuple[Scalar, ...]
    master: Optional[Stored]
    copy: Optional[Stored]  # of the parameter
    gradient: Optional[Stored]  # in the arena of gradients
    flag: int  # the place of the number that is 1 once the parameter has a state


@dataclasses.dataclass(frozen=True)
class Region:
    """The state of a chunk of parameters. The first ``device_bytes`` also come to the device."""

    index: int
    held: Tuple[Held, ...]
    device_bytes: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """All regions, in the order of the parameters. ``places`` is where each is, step by step."""

    regions: Tuple[Region, ...]
    places: states.Layout
    gradients_bytes: int
    settings_bytes: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to hold."""
        return self.places.gap == 0

    @property
    def held(self) -> List[Held]:
        return [h for region in self.regions for h in region.held]

    def order(self, step: int) -> List[Region]:
        """The order in which the step after ``step`` steps takes the regions."""
        return [self.regions[self.places.next(states.Moment(step, i))] for i in range(len(self.regions))]

    def begin(self, region: Region, step: int) -> int:
        """Where the region begins at rest after ``step`` steps."""
        return self.places.offset(region.index, step)


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A parameter before it has a place: what its state is made of."""

    parameter: torch.Tensor
    name: str
    group: int
    nodes: Mapping[str, Node]
    tensors: Tuple[Stored, ...]
    scalars: Tuple[Scalar, ...]
    master: Optional[Stored]
    copy: Optional[Stored]
    gradient: Optional[Stored]

    @property
    def state_bytes(self) -> int:
        """The bytes of its state by which chunks are cut. They are the same on all ranks, as the ranks must take DTensors in
        the same order: some updates of them are collective.
        """
        return sum(padded(t.even_bytes) for t in (*self.tensors, self.master) if t is not None)


def lay_out(wanted: Sequence[Wanted], chunk_bytes: Optional[int], settings_bytes: int, has_more: bool = False) -> Layout:
    """Cuts parameters into chunks of at most ``chunk_bytes`` of state, or into one where that is None. The optimizer
    ``has_more`` where it also has a state beside that of its parameters.
    """
    regions: List[Region] = []
    numbers, gradients, index = 0, 0, 0
    for chunk in _chunks(wanted, chunk_bytes):
        offset, placed = 0, []

        def place(stored: Optional[Stored]) -> Optional[Stored]:
            nonlocal offset
            if stored is None:
                return None
            found = dataclasses.replace(stored, offset=offset)
            offset += padded(stored.bytes)
            return found

        placed_states = [(tuple(place(t) for t in w.tensors), place(w.master)) for w in chunk]
        device_bytes = offset
        for w, (tensors, master) in zip(chunk, placed_states):
            flag, scalars = numbers, tuple(dataclasses.replace(s, place=numbers + 1 + i) for i, s in enumerate(w.scalars))
            numbers += 1 + len(scalars)
            gradient = w.gradient and dataclasses.replace(w.gradient, offset=gradients)
            gradients += padded(gradient.bytes) if gradient else 0
            placed.append(
                Held(index, w.parameter, w.name, w.group, w.nodes, tensors, scalars, master, place(w.copy), gradient, flag)
            )
            index += 1
        regions.append(Region(len(regions), tuple(placed), device_bytes, offset))
    if (has_more or any(w.scalars for w in wanted)) and not any(region.bytes for region in regions):
        regions[:1] = [dataclasses.replace(r, bytes=ALIGNMENT) for r in regions[:1]]  # a session has some bytes
    regions = regions or [Region(0, (), 0, 0)]
    return Layout(tuple(regions), states.Layout([r.bytes for r in regions]), gradients, settings_bytes)


def _chunks(wanted: Sequence[Wanted], chunk_bytes: Optional[int]) -> List[List[Wanted]]:
    """Consecutive parameters, until there is enough. A parameter with more than that is a chunk of its own."""
    chunks: List[List[Wanted]] = []
    size = 0
    for w in wanted:
        fits = chunk_bytes is None or size + w.state_bytes <= chunk_bytes
        if not chunks or not fits:
            chunks.append([])
            size = 0
        chunks[-1].append(w)
        size += w.state_bytes
    return chunks


def allocated(size: int) -> int:
    """What the allocators of devices count for a tensor of this size."""
    return -(-size // 512) * 512


def converted(region: Region) -> int:
    """The most bytes that an update has beside its slot: tensors in another type than at rest, gradients for masters."""
    held, most = 0, 0
    for h in region.held:
        master, form = h.master, h.master.form if h.master is not None else None
        if form is not None:
            held += allocated(form.bytes) * (2 if master.key == MASTER_LOW else 1)  # the gradient, and a whole master
            block = min(math.prod(form.size), BLOCK) if master.key == MASTER else 0
            most = max(most, held + allocated(block * h.parameter.element_size()) + allocated(block))
        held += sum(allocated(t.form.bytes) for t in h.tensors if t.dtype != t.form.dtype)
        most = max(most, held)
    return most


def window_bytes(layout: Layout, whole: bool = False) -> int:
    """The most bytes of the device that a step holds, beside what the wrapped optimizer itself allocates for a while."""
    if whole:
        return sum(allocated(r.device_bytes) for r in layout.regions) + converted(_joined(layout)) + COUNTER
    slots = min(2, len(layout.regions)) * allocated(max((r.device_bytes for r in layout.regions), default=0))
    return slots + max(map(converted, layout.regions), default=0) + COUNTER


def _joined(layout: Layout) -> Region:
    """All regions as one, which is updated at once."""
    return Region(0, tuple(layout.held), 0, 0)


def first_window_bytes(layout: Layout, whole: bool = False) -> int:
    """The same for the first step, in which the optimizer makes its state. It is copied into one slot, chunk by chunk."""
    own = {r.index: sum(allocated(t.form.bytes) for h in r.held for t in h.tensors) for r in layout.regions}
    masters = {
        r.index: sum(2 * allocated(h.master.form.bytes) for h in r.held if h.master is not None) for r in layout.regions
    }
    made = {r.index: own[r.index] + masters[r.index] for r in layout.regions}
    if whole:
        return sum(made.values()) + sum(allocated(r.device_bytes) for r in layout.regions) + COUNTER
    return allocated(max((r.device_bytes for r in layout.regions), default=0)) + max(made.values(), default=0) + COUNTER


_TYPES = {
    torch.bool: "bool", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
}  # fmt: skip


def document(layout: Layout) -> Dict[str, Any]:
    """The layout as the request hold has it."""
    return {
        "recovery": layout.gradients_bytes > 0,
        "gradient_bytes": layout.gradients_bytes,
        "settings_bytes": layout.settings_bytes,
        "chunks": [
            {
                "bytes": region.bytes,
                "tensors": sorted((t for h in region.held for t in _tensors(h)), key=lambda t: (t["offset"], math.prod(t["shape"]))),
                "scalars": [s for h in region.held for s in _scalars(h)],
            }
            for region in layout.regions
        ],
    }


def _tensors(held: Held) -> Iterator[Dict[str, Any]]:
    for t in (*held.tensors, held.master, held.copy):
        if t is None:
            continue
        # In the order in which the elements lie: channels_last parameters have another than that of their shape.
        order = sorted(range(len(t.form.size)), key=lambda d: -t.form.stride[d])
        known = t.dtype in _TYPES
        shape = [t.form.size[d] for d in order] if known else [t.bytes]
        yield {"name": held.name, "key": t.key, "dtype": _TYPES.get(t.dtype, "uint8"), "shape": shape, "offset": t.offset}


def _scalars(held: Held) -> Iterator[Dict[str, Any]]:
    yield {"name": held.name, "key": "has_state", "dtype": "int64"}
    for scalar in held.scalars:
        dtype = _TYPES.get(scalar.dtype, "int64") if scalar.dtype is not None else "fp64" if scalar.number is float else "int64"
        yield {"name": held.name, "key": scalar.key, "dtype": dtype}
