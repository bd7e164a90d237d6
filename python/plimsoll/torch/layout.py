"""Which elements of which parameters each rank's shard holds.

A dtype group is all parameters of one dtype. Its shards are consecutive ranges of its flat parameters, in the order
of the parameter groups. A shard consists of pieces: ranges of one parameter each.
"""

import re
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed

from plimsoll.torch.algorithm import OFFLOADED

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # before torch 2.5
    try:
        from torch.distributed._tensor import DTensor
    except ImportError:  # torch without distributed
        DTensor = ()

# The protocol's names of types. Dtype groups have these names.
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPES = {name: dtype for dtype, name in TYPES.items()}

# Moments in a byte are for large tensors: section 4 of arXiv 2110.02861.
_SMALL = 4096


class Piece(NamedTuple):
    """Elements ``first`` to ``first + count`` of the flattened ``parameter``, at ``offset`` in the shard of rank ``owner``."""

    parameter: torch.Tensor
    name: str
    shape: Tuple[int, ...]
    group: int
    embedding: bool
    first: int
    count: int
    owner: int
    offset: int


class Mesh(NamedTuple):
    """The ranks that share the parameters, and the ranks that hold copies of their shards."""

    rank: int = 0
    world: int = 1
    # torch.distributed's process groups: the group of the shards, then the group of the copies. A message passed
    # through one and then the other reaches all ranks.
    groups: Tuple[Any, ...] = ()
    replica: int = 0
    replicas: int = 1
    is_local: bool = False  # each rank has parameters of its own, and all of the state of those

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.world * self.replicas

    @property
    def number(self) -> int:
        """This rank's number among all ranks."""
        return self.replica * self.world + self.rank

    @property
    def group(self) -> Any:
        """The ranks that together have one copy of all shards."""
        return self.groups[0]


def is_sharded(parameter: torch.Tensor) -> bool:
    return bool(DTensor) and isinstance(parameter, DTensor)


def is_offloaded(parameter: torch.Tensor) -> bool:
    """Whether fully_shard keeps the shard on the host and computes on another device (CPUOffloadPolicy)."""
    return is_sharded(parameter) and parameter.device_mesh.device_type != local(parameter).device.type


def mesh_of(parameters: Sequence[Any], names: Dict[torch.Tensor, str]) -> Mesh:
    """The mesh of DTensors. Raises ValueError for those that are not placed as fully_shard does."""
    for p in parameters:
        *copied, divided = p.placements
        if not p.requires_grad:
            continue  # the optimizer does not hold it
        if len(copied) > 1 or not all(c.is_replicate() for c in copied) or not divided.is_shard(0):
            raise ValueError(
                f"parameter {names[p]} is placed as {tuple(p.placements)}: expected (Shard(dim=0),) or (Replicate(), Shard(dim=0)), "
                "as fully_shard places parameters on a mesh of one or two dimensions; shard it so, or use an optimizer of torch"
            )
    mesh = parameters[0].device_mesh
    groups = [mesh.get_group(d) for d in range(mesh.ndim)]
    # By the ranks in the groups, as fully_shard does: their order may differ from the mesh's.
    *replica, rank = map(torch.distributed.get_rank, groups)
    *replicas, world = mesh.mesh.shape
    return Mesh(rank, world, tuple(reversed(groups)), *replica, *replicas)


def refuse_inference(groups: Sequence[Dict[str, Any]], names: Dict[torch.Tensor, str]) -> None:
    """Raises ValueError for parameters that can never be trained."""
    for p in (p for g in groups for p in g["params"]):
        if p.is_inference():
            raise ValueError(
                f"parameter {names[p]} was made in inference mode, and autograd refuses to train it: make the model outside of "
                "torch.inference_mode(), or give it a copy (parameter = torch.nn.Parameter(parameter.clone()))"
            )


