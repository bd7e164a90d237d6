"""The control arena of a held state as tensors: how far the step has come, and the numbers of the state."""

import json
import struct
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch

from plimsoll import states
from plimsoll.torch.regions import Held, Layout, Scalar
from plimsoll.torch.wrapped import encoded, options_of

class Control:
    """A view of the control arena. Words that a device writes are tensors, of numbers with their checksums."""

    def __init__(self, control: states.Control, layout: Layout, wait: Callable[[int], None]):
        self._control, self._layout, self._wait = control, layout, wait
        self.position, self.gradients_of = (
            torch.frombuffer(control.memory, dtype=torch.int64, count=1, offset=offset)
            for offset in (control.POSITION_OFFSET, control.GRADIENTS_OF_OFFSET)
        )
        self._tables = [torch.from_numpy(control.scalars(parity)).view(torch.int64).view(-1) for parity in (0, 1)]

    @property
    def moment(self) -> states.Moment:
        """How many steps all regions have made, and how many regions one more."""
        return self._layout.places.at(self._control.position)

    @property
    def step_of_gradients(self) -> int:
        """The step whose gradients are held."""
        return self._control.gradients_of

    @property
    def step(self) -> int:
        return self.moment.steps

    @property
    def condition(self) -> str:
        recovery = self._layout.gradients_bytes > 0
        return self._layout.places.condition(self._control.position, self._control.gradients_of, recovery)

    def set_moment(self, steps: int, committed: int = 0) -> None:
        self._control.position = self._layout.places.position(states.Moment(steps, committed))

    def forget_gradients(self) -> None:
        """Says that a step under way cannot be finished: what it has changed is torn."""
        self._control.gradients_of = 0

    def await_read(self, steps: int, committed: int) -> None:
        """Waits until a save under way has read what the next region overwrites."""
        self._wait(self._layout.places.position(states.Moment(steps, committed)))

    def await_save(self) -> None:
        """Waits until nothing is being saved."""
        self._wait(self._control.NOTHING_IS_READ)

    # Numbers

    def clear_numbers(self) -> None:
        for table in self._tables:
            table.zero_()

    def has_state(self, held: Held, step: int) -> bool:
        return bool(self._tables[step % 2][held.flag])

    def any_state(self, step: int) -> bool:
        return any(self.has_state(held, step) for held in self._layout.held)

    def set_state(self, held: Held, step: int, has: bool) -> None:
        self._tables[step % 2][held.flag] = int(has)

    def number(self, scalar: Scalar, step: int) -> Any:
        raw = self._raw(scalar, step)
        if scalar.dtype is not None:
            return raw.view(torch.uint8)[: scalar.dtype.itemsize].clone().view(scalar.dtype).reshape(())
        value = int(raw)
        return struct.unpack("<d", struct.pack("<q", value))[0] if scalar.number is float else scalar.number(value)

    def set_number(self, scalar: Scalar, step: int, value: Any) -> None:
        raw = self._raw(scalar, step)
        if scalar.dtype is not None:
            raw.view(torch.uint8)[: scalar.dtype.itemsize].copy_(value.detach().reshape(1).view(torch.uint8))
        elif scalar.number is float:
            raw[0] = struct.unpack("<q", struct.pack("<d", value))[0]
        else:
            raw[0] = int(value)

    def _raw(self, scalar: Scalar, step: int) -> torch.Tensor:
        return self._tables[step % 2][scalar.place : scalar.place + 1]

    def keep_numbers(self, held: Held, step: int) -> None:
        """The numbers of a parameter that the step after ``step`` does not change."""
        before, after = self._tables[step % 2], self._tables[(step + 1) % 2]
        for place in (held.flag, *(s.place for s in held.scalars)):
            after[place] = before[place]

    # The step under way

    def describe_step(self, groups: Sequence[Dict[str, Any]], without: Sequence[int]) -> None:
        """Writes down what the next step is made with, for whoever has to finish it."""
        self._control.settings = json.dumps({"groups": encoded(groups), "without": list(without)}).encode()

    def described_step(self) -> Tuple[List[Dict[str, Any]], List[int]]:
        """The options of the groups, and which parameters have no gradient."""
        described = json.loads(self._control.settings)
        return described["groups"], described["without"]


_ROOM = 64 << 10


def settings_bytes(groups: Sequence[Dict[str, Any]], parameters: int) -> int:
    """What the control arena has for the description of a step: enough for any values of these options, and for the
    numbers of all held parameters. Options have a room that `plimsoll plan` knows: 64 KiB, or what a multiple of it
    they need.
    """
    options = [options_of(g) for g in groups]
    values = sum(len(v) if isinstance(v, (tuple, list)) else 1 for o in options for v in o.values())
    keys = sum(len(str(k)) for o in options for k in o)
    return -(-(4096 + 64 * (keys + values)) // _ROOM) * _ROOM + 8 * parameters
