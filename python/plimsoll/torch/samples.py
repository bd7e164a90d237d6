"""A few elements of every gradient or weight, to notice writes that autograd does not count.

autograd counts the changes of a tensor, but not those through ``.data``, numpy, or its address, as kernels of other
libraries make them. Such programs scale or set full tensors, so a few elements of each show the change.
"""

import functools
import math
import mmap
from typing import Any, List, Sequence, Tuple

import numpy as np
import torch

from plimsoll.torch import environment
from plimsoll.torch.layout import Piece, is_sharded, local

_EACH = 16  # elements of a piece


class Samples:
    """Elements at fixed places of each piece: in a mapping of the arena that holds the pieces, or in tensors."""

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, memory: mmap.mmap):
        self._dtype, self._memory = dtype, _bits(torch.frombuffer(memory, dtype=dtype))
        self._pieces = pieces
        numbers = [_places(piece.count)[0] for piece in pieces]
        ends = np.cumsum(numbers)
        self._where = {p.parameter: np.arange(end - n, end) for p, n, end in zip(pieces, numbers, ends)}
        self._piece_of = np.repeat(np.arange(len(pieces)), numbers)
        self._places = np.concatenate([p.offset + _offsets(p) for p in pieces])

    def __len__(self) -> int:
        return len(self._places)

    def between(self, first: int, count: int) -> slice:
        """The elements in a range of the arena."""
        return slice(*np.searchsorted(self._places, [first, first + count]))

    def in_arena(self, which: Any = slice(None)) -> np.ndarray:
        """The bits of elements in the arena, as the mapping shows them."""
        return self._memory[self._places[which]]

    def unlike_arena(self, tensors: Sequence[Tuple[Piece, torch.Tensor]]) -> List[str]:
        """The names of the pieces whose tensors differ in bits from the arena, in the order of the pieces."""
        return self.unlike(self.in_arena(), tensors)

    def unlike(self, bits: np.ndarray, tensors: Sequence[Tuple[Piece, torch.Tensor]]) -> List[str]:
        """The same for other ``bits`` than those in the arena."""
        if not tensors or not environment.computes():
            return []
        which = np.concatenate([self._where[piece.parameter] for piece, _ in tensors])
        return self.names(which[self.of(tensors) != bits[which]])

    def of(self, tensors: Sequence[Tuple[Piece, torch.Tensor]]) -> np.ndarray:
        """The bits of elements in tensors, on which it waits where they are on a device."""
        return _bits(gather(tensors, self._dtype).cpu())

    def names(self, elements: np.ndarray) -> List[str]:
        """The names of the parameters that the elements belong to."""
        return [self._pieces[i].name for i in np.unique(self._piece_of[elements])]


class Fingerprint:
    """Numbers that differ between gradients of different batches: sums of a sample with random signs, and its energy.

    Averaged gradients are the same on all ranks, except for the last bit if ranks clip them on different devices.
    """

    _SUMS = 4
    _TOLERANCE = 0.01  # of the size of gradients

    def __init__(self, sums: Sequence[float] = (0.0,) * _SUMS, energy: float = 0.0):
        self._sums, self._energy = sums, energy

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "Fingerprint":
        """The fingerprint of the gradients of pieces. A missing gradient counts as zero."""
        given = [(piece, piece.parameter.grad) for piece in pieces if piece.parameter.grad is not None]
        sample = gather(given, torch.float32).cpu().double()
        numbers = [_places(piece.count)[0] for piece in pieces]
        has = torch.tensor([piece.parameter.grad is not None for piece in pieces])
        has = has.repeat_interleave(torch.tensor(numbers))
        return cls((_signs(cls._SUMS, len(has))[:, has] @ sample).tolist(), float(sample @ sample))

    def to_add_up(self) -> List[float]:
        """The numbers that the ranks add up to find out whether their gradients differ."""
        return [self._energy, *self._sums, *(s * s for s in self._sums)]

    @classmethod
    def differ(cls, added_up: Sequence[float], ranks: int) -> bool:
        energy, sums, squares = added_up[0] / ranks, added_up[1 : 1 + cls._SUMS], added_up[1 + cls._SUMS :]
        if not math.isfinite(energy):
            return False  # the norm tells
        return any(q / ranks - (s / ranks) ** 2 > cls._TOLERANCE**2 * energy for s, q in zip(sums, squares))


@functools.lru_cache(maxsize=4)
def _signs(rows: int, columns: int) -> torch.Tensor:
    """Random signs, the same on all ranks."""
    return torch.randint(0, 2, (rows, columns), generator=torch.Generator().manual_seed(0)).double() * 2 - 1


def gather(tensors: Sequence[Tuple[Piece, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """The samples of pieces from tensors, on their device: one operation where the tensors are contiguous."""
    samples = [_sample(piece, tensor) for piece, tensor in tensors]
    return torch.cat([s if s.dtype is dtype else s.to(dtype) for s in samples])


def _sample(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    own = local(tensor.detach())
    first = 0 if is_sharded(piece.parameter) else piece.first
    number, apart = _places(piece.count)
    if own.is_contiguous():
        return own.as_strided((number,), (apart,), own.storage_offset() + first)
    places = np.unravel_index(first + _offsets(piece), own.shape)
    return own[tuple(torch.from_numpy(p).to(own.device) for p in places)]


def _offsets(piece: Piece) -> np.ndarray:
    """The offsets of a piece's sample in the piece."""
    number, apart = _places(piece.count)
    return apart * np.arange(number)


@functools.lru_cache(maxsize=None)
def _places(count: int) -> Tuple[int, int]:
    """How many of ``count`` elements are in a sample, and how far apart they are."""
    number = min(count, _EACH)
    apart = max(1, (count - 1) // max(1, number - 1))
    return number, apart - (apart % 2 == 0)  # odd: widths are even, and a single column may be padding


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32).numpy()