def refuse_fsdp1(parameters: Iterable[torch.Tensor], names: Dict[torch.Tensor, str]) -> None:
    """Raises ValueError for parameters of FullyShardedDataParallel (FSDP1).

    FSDP1 keeps shards of its own. In every forward pass it points the parameters at them, or at gathered weights. The
    update of one rank's shard would be lost. Where parameters are copied, it would be clipped by the norm of that
    shard alone.
    """
    for p in parameters:
        # A flat parameter, or with use_orig_params one of the parameters that are views of it. FSDP marks both.
        if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"parameter {names[p]} belongs to FullyShardedDataParallel (FSDP1): expected a model that "
                "torch.distributed.fsdp.fully_shard (FSDP2) has sharded, or one that is not sharded; with accelerate and the Trainer "
                "set fsdp_version to 2, or use an optimizer of torch"
            )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own elements of a parameter or a gradient."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def names_of(
    groups: Sequence[Dict[str, Any]], named: Optional[Iterable[Tuple[str, torch.Tensor]]], model: Optional[torch.nn.Module]
) -> Dict[torch.Tensor, str]:
    """The names of all parameters: the given names, or their places in the parameter groups."""
    names: Dict[torch.Tensor, str] = {}
    if model is not None:
        names.update((p, n) for n, p in model.named_parameters())
    if named is not None:
        names.update((p, n) for n, p in named)
    for g, group in enumerate(groups):
        given = group.get("param_names")
        for i, p in enumerate(group["params"]):
            names.setdefault(p, given[i] if given else f"group{g}.parameter{i}")
    # Wrappers put a prefix before names; a checkpoint outlives its wrapper.
    return {
        p: re.sub(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", n) for p, n in names.items()
    }


def embeddings_of(model: Optional[torch.nn.Module]) -> List[torch.Tensor]:
    """The weights of embeddings. Their moments stay in fp32 if those of other parameters take a byte."""
    modules = model.modules() if model is not None else ()
    return [m.weight for m in modules if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))]


def check_types(parameters: Iterable[torch.Tensor], names: Callable[[], Dict[torch.Tensor, str]]) -> None:
    """Raises TypeError for trained parameters of dtypes that the service cannot hold."""
    for p in parameters:
        if p.requires_grad and p.dtype not in TYPES:
            raise TypeError(f"parameter {names()[p]} is {p.dtype}: expected bfloat16, float16 or float32; leave it to {OFFLOADED}")


def divide(
    groups: Sequence[Dict[str, Any]], names: Dict[torch.Tensor, str], embeddings: Sequence[torch.Tensor], mesh: Mesh
) -> Dict[str, List[Piece]]:
    """The pieces of all ranks' shards, of each dtype group, in the order of rank and offset.

    DTensors are divided already, and a rank knows only its own pieces of them. Raises TypeError or ValueError for
    parameters that the service cannot hold.
    """
    whole: Dict[str, List[Piece]] = {}
    embedded = {id(e) for e in embeddings}
    for g, group in enumerate(groups):
        check_types(group["params"], lambda: names)
        for p in group["params"]:
            if not p.requires_grad:
                continue  # it never changes
            first, count = _rows(p, names[p], mesh) if is_sharded(p) else (0, p.numel())
            pieces = whole.setdefault(TYPES[p.dtype], [])
            offset = pieces[-1].offset + pieces[-1].count if pieces else 0
            if count:
                pieces.append(Piece(p, names[p], tuple(p.shape), g, id(p) in embedded, first, count, mesh.rank, offset))
    if not any(whole.values()):
        if any(is_sharded(p) for g in groups for p in g["params"]):
            return whole  # other ranks have all rows
        raise ValueError("no parameter has both elements and requires_grad: there is nothing to optimize")
    _check_names(whole)
    if mesh.world == 1 or mesh.is_local or any(is_sharded(x.parameter) for pieces in whole.values() for x in pieces):
        return whole
    return {dtype: _cut(pieces, mesh.world) for dtype, pieces in whole.items()}


