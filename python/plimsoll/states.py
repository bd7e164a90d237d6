"""Where the states of an optimizer rest in host memory between steps, as docs/protocol.md says (hold).

The regions of chunks lie one behind the other, with a gap before or behind all of them. A step moves every region by the
gap, in the order of :meth:`Layout.next`, so that a region only overwrites what chunks before it have left.
"""

import binascii
import ctypes
import itertools
import zlib
from typing import Any, Dict, NamedTuple, Sequence

import numpy as np

from plimsoll.errors import StateDamaged

ALIGNMENT = 256
_HEAD = 512
_SCALAR = 8
_MAXIMUM_STEPS = 1 << 27


class Moment(NamedTuple):
    """How far an optimizer is: it has made ``steps`` steps, and ``committed`` chunks have had the next one."""

    steps: int
    committed: int


class Layout:
    """Where the regions of chunks lie in the arena, by the bytes of each."""

    def __init__(self, sizes: Sequence[int]):
        self._begins = [0, *itertools.accumulate(sizes)]
        self.chunks = len(sizes)
        #: By how much a step moves each region.
        self.gap = max(sizes, default=0)
        #: The size of the arena.
        self.bytes = self._begins[-1] + self.gap

    def offset(self, chunk: int, steps: int) -> int:
        """Where the region of a chunk lies in the state after so many steps."""
        return self._begins[chunk] + (0 if steps % 2 else self.gap)

    def position(self, moment: Moment) -> int:
        """A moment in the form that is in the control arena."""
        return moment.steps * self.chunks + moment.committed

    def at(self, position: int) -> Moment:
        """The moment of a position."""
        return Moment(*divmod(min(position, _MAXIMUM_STEPS * self.chunks), self.chunks))

    def next(self, moment: Moment) -> int:
        """The chunk that is copied and committed at a moment."""
        return self.chunks - 1 - moment.committed if moment.steps % 2 else moment.committed

    def steps_of(self, chunk: int, moment: Moment) -> int:
        """How many steps a chunk has had at a moment."""
        order = self.chunks - 1 - chunk if moment.steps % 2 else chunk
        return moment.steps + (order < moment.committed)

    def condition(self, position: int, gradients_of: int, recovery: bool) -> str:
        """What can be done with states that a process has left: they are new, whole, to be made again (redo), or torn."""
        moment = self.at(position)
        if moment.steps == 0:
            return "new"
        if moment.committed == 0:
            return "whole"
        return "redo" if recovery and gradients_of == moment.steps + 1 else "torn"


def sizes_of(document: Dict[str, Any]) -> Dict[str, int]:
    """The bytes of the arenas that a document of hold asks for, by component."""
    chunks = document["chunks"]
    layout = Layout([c["bytes"] for c in chunks])
    sizes = {"held_states": layout.bytes, "held_control": _HEAD + 2 * _SCALAR * _scalars(chunks) + document["settings_bytes"]}
    if document["recovery"]:
        sizes["gradients"] = document["gradient_bytes"]
    return sizes


def _scalars(chunks: Sequence[Dict[str, Any]]) -> int:
    return sum(len(c.get("scalars", ())) for c in chunks)


#: The largest number in a word of the control arena.
MOST = (1 << 48) - 1


def sealed(number: int) -> int:
    """A number with its checksum, as it is in the control arena: one word, which one store writes."""
    return number << 16 | binascii.crc_hqx(number.to_bytes(6, "little"), 0xFFFF)


class _Word:
    """A number in the head of the control arena, read and written at once, with its checksum."""

    def __init__(self, offset: int):
        self.offset = offset

    def __set_name__(self, of: type, name: str) -> None:
        self._name = name.lstrip("_")

    def __get__(self, control: "Control", of: type) -> int:
        word = ctypes.c_uint64.from_buffer(control.memory, self.offset).value
        if sealed(word >> 16) != word:
            raise _damaged(f"{self._name}, at offset {self.offset}, is {word:#018x}")
        return word >> 16

    def __set__(self, control: "Control", value: int) -> None:
        ctypes.c_uint64.from_buffer(control.memory, self.offset).value = sealed(value)


def signed(number: int) -> int:
    """The sealed number as a device holds it, whose words have a sign."""
    word = sealed(number)
    return word - (1 << 64) if word >> 63 else word


def _damaged(what: str) -> StateDamaged:
    return StateDamaged(
        f"the control arena: {what}: memory has changed since it was written; begin again from the last checkpoint"
    )


class Control:
    """The control arena of states: how far a step is, numbers, and the hyperparameters of a step."""

    #: Where ``position`` is in the arena, for a device that writes it.
    POSITION_OFFSET = 64
    #: Where ``gradients_of`` is.
    GRADIENTS_OF_OFFSET = 128
    #: ``read`` while nothing is being saved.
    NOTHING_IS_READ = MOST

    #: Written behind the region of each chunk.
    position = _Word(POSITION_OFFSET)
    #: The step whose gradients are held, written before the first region of the step.
    gradients_of = _Word(GRADIENTS_OF_OFFSET)
    _settings_length = _Word(136)
    _settings_sum = _Word(144)
    #: Written by the service: no region may be written at a greater position.
    read = _Word(192)
    #: The position at which this process waits for ``read``.
    wanted = _Word(256)

    def __init__(self, memory: Any, document: Dict[str, Any]):
        self.memory = memory
        self._count = _scalars(document["chunks"])
        self._settings = _HEAD + 2 * _SCALAR * self._count
        self._room = document["settings_bytes"]

    def begin(self) -> None:
        """Writes the numbers of an arena that no service has made."""
        self.position = self.gradients_of = self._settings_length = self._settings_sum = self.wanted = 0
        self.read = self.NOTHING_IS_READ

    def scalars(self, steps: int) -> np.ndarray:
        """The numbers of the state after so many steps: 8 bytes for each, which begin with those of its type."""
        table = np.frombuffer(self.memory, np.uint8, 2 * _SCALAR * self._count, _HEAD).reshape(2, self._count, _SCALAR)
        return table[steps % 2]

    @property
    def settings(self) -> bytes:
        """The hyperparameters of the step of ``gradients_of``."""
        text = bytes(self.memory[self._settings : self._settings + min(self._settings_length, self._room)])
        if zlib.crc32(text) != self._settings_sum:
            raise _damaged(f"the hyperparameters, {len(text)} bytes at offset {self._settings}, have another checksum")
        return text

    @settings.setter
    def settings(self, text: bytes) -> None:
        if len(text) > self._room:
            raise ValueError(f"hyperparameters of {len(text)} bytes: settings_bytes of the document is {self._room}")
        self.memory[self._settings : self._settings + len(text)] = text
        self._settings_length, self._settings_sum = len(text), zlib.crc32(text)
