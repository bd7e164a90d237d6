"""What steps have changed of a model, as messages, and copies of the model that take them (docs/delta.md).

This module needs torch alone, so a process that holds a copy may have it without the rest of this package.
"""

import hashlib
import os
import struct
import zlib
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple, Union

import torch

__all__ = ["DeltaError", "Message", "Receiver", "apply", "checksum", "read"]

_MAGIC, _VERSION, _WHOLE, _BLOCK = b"plimdelt", 1, 1, 4096
_FIXED = struct.Struct("<8sHHI4Q")
_STREAMS = ("table", "forms", "counts", "gaps", "masks", "values", "words", "all")
_SUM_BYTES = 32
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_WORDS = {2: torch.int16, 4: torch.int32}
_APART, _BITS, _DENSE = 1, 2, 3
_FAR = 255
_MOST_DEFLATE = 1032


class DeltaError(ValueError):
    """A message that is damaged, that is not the next one, or that is for another model. Nothing was changed."""


class Piece(NamedTuple):
    """Elements ``first`` to ``first + count`` of a flattened parameter."""

    name: str
    type: torch.dtype
    shape: Tuple[int, ...]
    first: int
    count: int

    @property
    def blocks(self) -> int:
        return -(-self.count // _BLOCK)


class _Changes(NamedTuple):
    """The changed elements of all pieces, one after the other, as numbers among all elements."""

    places: torch.Tensor  # of int64, in order, of all blocks that are not dense
    dense: torch.Tensor  # the same, of dense blocks


class Message:
    """A message that was read, and found whole.

    ``step`` is the step after which parameters are what it makes them, and ``from_step`` the one before. With ``whole``
    it has all parameters, and may follow any step.
    """

    def __init__(self, data: bytes):
        self.data = data = bytes(data)
        streams = self._open(data)
        self.pieces = _pieces(streams["table"], self._count)
        self.bytes = self.pieces[0].type.itemsize if self.pieces else 2
        starts = [0]
        for piece in self.pieces:
            starts.append(starts[-1] + piece.count)
        self.starts = starts
        self._streams = {name: _tensor(stream) for name, stream in streams.items() if name != "table"}
        self._changes = self._decode()

    def _open(self, data: bytes) -> Dict[str, bytes]:
        head = _FIXED.size + 16 * len(_STREAMS)
        if len(data) < head + _SUM_BYTES or data[:8] != _MAGIC:
            raise DeltaError(f"it is no delta: expected {head + _SUM_BYTES} bytes or more that begin with {_MAGIC!r}")
        _, version, flags, self._count, self.from_step, self.step, self.before, self.after = _FIXED.unpack_from(data)
        if version != _VERSION:
            raise DeltaError(f"it is a delta of version {version}: this release reads version {_VERSION}")
        if hashlib.sha256(data[:-_SUM_BYTES]).digest() != data[-_SUM_BYTES:]:
            raise DeltaError("its checksum is another: it was damaged or cut off on its way; fetch it again")
        if flags & ~_WHOLE:
            raise DeltaError(f"its flags are {flags:#x}: this release knows {_WHOLE:#x}")
        self.whole = bool(flags & _WHOLE)
        sizes = struct.unpack_from(f"<{2 * len(_STREAMS)}Q", data, _FIXED.size)
        streams, at = {}, head
        for name, raw, coded in zip(_STREAMS, sizes[::2], sizes[1::2]):
            if coded > len(data) - _SUM_BYTES - at or not coded <= raw <= coded * _MOST_DEFLATE:
                raise DeltaError(f"stream {name} has {coded} bytes of {raw}, which cannot be")
            streams[name] = _unpacked(name, data[at : at + coded], raw)
            at += coded
        if at != len(data) - _SUM_BYTES:
            raise DeltaError("bytes follow its last stream")
        return streams

    def _decode(self) -> _Changes:
        forms = self._streams["forms"].long()
        if forms.numel() != sum(p.blocks for p in self.pieces):
            raise DeltaError(f"it has {forms.numel()} blocks: expected those of its parameters")
        first, size = self._blocks()
        if bool((forms > _DENSE).any()) or (self.whole and bool((forms != _DENSE).any())):
            raise DeltaError("a block has a form that it cannot have")
        apart, bits, dense = (torch.nonzero(forms == form).flatten() for form in (_APART, _BITS, _DENSE))
        places = torch.cat([
            self._by_gaps(first[apart], size[apart]), self._by_bits(first[bits], size[bits]),
        ]).sort().values  # fmt: skip
        full = _ranges(first[dense], size[dense])
        values, words = self._streams["values"], self._streams["words"]
        near = places.numel() if self.bytes == 2 else 0
        far = int((values == _FAR).sum()) if self.bytes == 2 else places.numel()
        if values.numel() != near or words.numel() != far * self.bytes or self._streams["all"].numel() != full.numel() * self.bytes:
            raise DeltaError("it has more or fewer values than changes")
        return _Changes(places, full)

    def _blocks(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """The first element of each block, among all elements, and the number of its elements."""
        first: List[torch.Tensor] = []
        size: List[torch.Tensor] = []
        for start, piece in zip(self.starts, self.pieces):
            begins = torch.arange(0, piece.count, _BLOCK)
            first.append(start + begins)
            size.append((piece.count - begins).clamp(max=_BLOCK))
        empty = torch.zeros(0, dtype=torch.int64)
        return torch.cat([empty, *first]), torch.cat([empty, *size])

    def _by_gaps(self, first: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        counts, gaps = _numbers(self._streams["counts"]), _numbers(self._streams["gaps"])
        if counts.numel() != first.numel() or int(counts.sum()) != gaps.numel():
            raise DeltaError("it has more or fewer gaps than changes")
        if not gaps.numel():
            return gaps
        distances = torch.cumsum(gaps + 1, 0)
        ends = torch.cumsum(counts, 0)
        base = torch.cat([distances.new_zeros(1), distances])[ends - counts]  # before the first of each block
        within = distances - torch.repeat_interleave(base, counts) - 1
        if bool((within >= torch.repeat_interleave(size, counts)).any()):
            raise DeltaError("an element behind the end of its block has changed")
        return torch.repeat_interleave(first, counts) + within

    def _by_bits(self, first: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        masks, lengths = self._streams["masks"], (size + 7) // 8
        if masks.numel() != int(lengths.sum()):
            raise DeltaError("it has more or fewer masks than blocks")
        bits = (masks.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
        byte, bit = torch.nonzero(bits, as_tuple=True)
        block = torch.repeat_interleave(torch.arange(first.numel()), lengths)[byte]
        within = 8 * (byte - (torch.cumsum(lengths, 0) - lengths)[block]) + bit
        if bool((within >= size[block]).any()):
            raise DeltaError("an element behind the end of its block has changed")
        return first[block] + within

    def indices(self) -> Iterator[Tuple[Piece, torch.Tensor]]:
        """Each piece with its elements that the message is about, as places in the flattened parameter."""
        changed = torch.cat(self._changes).sort().values
        ends = torch.searchsorted(changed, torch.tensor(self.starts))
        for i, piece in enumerate(self.pieces):
            yield piece, changed[ends[i] : ends[i + 1]] - self.starts[i] + piece.first

    def made(self, words: torch.Tensor) -> torch.Tensor:
        """What the changed elements become: those of dense blocks behind all others. ``words`` are what they are."""
        dense = self._streams["all"].view(_WORDS[self.bytes])
        count = self._changes.places.numel()
        if self.bytes == 4:
            return torch.cat([self._streams["words"].view(torch.int32), dense])
        values = self._streams["values"].int()
        now = words[:count].int() + ((values >> 1) ^ -(values & 1))
        far = torch.nonzero(values == _FAR).flatten()
        now[far] = words[far].int() ^ self._streams["words"].view(torch.int16).int()
        return torch.cat([now.to(torch.int16), dense])


def read(message: bytes) -> Message:
    """Reads a message. Raises :class:`DeltaError` for one that is damaged or of another release."""
    return Message(message)


def _unpacked(name: str, coded: bytes, raw: int) -> bytes:
    if len(coded) == raw:
        return coded
    unpacker = zlib.decompressobj(-15)
    try:
        text = unpacker.decompress(coded, raw + 1)
    except zlib.error as error:
        raise DeltaError(f"stream {name}: {error}") from None
    if len(text) != raw or not unpacker.eof:
        raise DeltaError(f"stream {name} has other than its {raw} bytes")
    return text


def _pieces(table: bytes, count: int) -> List[Piece]:
    pieces: List[Piece] = []
    at = 0
    try:
        for _ in range(count):
            (length,) = struct.unpack_from("<H", table, at)
            name = table[at + 2 : at + 2 + length].decode()
            kind, dimensions = struct.unpack_from("<BB", table, at + 2 + length)
            at += 4 + length
            *shape, first, number = struct.unpack_from(f"<{dimensions + 2}Q", table, at)
            at += 8 * (dimensions + 2)
            elements = 1
            for n in shape:
                elements *= n
            if first + number > elements or elements > 1 << 60:
                raise DeltaError(f"parameter {name}: {number} elements from {first} on: expected a range within its {elements}")
            pieces.append(Piece(name, _TYPES[kind], tuple(shape), first, number))
    except (struct.error, IndexError, UnicodeDecodeError):
        raise DeltaError("its table of parameters cannot be read") from None
    if at != len(table) or len({p.name for p in pieces}) != len(pieces) or len({p.type for p in pieces}) > 1:
        raise DeltaError("its table of parameters has more or other parameters than it should")
    return pieces


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _numbers(stream: torch.Tensor) -> torch.Tensor:
    """Numbers that are written as a byte of 255 for each 255 in them, and a byte for the rest."""
    sums = torch.cumsum(stream.long(), 0)
    ends = torch.nonzero(stream < 255).flatten()
    if stream.numel() and (not ends.numel() or int(ends[-1]) != stream.numel() - 1):
        raise DeltaError("a number has no end")
    totals = sums[ends]
    return torch.diff(totals, prepend=totals.new_zeros(1)) if totals.numel() else totals


def _ranges(first: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """The numbers of all elements of blocks."""
    before = torch.cumsum(size, 0) - size
    return torch.repeat_interleave(first - before, size) + torch.arange(int(size.sum()))


# The checksum

_AT_A_TIME = 1 << 20


def _signed(number: int) -> int:
    return (number & (1 << 64) - 1 ^ 1 << 63) - (1 << 63)


_PLACE, _WORD = _signed(0x9E3779B97F4A7C15), _signed(0xD6E8FEB86659FD93)
_MIX = (_signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53))


def _terms(seeds: Union[int, torch.Tensor], places: torch.Tensor, words: torch.Tensor) -> int:
    """The sum, modulo 2^64, of the numbers of elements."""
    bits = words.long() & (0xFFFF if words.dtype == torch.int16 else 0xFFFFFFFF)
    x = (places * _PLACE + seeds) ^ (bits * _WORD)
    for factor in _MIX:
        x ^= (x >> 33) & (1 << 31) - 1
        x *= factor
    x ^= (x >> 33) & (1 << 31) - 1
    return int(x.sum()) & (1 << 64) - 1


def _seed(name: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def _checksum(piece: Piece, words: torch.Tensor) -> int:
    total = 0
    for at in range(0, words.numel(), _AT_A_TIME):
        part = words[at : at + _AT_A_TIME]
        places = torch.arange(piece.first + at, piece.first + at + part.numel(), device=part.device)
        total += _terms(_seed(piece.name), places, part)
    return total & (1 << 64) - 1


def checksum(tensors: Mapping[str, torch.Tensor], pieces: Sequence[Piece] = ()) -> int:
    """The checksum of tensors by name, or of pieces of them: the sum, modulo 2^64, of a number for each element."""
    pieces = pieces or [Piece(n, t.dtype, tuple(t.shape), 0, t.numel()) for n, t in tensors.items()]
    return sum(_checksum(p, _words(tensors, p)) for p in pieces) & (1 << 64) - 1


def _words(tensors: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    """The elements of a piece as integers, in the memory of the tensor."""
    tensor = tensors.get(piece.name)
    if tensor is None:
        raise DeltaError(f"the copy has no tensor {piece.name}, which the delta changes")
    if tensor.dtype != piece.type or tuple(tensor.shape) != piece.shape:
        raise DeltaError(
            f"tensor {piece.name} of the copy is {tensor.dtype} of shape {tuple(tensor.shape)}: expected {piece.type} of shape {piece.shape}"
        )
    if not tensor.is_contiguous():
        raise DeltaError(f"tensor {piece.name} of the copy is not contiguous: give the tensor that it is a view of")
    return tensor.detach().view(-1).view(_WORDS[tensor.element_size()])[piece.first : piece.first + piece.count]


class Receiver:
    """A copy of a model that takes messages, one after the other.

    ``tensors`` are its parameters by name, such as ``model.state_dict()``. They change in place. The receiver computes
    the checksum of all of them when it takes its first message, and later that of what a message changes.
    :meth:`verify` computes it of all again.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors
        self._sums: Dict[Tuple[Piece, ...], Tuple[int, int]] = {}  # the checksum and step of each set of pieces

    def apply(self, message: Union[bytes, Message]) -> int:
        """Takes a message, and returns the step after which the parameters are those of the trainer.

        Raises :class:`DeltaError` for one that is damaged, that is not the next one or that makes other parameters than
        the trainer has. Then nothing has changed.
        """
        m = message if isinstance(message, Message) else Message(message)
        pieces = tuple(m.pieces)
        words = [_words(self._tensors, p) for p in pieces]
        known, step = self._sums.get(pieces, (None, None))
        if known is None:
            known = sum(map(_checksum, pieces, words)) & (1 << 64) - 1
        if not m.whole and known != m.before:
            has = f"it is at step {step}" if step is not None else f"its checksum is {known:#018x}, expected {m.before:#018x}"
            raise DeltaError(
                f"the delta leads from step {m.from_step} to step {m.step}, and the copy has other parameters than those after "
                f"step {m.from_step}: {has}; apply the deltas before this one first, or one that has all parameters"
            )
        made, after = self._make(m, words)
        if (known + after) & (1 << 64) - 1 != m.after:
            raise DeltaError(
                "the delta makes other parameters than the trainer has: the copy, or the trainer's parameters, have changed other "
                "than by steps; ask the trainer for a delta with all parameters"
            )
        for of_piece, (places, values) in zip(words, made):
            of_piece[places.to(of_piece.device)] = values.to(of_piece.device)
        self._sums[pieces] = (m.after, m.step)
        return m.step

    def _make(self, m: Message, words: List[torch.Tensor]) -> Tuple[List[Tuple[torch.Tensor, torch.Tensor]], int]:
        """What changes in each piece, and by how much the checksum does."""
        changed = torch.cat(m._changes)
        piece = torch.searchsorted(torch.tensor(m.starts), changed, right=True) - 1
        places = changed - torch.tensor(m.starts)[piece]
        old = torch.empty(changed.numel(), dtype=_WORDS[m.bytes])
        of_piece = [torch.nonzero(piece == i).flatten() for i in range(len(words))]
        for where, own in zip(of_piece, words):
            old[where] = own[places[where].to(own.device)].cpu()
        now = m.made(old)
        moved = 0
        made = []
        for p, where in zip(m.pieces, of_piece):
            moved += _terms(_seed(p.name), p.first + places[where], now[where]) - _terms(_seed(p.name), p.first + places[where], old[where])
            made.append((places[where], now[where]))
        return made, moved

    def verify(self) -> None:
        """Computes the checksums of all parameters that messages were about. Raises DeltaError if one is another than the
        trainer's.
        """
        for pieces, (known, step) in self._sums.items():
            has = checksum(self._tensors, pieces)
            if has != known:
                raise DeltaError(f"the copy has changed since step {step}: its checksum is {has:#018x}, expected {known:#018x}")


def apply(message: bytes, tensors: Mapping[str, torch.Tensor]) -> int:
    """Changes tensors as a message says, in place, after it has compared all of them with what the message expects.

    Returns the step. Raises :class:`DeltaError` as :meth:`Receiver.apply` does, which is faster for many messages.
    """
    return Receiver(tensors).apply(message)


class Delta:
    """What the last step of an optimizer has changed of the parameters whose states this rank holds.

    ``messages`` are bytes for :func:`apply` or ``plimsoll delta apply``, one for each type of parameters. Iteration
    yields names, places in the flattened parameters, and values, as long as no further step is made.
    """

    def __init__(self, messages: List[bytes], tensors: List[Mapping[str, torch.Tensor]]):
        self.messages = messages
        self._tensors = tensors

    @property
    def step(self) -> int:
        return max((read_step(m) for m in self.messages), default=0)

    def __iter__(self) -> Iterator[Tuple[str, torch.Tensor, torch.Tensor]]:
        for message, tensors in zip(self.messages, self._tensors):
            for piece, indices in Message(message).indices():
                if indices.numel():
                    yield piece.name, indices, tensors[piece.name][indices - piece.first].clone()

    def save(self, folder: Union[str, "os.PathLike[str]"]) -> List[str]:
        """Writes each message to a file of its own in a folder, which ``plimsoll delta apply`` takes.

        A file is whole or not there, and once this returns it outlives a loss of power. Its name has the step and a digest of
        the names and ranges of the parameters, so ranks and optimizers may share a folder. A training that begins anew needs a
        folder of its own. Returns the paths.
        """
        os.makedirs(folder, exist_ok=True)
        paths = []
        for message in self.messages:
            whole = "-whole" if read_whole(message) else ""
            path = os.path.join(folder, f"{read_step(message):08}-{_digest(message)}{whole}.delta")
            beside = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}")
            with open(beside, "wb") as file:
                file.write(message)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
            paths.append(path)
        names = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(names)
        finally:
            os.close(names)
        return paths

    def patches(self) -> Iterator[Dict[str, Any]]:
        """The same as arguments of vLLM's ``SparseWeightPatch``, in coordinates of the checkpoint."""
        shapes = {p.name: p.shape for m in self.messages for p in Message(m).pieces}
        for name, indices, values in self:
            if int(indices[-1]) >= 1 << 31:
                raise DeltaError(f"parameter {name}: element {int(indices[-1])} has changed, and vLLM's indices have 32 bits")
            yield {"name": name, "indices": indices.to(torch.int32), "values": values, "full_shape": shapes[name]}


def read_step(message: bytes) -> int:
    """The step after which parameters are what a message makes them."""
    return _FIXED.unpack_from(message)[5]


def _digest(message: bytes) -> str:
    """What tells a message from others of its step: a digest of its table of parameters."""
    (coded,) = struct.unpack_from("<Q", message, _FIXED.size + 8)
    begin = _FIXED.size + 16 * len(_STREAMS)
    return hashlib.sha256(message[begin : begin + coded]).hexdigest()[:12]


def read_whole(message: bytes) -> bool:
    """Whether a message has all parameters."""
    return bool(_FIXED.unpack_from(message)[2] & _WHOLE)
