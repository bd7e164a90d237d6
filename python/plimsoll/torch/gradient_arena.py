"""The arena of a shard's gradients, and how gradients get into it."""

import collections
import warnings
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed

from plimsoll.client import Session
from plimsoll.torch.layout import DTYPES, Piece, Ranges, is_sharded, local
from plimsoll.torch.samples import Samples
from plimsoll.torch.slot import DtypeGroup, Seen, Slot, dense, within
from plimsoll.torch.underway import Underway

_READY_BYTES = 4 << 20  # of gradients for a message
_REDUCING_BYTES = 64 << 20  # of gradients in flight to their owners


class Announcements:
    """The gradients that the service was told are ready. It adds up their part of the norm.

    While an update is ``underway`` they are kept back: the service would take them only after it, and with them all
    that is asked later.
    """

    def __init__(self, session: Session, pieces: Sequence[Piece], dtype: torch.dtype, underway: Underway):
        self._session, self._underway = session, underway
        self._kept_back: List[Tuple[int, int]] = []
        self._ranges = Ranges(max(1, _READY_BYTES // dtype.itemsize))
        self._samples = Samples(pieces, dtype, session.gradients.memory)
        # Samples of the announced gradients, as of the announcement.
        self._announced, self._bits = np.zeros(len(self._samples), bool), self._samples.in_arena()
        self._read = self._bits  # samples of the gradients that the update under way reads

    def add(self, piece: Piece) -> None:
        """Records that the gradient of a piece is final. Tells the service once there is enough for a message."""
        complete = self._ranges.add(piece.offset, piece.count)
        if complete:
            self._kept_back.append(complete)
            if not self._underway:
                self._send_kept_back()

    def rest(self) -> None:
        self._kept_back += self._ranges.rest()
        self._send_kept_back()

    def _send_kept_back(self) -> None:
        for first, count in self._kept_back:
            self.send(first, count)
        self._kept_back.clear()

    def send(self, first: int, count: int) -> None:
        self._session.ready(first, count)
        which = self._samples.between(first, count)
        self._announced[which], self._bits[which] = True, self._samples.in_arena(which)

    def written_since(self, kept: Sequence[Tuple[Piece, torch.Tensor]]) -> List[str]:
        """The parameters whose gradients differ from those announced, or from those ``kept`` outside the arena."""
        stale = np.flatnonzero(self._announced & (self._bits != self._samples.in_arena()))
        return self._samples.names(stale) or self._samples.unlike_arena(kept)

    def forget(self) -> None:
        self._announced[:] = False
        self._ranges.rest()

    def update_begins(self) -> None:
        self._read = self._samples.in_arena()

    def is_as_read(self, piece: Piece) -> bool:
        """Whether a gradient has the values with which the update under way began."""
        which = self._samples.between(piece.offset, piece.count)
        return bool((self._read[which] == self._samples.in_arena(which)).all())


class GradientArena:
    """The arena of gradients of one dtype, with the gradients of this and other ranks in flight to it.

    Without a ``session`` this rank has no shard of them; if they are sharded it sends its gradients to the other
    ranks' shards. ``announces`` means that the service adds up the norm of some gradients while others are in flight.
    ``waits`` means that gradients are taken only in the step, not as they arrive.
    """

    def __init__(
        self, group: DtypeGroup, session: Optional[Session], slots: Dict[torch.Tensor, Slot], *, announces: bool, waits: bool
    ):
        self._group, self._slots = group, slots
        self._underway = Underway(session) if session else None
        self._announcements = Announcements(session, group.own, DTYPES[group.gradient], self._underway) if session else None
        self._announces, self._waits = announces, waits
        self._is_awaited = False  # whether the update under way waits for gradients
        #: What takes gradients for a step before the program asks for it: it is called when one is final.
        self.takes_final: Optional[Callable[[Slot], None]] = None
        self._pieces_of = group.pieces_of()
        self._copying: Deque[Tuple[Any, Optional[Slot]]] = collections.deque()
        self._reducing: Deque[Tuple[Any, torch.Tensor, Piece, bool]] = collections.deque()
        self._reducing_bytes = 0
        self._reduced: Dict[torch.Tensor, int] = {}  # how often a parameter's gradient was reduced since the last step

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The hook of a parameter whose gradient stays on this rank. It runs after each accumulation."""
        slot = self._slots.get(parameter)
        if slot is None:
            return
        slot.fired += 1
        slot.seen = None
        if parameter.grad.requires_grad:
            return  # of backward(create_graph=True): the program may want its graph until the step, and nobody after it
        if self._is_elsewhere(slot):
            return  # and may change there: DistributedDataParallel averages its buckets
        self._underway.wait_for(slot.piece)
        if self._group.shared and slot.contiguous:
            self._share(slot)
        if self.takes_final is not None:
            slot.leave(parameter.grad)
            if slot.fired == slot.expected:
                self.takes_final(slot)
        if slot.fired == slot.expected and not self._waits:
            self.bring(slot)

    def _is_elsewhere(self, slot: Slot) -> bool:
        """Whether a gradient stays where it is: in a buffer that the program shares among several, or of another
        type.
        """
        gradient = dense(slot.piece.parameter, slot.piece)
        if self._group.shared and gradient.dtype is not slot.gradient.dtype:
            return True
        return not is_sharded(gradient) and gradient.untyped_storage().nbytes() > gradient.nbytes

    def _share(self, slot: Slot) -> None:
        """Makes the gradient a view of the arena."""
        parameter = slot.piece.parameter
        if parameter.grad is slot.shown and slot.shown is not None:
            return
        slot.let_go()
        if slot.shown is None:
            slot.shown = slot.like_parameter(slot.gradient)
        slot.shown.copy_(dense(parameter, slot.piece))
        slot.zero = False
        parameter.grad = slot.shown

    def bring(self, slot: Slot) -> bool:
        """Brings a gradient into the arena, unless the arena has it already in its present form. Returns whether it
        was brought.
        """
        gradient = dense(slot.piece.parameter, slot.piece)
        if slot.seen is not None and slot.seen.is_still(gradient):
            return False
        slot.zero = False
        token = None
        if self._group.shared and slot.contiguous and not self._is_elsewhere(slot):
            self._share(slot)
            gradient = slot.shown
        else:
            token = self._group.transfer.store(slot.gradient, local(gradient).reshape(-1)[within(slot.piece)])
        slot.seen = Seen(gradient)
        self._arriving(token, slot)
        return True

    def _arriving(self, token: Any, slot: Slot) -> None:
        self._copying.append((token, slot))
        while self._copying and self._group.transfer.is_done(self._copying[0][0]):
            self._arrived(self._copying.popleft()[1])

    def _arrived(self, slot: Optional[Slot]) -> None:
        if (self._announces or self._is_awaited) and slot is not None:
            self._announcements.add(slot.piece)

    def check_dense(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient of a parameter. Raises TypeError if it is not dense."""
        return dense(parameter, self._pieces_of[parameter][0])

    def reduce(self, parameter: torch.Tensor, has_come: bool) -> None:
        """Sends a gradient to its owners, or zeros if there is none. Each owner gets its pieces of the average over
        all ranks.
        """
        if not has_come or parameter.grad is None:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            gradient = torch.zeros_like(parameter, dtype=dtype).reshape(-1)
        else:
            gradient = self.check_dense(parameter).detach().reshape(-1)
        again = self._reduced.get(parameter, 0) > 0
        self._reduced[parameter] = self._reduced.get(parameter, 0) + 1
        if has_come:
            parameter.grad = None
        if self._group.mesh.world > 1:
            gradient.div_(self._group.mesh.world)
        for piece in self._pieces_of[parameter]:
            values = gradient[within(piece)]
            work = None
            if self._group.mesh.world > 1:
                owner = torch.distributed.get_global_rank(self._group.mesh.group, piece.owner)
                work = torch.distributed.reduce(values, owner, group=self._group.mesh.group, async_op=True)
            self._reducing.append((work, values, piece, again))
            self._reducing_bytes += values.nbytes
        self._take_reduced(_REDUCING_BYTES)

    def _take_reduced(self, leave_bytes: int) -> None:
        """Puts gradients that have arrived from all ranks into the arena, until at most so many bytes are in flight.
        """
        while self._reducing and self._reducing_bytes > leave_bytes:
            work, values, piece, again = self._reducing.popleft()
            self._reducing_bytes -= values.nbytes
            if work is not None:
                work.wait()
                self._group.transfer.keep(values)  # it may be on another stream than the one that waits: autograd has its own
            if piece.owner != self._group.mesh.rank:
                continue
            slot = self._slots[piece.parameter]
            slot.zero = False
            slot.fired += 1
            token = (self._group.transfer.add if again else self._group.transfer.store)(slot.gradient, values)
            if slot.fired == slot.expected:
                self._arriving(token, slot)
            else:
                self._copying.append((token, None))

    def collect(self, reduces: bool, anew: bool) -> None:
        """Brings all missing gradients to the arena, announces those that are ready, and waits for them.

        A parameter without a gradient counts as one whose gradient is zero. With ``anew`` all gradients are brought
        again. Otherwise it raises RuntimeError if it finds a gradient that was changed without autograd noticing.
        """
        if anew:
            for slot in self._slots.values():
                slot.seen = None
        if self._announcements:
            self._announcements.rest()
        again = []
        if reduces:
            self._take_reduced(0)
            # These were announced too early, or not at all.
            again = [s for p, s in self._slots.items() if self._reduced.get(p) and s.fired != s.expected]
        absent, kept, changed = [], [], 0
        for parameter, slot in self._slots.items():
            if reduces and self._reduced.get(parameter):
                continue
            if not reduces and parameter.grad is not None:
                changed += slot.seen is not None and not slot.seen.is_still(parameter.grad)
                if not self.bring(slot) and parameter.grad is not slot.shown:
                    kept.append((slot.piece, parameter.grad))
            elif not slot.zero:
                absent.append(slot)
        if not self._group.transfer.shares and 2 * changed > len(self._slots):
            warnings.warn(
                "most gradients were changed after they were copied to the host, and are copied again in the step: where the program "
                "clips them (clip_grad_norm_, or max_grad_norm of a Trainer), let the optimizer do it (AdamW(..., max_grad_norm=1.0))"
            )
        while self._copying:
            token, slot = self._copying.popleft()
            self._group.transfer.finish(token)
            self._arrived(slot)
        # The step will change parameters, which copies of the last step may still read. A discarded gradient may
        # still be in flight, too.
        self._group.transfer.settle()
        for slot in absent:
            self.clear(slot)
        for slot in again + absent:
            self._arrived(slot)
        if self._announcements:
            self._announcements.rest()
            self._check_written(kept)

    def clear(self, slot: Slot) -> None:
        """Makes a gradient zero in the arena: the parameter has none."""
        slot.let_go()
        slot.gradient.zero_()
        slot.zero, slot.seen = True, None

    def _check_written(self, kept: Sequence[Tuple[Piece, torch.Tensor]]) -> None:
        """Refuses gradients that were written after they were brought or announced, without autograd counting it.

        ``kept`` are the gradients outside the arena that were not brought again.
        """
        names = self._announcements.written_since(kept)
        if names:
            raise RuntimeError(
                f"the gradients of {len(names)} parameters were written after the backward pass, {names[0]} among them, in a way that "
                "autograd does not count: through .data, numpy or an address. Write p.grad itself (p.grad.mul_(x)), or give the "
                "optimizer gradients='step': then it takes all gradients in the step, not as they arrive"
            )

    def update_awaits(self) -> None:
        """Announces gradients from here on: an update waits for them."""
        self._is_awaited = True

    def update_is_over(self) -> None:
        """Waits until no update reads the gradients."""
        if self._underway is not None:
            self._underway.wait()

    def update_begins(self) -> None:
        """Notes the gradients, which an update will read while the program goes on.

        If the model has parameters of its own, the next backward pass may come before the update is over. Then
        gradients in the arena leave the model: the program could write them there.
        """
        if self._group.apart:
            if self._underway is not None:
                self._underway.begins()
            for parameter, slot in self._slots.items():
                if slot.shown is not None and parameter.grad is slot.shown:
                    parameter.grad = None
            return
        for slot in self._slots.values():
            slot.read = slot.shown._version if slot.shown is not None else None
        if self._announcements and self._group.shared:
            self._announcements.update_begins()

    def written_since(self, slots: Sequence[Slot]) -> List[Slot]:
        """The slots whose gradients in the arena the program has written since the update began."""
        shown = [slot for slot in slots if slot.shown is not None and slot.read is not None]
        return [s for s in shown if s.read != s.shown._version or not self._announcements.is_as_read(s.piece)]

    def forget(self) -> None:
        """Forgets what was learned of this step's gradients."""
        self._reduced.clear()
        self._is_awaited = False
        for slot in self._slots.values():
            if slot.fired:
                # A gradient that is taken for final too early cannot be taken back.
                slot.expected = slot.fired if self.takes_final is None else max(slot.fired, slot.expected)
            slot.fired, slot.seen, slot.accumulated = 0, None, None
        if self._announcements:
            self._announcements.forget()

    def give_up(self) -> None:
        """Discards all gradients: the step that waited for them is given up."""
        self._group.transfer.settle()
        self._copying.clear()
        for slot in self._slots.values():
            slot.fired = 0
        self.forget()
