"""The parameters of the step under way, as they arrive in the model."""

import collections
from typing import Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from plimsoll.client import Request
from plimsoll.torch.layout import Piece
from plimsoll.torch.shard import Shard
from plimsoll.torch.shards import Shards
from plimsoll.torch.slot import Slot

_COPIED_BYTES = 16 << 20  # of parameters that are awaited and then copied at once

_WRITTEN = (
    "was written while the service updated it: its value is neither the program's nor the update's. Call optimizer.synchronize() before "
    "the program writes parameters or gradients. To go on, load the last checkpoint (optimizer.load), or a state (load_state_dict)"
)


class Arrivals:
    """Waits for parameters that a step under way is changing.

    With ``strict`` a parameter has arrived only once somebody has waited for it, however fast the update was.
    """

    def __init__(self, shards: Shards, *, strict: bool):
        self._shards, self._strict, self._transfer = list(shards), strict, shards.transfer
        self._shard_of = {parameter: shard for shard in self._shards for parameter in shard.slots}
        self._over: Set[Shard] = set()  # shards that have finished the step as a whole, as an answer said
        self._seconds: Dict[Shard, float] = {}  # of the last step that is known to be finished
        self._fault: Optional[str] = None

    def end(self) -> None:
        """Ends with the optimizer, which is closed."""

    def begin(self) -> None:
        """Runs before a step begins. It may have the number of an earlier one, after a load."""
        self._over.clear()

    def begun(self, failure: Optional[Exception]) -> None:
        """Runs when a step has begun, on other ranks at least: here there may have been a failure."""

    def order(self, order: Callable[[List[torch.Tensor]], List[torch.Tensor]]) -> None:
        """Has the service update parameters in an order, from the next step on."""
        for shard in (shard for shard in self._shards if shard.session):
            ranges: List[Tuple[int, int]] = []
            for piece in (shard.slots[parameter].piece for parameter in order(list(shard.slots))):
                if ranges and sum(ranges[-1]) == piece.offset:
                    ranges[-1] = ranges[-1][0], ranges[-1][1] + piece.count
                else:
                    ranges.append((piece.offset, piece.count))
            shard.session.order(ranges)

    @property
    def update_seconds(self) -> float:
        """How long the update of the last step took that is known to be finished; 0 if there is none."""
        return sum(self._seconds.values())

    @property
    def are_underway(self) -> bool:
        return any(shard.parameters.missing is not None for shard in self._shards)

    @property
    def parameters(self) -> List[torch.Tensor]:
        return list(self._shard_of)

    def name(self, parameter: torch.Tensor) -> str:
        return self.slot(parameter).piece.name

    def slot(self, parameter: torch.Tensor) -> Slot:
        return self._shard_of[parameter].slots[parameter]

    def missing(self, parameter: torch.Tensor) -> Optional[Slot]:
        """The slot of a parameter that has not arrived."""
        shard = self._shard_of.get(parameter)
        return shard.parameters.missing.get(parameter) if shard and shard.parameters.missing else None

    def all_missing(self) -> List[Slot]:
        return [slot for shard in self._shards for slot in (shard.parameters.missing or {}).values()]

    def need(self, parameters: Iterable[torch.Tensor]) -> None:
        """Returns when these parameters are those after the step. Raises RuntimeError if the program has written some
        meanwhile.
        """
        needed: Dict[Shard, List[Slot]] = {}
        for parameter in parameters:
            slot = self.missing(parameter)
            if slot is not None:
                needed.setdefault(self._shard_of[parameter], []).append(slot)
        for shard, slots in needed.items():
            self._bring(shard, slots)
        self.check()

    def catch_up(self) -> None:
        """Has the current stream of a device wait for what has arrived, as the streams do that it arrived for."""
        self._transfer.catch_up()

    def need_all(self) -> None:
        """Returns when the step is finished and the model has all of it, whatever the program has written."""
        for shard in self._shards:
            if shard.parameters.missing is not None:
                self._bring(shard, list(shard.parameters.missing.values()))

    def need_ranges(self, parameter: torch.Tensor, ranges: Sequence[Tuple[int, int]]) -> None:
        """Returns when these elements of a parameter are those after the step: pairs of the first, and how many."""
        slot = self.missing(parameter)
        if slot is None:
            return
        shard, offset = self._shard_of[parameter], slot.piece.offset
        shard.session.drain()  # after an interrupt, the answer about the step may be one of those to come
        for request in [shard.session.wait(offset + first, count) for first, count in ranges]:
            self._wait(shard, request)
        shard.parameters.arrive_partly(slot, ranges)
        self._take_rest(shard)
        self.check()

    def need_on_all_streams(self, parameters: Sequence[torch.Tensor]) -> None:
        """The same as :meth:`need`, for reads on any stream of the device."""
        are_missing = any(self.missing(p) is not None for p in parameters)
        self.need(parameters)
        if are_missing:
            self._transfer.settle()

    def before_gradient(self, parameter: torch.Tensor) -> None:
        """Returns when the update under way no longer needs the memory of a gradient."""
        self.need([parameter])

    def _bring(self, shard: Shard, slots: List[Slot]) -> None:
        most = shard.session.elements if shard.group.shared else _COPIED_BYTES // shard.group.dtype.itemsize
        shard.session.drain()  # as above
        asked: Deque[Tuple[Optional[Request], List[Slot]]] = collections.deque()
        for first, count, joined in _joined(slots, most):
            asked.append((None if shard in self._over else shard.session.wait(first, count), joined))
        while asked:
            request, joined = asked.popleft()
            if request is not None:
                self._wait(shard, request)
            self._arrive(shard, joined)
        self._take_rest(shard)

    def _wait(self, shard: Shard, request: Request) -> None:
        seconds = shard.session.waited(request)
        if seconds > 0:
            self._over.add(shard)
            self._seconds[shard] = seconds

    def _take_rest(self, shard: Shard) -> None:
        """Takes the parameters that nobody has waited for, once the step is finished. A device gets its copy of each
        only when it is needed: then computation goes on while the others are copied.
        """
        missing = shard.parameters.missing
        if missing and shard in self._over and shard.group.shared and not self._strict:
            self._arrive(shard, list(missing.values()))
        if missing is not None and not shard.parameters.missing:
            # A page has several parameters, and an own one has none of the updates since: the first may be another's.
            self._fail(shard.parameters.complete(), "a parameter in the pages of")

    def expect_some(self) -> None:
        """Runs when a step begins before its gradients are there. It changes what :meth:`changes` names."""
        for shard in self._shards:
            shard.parameters.expect_some()
            shard.gradients.update_awaits()

    def changes(self, slot: Slot) -> None:
        """Announces that the step under way changes a parameter from here on."""
        if self._shard_of[slot.piece.parameter].parameters.changes(slot):
            self._fail([slot], "parameter")

    def expect_rest(self) -> None:
        """Announces that it changes all others."""
        for shard in self._shards:
            shard.gradients.update_begins()
            self._fail(shard.parameters.expect_rest(), "parameter")

    def expect_no_rest(self) -> None:
        """Announces that it changes no other: it is retracted, for which gradients are read."""
        for shard in self._shards:
            shard.gradients.update_begins()

    def _arrive(self, shard: Shard, slots: Sequence[Slot]) -> None:
        self._fail(shard.gradients.written_since(slots), "the gradient of parameter")
        self._fail(shard.parameters.arrive(slots), "parameter")

    # Faults

    def fail(self, fault: str) -> None:
        """Has all checks raise RuntimeError with this message, until :meth:`forgive`."""
        if self._fault is None:
            self._fault = fault

    def _fail(self, slots: Sequence[Slot], what: str) -> None:
        if slots:
            self._fail_of(slots[0].piece, what)

    def _fail_of(self, piece: Piece, what: str) -> None:
        self.fail(f"{what} {piece.name} {_WRITTEN}")

    def check(self) -> None:
        """Raises RuntimeError if something has failed, such as that the program has written parameters or gradients
        that were being updated. It does so until :meth:`forgive`.
        """
        if self._fault is not None:
            raise RuntimeError(self._fault)

    def forgive(self) -> None:
        """Forgets what has failed: state and model were replaced."""
        self._fault = None


def _joined(slots: Sequence[Slot], most: int) -> Iterator[Tuple[int, int, List[Slot]]]:
    """Adjacent slots, joined while they have at most so many elements: (first element, count, slots)."""
    first, end, joined = 0, 0, []
    for slot in sorted(slots, key=lambda slot: slot.piece.offset):
        piece = slot.piece
        if joined and (piece.offset != end or piece.offset + piece.count - first > most):
            yield first, end - first, joined
            joined = []
        if not joined:
            first = piece.offset
        end = piece.offset + piece.count
        joined = [*joined, slot]
    if joined:
        yield first, end - first, joined
