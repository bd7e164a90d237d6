"""The control arena of a held state: how far the step has come, and the numbers of the state."""

import json
import struct
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from plimsoll.torch.regions import Held, Layout, Region, Scalar
from plimsoll.torch.wrapped import encoded

# Words of eight bytes.
POSITION, GRADIENTS_OF, READ, FILLED, OPTIONS_BYTES = range(5)
_WORDS = 64  # then two tables of numbers, a byte for each parameter's gradient, and the options
NOTHING, WHOLE, REPLACED = range(3)  # what FILLED says


def control_bytes(layout: Layout) -> int:
    return 8 * (_WORDS + 2 * layout.numbers) + len(layout.held) + layout.groups_bytes


class Control:
    """A view of the control arena.

    ``position`` is the number of steps times that of the regions, and the number of regions of the next step. The two
    tables of numbers belong to even and to odd steps. A table begins with a number for each parameter: 1 once it has
    a state.
    """

    def __init__(self, memory: Any, layout: Layout):
        self._layout = layout
        self.words = torch.frombuffer(memory, dtype=torch.int64, count=_WORDS + 2 * layout.numbers)
        begin = 8 * len(self.words)
        count = len(layout.held)
        self._present = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=begin) if count else torch.empty(0)
        self._options = memoryview(memory)[begin + count : begin + count + layout.groups_bytes]

    def word(self, which: int) -> torch.Tensor:
        return self.words[which : which + 1]

    def get(self, which: int) -> int:
        return int(self.words[which])

    def set(self, which: int, value: int) -> None:
        self.words[which] = value

    @property
    def step(self) -> int:
        """The number of steps that all regions have made."""
        return self.get(POSITION) // max(1, len(self._layout.regions))

    @property
    def committed(self) -> int:
        """The number of regions that have made one more."""
        return self.get(POSITION) % max(1, len(self._layout.regions))

    # Numbers

    def _table(self, step: int) -> torch.Tensor:
        begin = _WORDS + step % 2 * self._layout.numbers
        return self.words[begin : begin + self._layout.numbers]

    def has_state(self, held: Held, step: int) -> bool:
        return bool(self._table(step)[held.index])

    def any_state(self, step: int) -> bool:
        return bool(self._table(step)[: len(self._layout.held)].any())

    def set_state(self, held: Held, step: int, has: bool) -> None:
        self._table(step)[held.index] = int(has)

    def number(self, scalar: Scalar, step: int) -> Any:
        raw = self._table(step)[scalar.place : scalar.place + 1]
        if scalar.dtype is not None:
            return raw.view(torch.uint8)[: scalar.dtype.itemsize].clone().view(scalar.dtype).reshape(())
        value = int(raw)
        return struct.unpack("<d", struct.pack("<q", value))[0] if scalar.number is float else scalar.number(value)

    def set_number(self, scalar: Scalar, step: int, value: Any) -> None:
        raw = self._table(step)[scalar.place : scalar.place + 1]
        if scalar.dtype is not None:
            raw.view(torch.uint8)[: scalar.dtype.itemsize].copy_(value.detach().reshape(1).view(torch.uint8))
        elif scalar.number is float:
            raw[0] = struct.unpack("<q", struct.pack("<d", value))[0]
        else:
            raw[0] = int(value)

    def keep_numbers(self, held: Held, step: int) -> None:
        """The numbers of a parameter that the step after ``step`` does not change."""
        before, after = self._table(step), self._table(step + 1)
        for place in (held.index, *(s.place for s in held.scalars)):
            after[place] = before[place]

    def await_read(self, region: Region, step: int) -> None:
        """Waits until a save under way has read what the step after ``step`` overwrites with this region."""

    # The step under way

    def describe_step(self, groups: Sequence[Dict[str, Any]], without: Sequence[int]) -> None:
        """Writes down what the next step is made with, for whoever has to finish it."""
        text = json.dumps(encoded(groups)).encode()
        if len(text) > len(self._options):
            raise ValueError(
                f"the options of the parameter groups are {len(text)} bytes of JSON: expected at most {len(self._options)}, twice "
                "what they were when the optimizer was opened"
            )
        self._options[: len(text)] = text
        self.set(OPTIONS_BYTES, len(text))
        self._present.fill_(1)
        for index in without:
            self._present[index] = 0

    def described_step(self) -> Tuple[List[Dict[str, Any]], List[bool]]:
        """The options of the groups, and which parameters have a gradient."""
        options = json.loads(bytes(self._options[: self.get(OPTIONS_BYTES)]))
        return options, [bool(p) for p in self._present]


def options_bytes(groups: Sequence[Dict[str, Any]]) -> int:
    """What the control arena has for the options of these groups."""
    return 4096 + 2 * len(json.dumps(encoded(groups)))


def torn(control: Control) -> Optional[str]:
    """Why a state that was found cannot be gone on with, or None."""
    if control.get(FILLED) == REPLACED:
        return "the process that held it died while it was loading another state"
    if control.committed and control.get(GRADIENTS_OF) != control.step + 1:
        return f"the process that held it died within step {control.step + 1}, and recovery is False"
    return None