def _cut(pieces: List[Piece], world: int) -> List[Piece]:
    """Divides full parameters evenly: shards differ by at most one element."""
    total = pieces[-1].offset + pieces[-1].count
    cut = []
    for owner in range(world):
        begin, end = total * owner // world, total * (owner + 1) // world
        for piece in pieces:
            low, high = max(begin, piece.offset), min(end, piece.offset + piece.count)
            if low < high:
                cut.append(piece._replace(first=low - piece.offset, count=high - low, owner=owner, offset=low - begin))
    return cut


def _rows(parameter: Any, name: str, mesh: Mesh) -> Tuple[int, int]:
    """The elements of a DTensor that this rank has: rows, as torch.chunk divides them."""
    rows = parameter.shape[0] if parameter.dim() else 1
    per_rank = -(-rows // mesh.world)
    width = parameter.numel() // max(rows, 1)
    first, last = min(rows, mesh.rank * per_rank), min(rows, (mesh.rank + 1) * per_rank)
    held = parameter.to_local().numel()
    if held != (last - first) * width:
        raise ValueError(
            f"parameter {name}: rank {mesh.rank} of {mesh.world} has {held} elements of {tuple(parameter.shape)}: expected "
            f"{(last - first) * width}, rows {first} to {last}; plimsoll knows no other way to shard"
        )
    return first * width, held


def check_memory(parameters: Iterable[torch.Tensor], names: Dict[torch.Tensor, str]) -> None:
    """Raises ValueError if two parameters share elements, or if one has an element twice."""
    end, before = 0, ""
    for begin, name, tensor in sorted(
        ((local(p).data_ptr(), names[p], local(p)) for p in parameters if local(p).numel()), key=lambda place: place[0]
    ):
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        if begin < end:
            raise ValueError(
                f"parameters {before} and {name} are in the same memory, but each has its own state and step: make them one "
                "parameter (one.weight = other.weight), or give each its own memory (parameter.data = "
                "parameter.data.clone())"
            )
        if extent < tensor.numel():
            raise ValueError(
                f"parameter {name} has several elements at one address (expand): give it memory of its own (parameter.data "
                "= parameter.data.clone())"
            )
        end, before = begin + extent * tensor.element_size(), name


def _check_names(groups: Dict[str, List[Piece]]) -> None:
    for pieces in groups.values():
        seen = set()
        for piece in pieces:
            if piece.name in seen:
                raise ValueError(f"two parameters are named {piece.name}: give names with model= or named_parameters=")
            seen.add(piece.name)


def moments_of(piece: Piece, moments: str) -> str:
    """The type of a piece's moments, if those of its dtype group are held as ``moments``."""
    if moments == "int8" and (piece.embedding or torch.Size(piece.shape).numel() < _SMALL):
        return "fp32"
    return moments


class Ranges:
    """Joins adjacent ranges of elements until there are enough for a message."""

    def __init__(self, enough: int):
        self._enough = enough
        self._ends: Dict[int, int] = {}  # by where a range begins
        self._begins: Dict[int, int] = {}  # by where it ends
        self._counts: Dict[int, int] = {}  # of the ranges that were added to them, by where those begin

    def add(self, first: int, count: int) -> Optional[Tuple[int, int]]:
        """Takes a range. Returns the joined (first, count) once it is long enough.

        A range that is taken again before it is returned is returned once.
        """
        if first in self._counts:
            return None
        self._counts[first] = count
        end = first + count
        if first in self._begins:
            before = first
            first = self._begins.pop(before)
            del self._ends[first]
        if end in self._ends:
            after = end
            end = self._ends.pop(after)
            del self._begins[end]
        if end - first >= self._enough:
            at = first
            while at < end:
                at += self._counts.pop(at)
            return first, end - first
        self._ends[first], self._begins[end] = end, first
        return None

    def rest(self) -> List[Tuple[int, int]]:
        """All ranges that were not returned yet."""
        left = [(first, end - first) for first, end in sorted(self._ends.items())]
        self._ends.clear()
        self._begins.clear()
        self._counts.clear()
        return left
