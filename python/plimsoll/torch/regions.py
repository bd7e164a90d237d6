"""Where the state of an optimizer lies: in regions, one for each chunk of parameters, of an arena.

The arena is larger than all regions by a gap, the size of the largest region. Each step moves every region over the
gap and back: the new state of a chunk overwrites only what is dead, and never the chunk's own old state.
"""

import dataclasses
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

ALIGNMENT = 256  # of each tensor in a region, in bytes
MASTER, MASTER_LOW, PARAMETER = "master_weights", "master_weights_low", "parameter"


@dataclasses.dataclass(frozen=True)
class Form:
    """What a tensor of this rank is like. ``wrap`` makes a DTensor of it, where it is the local part of one."""

    size: Tuple[int, ...]
    stride: Tuple[int, ...]
    dtype: torch.dtype
    wrap: Optional[Callable[[torch.Tensor], torch.Tensor]] = None

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: Optional[torch.dtype] = None) -> "Form":
        """The form of a local tensor, with its strides if they leave no gaps."""
        size = tuple(tensor.shape)
        dense = torch.empty_strided(size, tensor.stride(), device="meta")
        kept = dense.numel() == 0 or dense.untyped_storage().nbytes() == dense.nbytes and _distinct(tensor)
        stride = tensor.stride() if kept else torch.empty(size, device="meta").stride()
        return cls(size, tuple(stride), dtype or tensor.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.wrap is None else self.wrap(tensor)


def _distinct(tensor: torch.Tensor) -> bool:
    return not any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride()))


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a region: as the optimizer has it (``form``), and at rest (``dtype``)."""

    key: str
    form: Form
    dtype: torch.dtype
    offset: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.form.size) * self.dtype.itemsize

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
    keys: Tuple[str, ...]  # of the state, in the optimizer's order
    tensors: Tuple[Stored, ...]
    scalars: Tuple[Scalar, ...]
    master: Optional[Stored]
    copy: Optional[Stored]  # of the parameter
    gradient: Optional[Stored]  # in the arena of gradients


@dataclasses.dataclass(frozen=True)
class Region:
    """The state of a chunk of parameters. The first ``device_bytes`` also come to the device."""

    index: int
    held: Tuple[Held, ...]
    low: int
    device_bytes: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """All regions, in the order of the parameters."""

    regions: Tuple[Region, ...]
    gradients_bytes: int
    numbers: int  # in each table of the control arena
    groups_bytes: int  # for the options of the parameter groups, as JSON

    @property
    def gap(self) -> int:
        return max((r.bytes for r in self.regions), default=0)

    @property
    def states_bytes(self) -> int:
        return sum(r.bytes for r in self.regions) + self.gap

    @property
    def held(self) -> List[Held]:
        return [h for region in self.regions for h in region.held]

    def order(self, step: int) -> List[Region]:
        """The order in which the step after ``step`` steps takes the regions."""
        return list(self.regions if step % 2 == 0 else reversed(self.regions))

    def begin(self, region: Region, step: int) -> int:
        """Where the region begins at rest after ``step`` steps."""
        return region.low + (self.gap if step % 2 == 0 else 0)


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A parameter before it has a place: what its state is made of."""

    parameter: torch.Tensor
    name: str
    group: int
    keys: Tuple[str, ...]
    tensors: Tuple[Stored, ...]
    scalars: Tuple[Scalar, ...]
    master: Optional[Stored]
    copy: Optional[Stored]
    gradient: Optional[Stored]

    @property
    def state_bytes(self) -> int:
        return sum(padded(t.bytes) for t in (*self.tensors, self.master) if t is not None)


def lay_out(wanted: Sequence[Wanted], chunk_bytes: Optional[int], groups_bytes: int) -> Layout:
    """Cuts parameters into chunks of at least ``chunk_bytes`` of state, or into one where that is None."""
    regions: List[Region] = []
    numbers, low, gradients = len(wanted), 0, 0
    index = 0
    for chunk in _chunks(wanted, chunk_bytes):
        offset, placed = 0, []

        def place(stored: Optional[Stored]) -> Optional[Stored]:
            nonlocal offset
            if stored is None:
                return None
            found = dataclasses.replace(stored, offset=offset)
            offset += padded(stored.bytes)
            return found

        states = [(tuple(place(t) for t in w.tensors), place(w.master)) for w in chunk]
        device_bytes = offset
        for w, (tensors, master) in zip(chunk, states):
            scalars = tuple(dataclasses.replace(s, place=numbers + i) for i, s in enumerate(w.scalars))
            numbers += len(scalars)
            gradient = w.gradient and dataclasses.replace(w.gradient, offset=gradients)
            gradients += padded(gradient.bytes) if gradient else 0
            placed.append(
                Held(index, w.parameter, w.name, w.group, w.keys, tensors, scalars, master, place(w.copy), gradient)
            )
            index += 1
        regions.append(Region(len(regions), tuple(placed), low, device_bytes, offset))
        low += offset
    return Layout(tuple(regions), gradients, numbers, groups_bytes)


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


def converted(layout: Layout) -> Dict[int, int]:
    """The bytes that each region's update has beside its slot: tensors in another type than at rest."""
    return {r.index: sum(allocated(b) for h in r.held for b in _conversions(h)) for r in layout.regions}


def _conversions(held: Held) -> List[int]:
    found = [t.form.bytes for t in held.tensors if t.dtype != t.form.dtype]
    if held.master is not None:
        found += [held.master.form.bytes] * (2 if held.master.key == MASTER_LOW else 1)  # and the gradient
    return found


def window_bytes(layout: Layout, whole: bool = False) -> int:
    """The most bytes of the device that a step holds, beside what the wrapped optimizer itself allocates for a while."""
    work = converted(layout)
    if whole:
        return sum(allocated(r.device_bytes) + work[r.index] for r in layout.regions) + _COUNTER
    slots = min(2, len(layout.regions)) * allocated(max((r.device_bytes for r in layout.regions), default=0))
    return slots + max(work.values(), default=0) + _COUNTER


def first_window_bytes(layout: Layout, whole: bool = False) -> int:
    """The same for the first step, in which the optimizer makes its state. It is copied into one slot, chunk by chunk."""
    own = {r.index: sum(allocated(t.form.bytes) for h in r.held for t in h.tensors) for r in layout.regions}
    masters = {
        r.index: sum(2 * allocated(h.master.form.bytes) for h in r.held if h.master is not None) for r in layout.regions
    }
    made = {r.index: own[r.index] + masters[r.index] for r in layout.regions}
    if whole:
        return sum(made.values()) + sum(allocated(r.device_bytes) for r in layout.regions) + _COUNTER
    return allocated(max((r.device_bytes for r in layout.regions), default=0)) + max(made.values(), default=0) + _COUNTER


_COUNTER = 512  # of the control arena's numbers, on the device


def document(layout: Layout) -> List[Dict[str, Any]]:
    """The regions as the service is told of them."""
    return [
        {
            "bytes": region.bytes,
            "tensors": [
                {"name": h.name, "key": t.key, "dtype": str(t.dtype).split(".")[-1], "shape": list(t.form.size), "offset": t.offset}
                for h in region.held
                for t in (*h.tensors, h.master, h.copy)
                if t is not None
            ],
        }
        for region in layout.regions
    ]
