"""The place of a parameter's elements in a rank's shard."""

import dataclasses
import functools
import sys
import zlib
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch.utils.weak import TensorWeakRef

from plimsoll.client import Arena
from plimsoll.torch.layout import DTYPES, Mesh, Piece, is_sharded, local
from plimsoll.torch.own_pages import OwnPages
from plimsoll.torch.transfer import HostTransfer


@dataclasses.dataclass(frozen=True)
class DtypeGroup:
    """All parameters of one dtype, and how they get to the arenas of their shards and back.

    ``shared`` means that the model's parameters and gradients are in the arenas themselves. Otherwise they are
    copied. With ``apart`` the model keeps parameters of its own all the same. ``gradient_name`` is the type of gradients
    in their arena: None for that of the parameters.
    """

    name: str
    pieces: Sequence[Piece]
    mesh: Mesh
    transfer: HostTransfer
    shared: bool
    apart: bool = False
    gradient_name: Optional[str] = None

    @property
    def shares_parameters(self) -> bool:
        """Whether the model's parameters are in the arena itself."""
        return self.shared and not self.apart

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def gradient(self) -> str:
        return self.gradient_name or self.name

    @functools.cached_property
    def own(self) -> Sequence[Piece]:
        """The pieces of this rank's shard."""
        return [p for p in self.pieces if p.owner == self.mesh.rank]

    def pieces_of(self) -> Dict[torch.Tensor, List[Piece]]:
        """The pieces of each parameter, of all ranks' shards."""
        found: Dict[torch.Tensor, List[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.parameter, []).append(piece)
        return found


class Seen:
    """A gradient at one moment. It is held weakly: a later gradient in the same memory is a different one."""

    def __init__(self, gradient: torch.Tensor):
        self._gradient, self._state = TensorWeakRef(gradient), self._state_of(gradient)

    def is_still(self, gradient: torch.Tensor) -> bool:
        return self._gradient() is gradient and self._state_of(gradient) == self._state

    @staticmethod
    def _state_of(gradient: torch.Tensor) -> Tuple[int, ...]:
        return (local(gradient).data_ptr(), *_versions(gradient))


def _versions(tensor: torch.Tensor) -> Tuple[int, int]:
    """Versions that differ once the tensor was changed. A DTensor does not count changes of its local tensor.

    So the local tensor is asked itself: what ``detach`` makes of it counts anew.
    """
    return tensor._version, tensor._local_tensor._version if is_sharded(tensor) else 0


class Slot:
    """The place of a piece in this rank's shard, and the progress of its gradient since the last step."""

    def __init__(self, piece: Piece, parameters: Arena, gradients: Arena, own_pages: Optional[OwnPages]):
        self.piece = piece
        # Each has its own storage, so that a change of one gradient does not show in the versions of all others.
        self.in_arena = _tensor(parameters, piece, parameters.memory)
        # The model's parameter, if it is in the arena.
        self.weight = self.in_arena if own_pages is None else _tensor(parameters, piece, own_pages.memory)
        # The arenas have the order of the shape. A parameter with another layout (channels_last) stays where it is.
        self.contiguous = local(piece.parameter).is_contiguous()
        self._gradients = gradients
        self.gradient = self._gradient_in_arena()
        self.shown: Optional[torch.Tensor] = None  # the parameter's gradient, if it is in the arena
        self.read: Optional[int] = None  # the version of that gradient which the update under way reads
        self.seen: Optional[Seen] = None  # the gradient that was brought, as it was then
        self.zero = False
        self.fired = 0  # gradients that were accumulated since the last step
        self.expected = 1  # and their number before the last step
        self.accumulated: Optional[Seen] = None  # the gradient as autograd left it, where an update may take it early
        self._content: Optional[int] = None  # a checksum of it then, where the program may write what is there already
        self._is_rewritten = False  # whether the program has done so
        # Versions of the parameter that was brought into the model, once it is there.
        self.left: Optional[Tuple[int, int]] = None
        # Master weights of a state_dict whose weights are not those that the model had when it was loaded. The model
        # may get them later.
        self.loaded: Optional[torch.Tensor] = None

    def _gradient_in_arena(self) -> torch.Tensor:
        return _tensor(self._gradients, self.piece, self._gradients.memory)

    def leave(self, gradient: torch.Tensor) -> None:
        """Notes a gradient as autograd has left it. How programs treat gradients shows in the first step."""
        self.accumulated = Seen(gradient)
        is_asked_for = self.expected == 0 or self._is_rewritten and self.fired == self.expected
        self._content = _content(gradient) if is_asked_for else None

    def is_as_left(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is what autograd has left, to the bit. It may have been clipped by a factor of 1."""
        if self.accumulated.is_still(gradient):
            return True
        if self._content is None or self._content != _content(gradient):
            return False
        self._is_rewritten, self.accumulated = True, Seen(gradient)
        self.seen = self.seen and Seen(gradient)
        return True

    def versions(self) -> Tuple[int, int]:
        return _versions(self.piece.parameter)

    def let_go(self) -> None:
        """Gives a gradient that the program has kept memory of its own, as its memory in the arena is about to be
        written.

        torch makes a new tensor for the gradient that comes after zero_grad, so programs keep the last one without
        a copy, or a view of it.
        """
        if self.shown is not None and sys.getrefcount(self.shown) > _NOT_KEPT:
            self.shown.data = self.shown.detach().clone()
            self.shown = None
        if _tensors_on(self.gradient) > (1 if self.shown is None else 2):
            self.gradient.untyped_storage().share_memory_()  # the one call of torch that moves a storage under its views
            self.gradient, self.shown = self._gradient_in_arena(), None

    def like_parameter(self, elements: torch.Tensor) -> torch.Tensor:
        """Elements in an arena with the shape and strides of the parameter, which is contiguous."""
        return elements.as_strided(self.piece.parameter.shape, self.piece.parameter.stride())


_NOT_KEPT = 2  # references to an attribute's value: that of the object, and that of the function that counts them


def _tensors_on(tensor: torch.Tensor) -> int:
    """How many tensors have the storage of this one. 0 where torch does not tell."""
    storage = tensor.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count(storage._cdata) - 1 if count is not None else 0


def _content(gradient: torch.Tensor) -> int:
    own = local(gradient.detach()).cpu().contiguous()
    return zlib.crc32(own.reshape(-1).view(torch.uint8).numpy())


def _tensor(arena: Arena, piece: Piece, memory: Any) -> torch.Tensor:
    dtype = DTYPES[arena.type]
    return torch.frombuffer(memory, dtype=dtype, count=piece.count, offset=piece.offset * dtype.itemsize)


def within(piece: Piece) -> slice:
    """The place of a piece in this rank's own elements of its parameter."""
    first = 0 if is_sharded(piece.parameter) else piece.first
    return slice(first, first + piece.count)


def flat(piece: Piece) -> torch.Tensor:
    return local(piece.parameter.detach()).reshape(-1)[within(piece)]


def dense(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    gradient = parameter.grad
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {piece.name} is {gradient.layout}: expected a dense one; make it so (sparse=False), or leave it to an optimizer of torch"
        )
    if tuple(parameter.shape) != tuple(piece.shape):
        raise RuntimeError(
            f"parameter {piece.name} has the shape {list(parameter.shape)}, but had {list(piece.shape)} when the optimizer "
            "was opened: resize the model before the optimizer is opened, or close it and make a new one"
        )
    return gradient
