"""The arena of a shard's parameters, and how parameters get from it into the model."""

import collections
from typing import Any, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed
from torch.autograd.graph import increment_version

from plimsoll import protocol
from plimsoll.client import Request, Session
from plimsoll.errors import PlimsollError
from plimsoll.torch.forked import SharedParameters
from plimsoll.torch.layout import Piece, is_sharded, local
from plimsoll.torch.own_pages import STALE, OwnPages
from plimsoll.torch.samples import Samples
from plimsoll.torch.slot import DtypeGroup, Slot

_BLOCK_BYTES = 16 << 20  # of parameters that are copied at once
_IN_FLIGHT = 4  # blocks


class ParameterArena:
    """The arena of parameters of one dtype, which the steps change, and the model that gets them.

    Without a ``session`` this rank has no shard of them; if they are sharded it gets those of the other ranks.
    Without ``own_pages`` the model's shared parameters are in the arena itself.
    """

    def __init__(
        self,
        group: DtypeGroup,
        session: Optional[Session],
        slots: Dict[torch.Tensor, Slot],
        own_pages: Optional[OwnPages],
    ):
        self._group, self._session, self._slots, self._own_pages = group, session, slots, own_pages
        self._weights = Samples(group.own, group.dtype, session.parameters.memory) if session else None
        self._shown = Samples(group.own, group.dtype, own_pages.memory) if own_pages else None
        self._torn = False  # whether the model still lacks parameters of the last step
        self._pulled_step = 0  # the step of the parameters in the model
        self._pulled: Optional[np.ndarray] = None  # samples of them, where the model has them for longer than the arena
        self._forkable: Optional[SharedParameters] = None
        self._to_give_up: List[Tuple[int, int]] = []  # pages with weights that are being copied to the state
        #: The slots of the step under way whose parameters have not arrived in the model. None: no step is under way.
        self.missing: Optional[Dict[torch.Tensor, Slot]] = None

    @property
    def has_weights(self) -> bool:
        """Whether the weights of the state are in the arena, not beside it."""
        document = self._session.document
        return document["parameter"] == "fp32" or document["state"] != "fp32"

    def adopt(self) -> None:
        """Gives the model the parameters of the state."""
        self.forget_loaded()
        if self._group.shares_parameters and self._slots and self._forkable is None:
            self._forkable = SharedParameters(list(self._slots), self._shown or self._weights)
        if self._group.shares_parameters:
            for parameter, slot in self._slots.items():
                if slot.contiguous:
                    parameter.data = slot.like_parameter(slot.weight)
        self.pull(after_step=False)

    def check(self) -> None:
        """Refuses a step if the model's parameters are no longer those in the arena, or those of the last step."""
        if self._torn:
            raise PlimsollError(
                "the model has parameters of two steps: some of the last step have not arrived from the other ranks or the "
                "service; load the last checkpoint, or close the optimizers of all ranks and open them again"
            )
        if not self._group.shares_parameters:
            return
        for parameter, slot in self._slots.items():
            if slot.contiguous and parameter.data_ptr() != slot.weight.data_ptr():
                raise RuntimeError(
                    f"parameter {slot.piece.name} has got other memory since the optimizer was opened (model.to(), or an assignment to "
                    "its data): do that before the first step, write numbers in place (parameter.data.copy_(x)), or make a new optimizer"
                )

    def pull(self, *, after_step: bool) -> None:
        """Brings the parameters of all ranks' shards into the model, block by block.

        With ``after_step`` each block comes once the step under way has finished it.
        """
        self._torn, self.missing = True, None
        for slot in self._slots.values():
            slot.left = None
        if self._group.shares_parameters:
            self._show(after_step)
            for parameter, slot in self._slots.items():
                if slot.contiguous:
                    increment_version(parameter)
                else:
                    parameter.copy_(slot.in_arena.view(parameter.shape))
        else:
            self._copy_parameters(after_step)
        for slot in self._slots.values():
            slot.left = slot.versions()
        if after_step:
            self.forget_loaded()
        self._is_whole()

    def _is_whole(self) -> None:
        """Records that the model has all parameters of the last step."""
        if self._session is not None:
            self._pulled_step = self._session.step
            self._pulled = self._weights.in_arena() if self._group.apart else None
        self._torn, self.missing = False, None
        if self._forkable is not None:
            self._forkable.generation.end()

    # A step whose parameters arrive one by one

    def expect(self) -> None:
        """Announces the parameters of the next step. Each arrives in the model by :meth:`arrive`; then comes
        :meth:`complete`.
        """
        self.expect_some()
        self.expect_rest()

    def expect_some(self) -> None:
        """The same, of a step that changes parameters only after :meth:`changes`."""
        self._torn, self.missing = True, {}
        for slot in self._slots.values():
            slot.left = slot.versions()

    def changes(self, slot: Slot) -> bool:
        """Announces that the step changes a parameter from here on. Whether the program has written it since
        :meth:`expect_some`.
        """
        is_written = slot.left != slot.versions()
        if self._group.shared and slot.contiguous:
            increment_version(slot.piece.parameter)  # autograd refuses to read it for a gradient from here on
        slot.left = slot.versions()
        self.missing[slot.piece.parameter] = slot
        return is_written

    def expect_rest(self) -> List[Slot]:
        """Announces that the step changes all other parameters. Returns the slots that the program has written."""
        self._group.transfer.begin()  # the computation so far reads the parameters as they were
        return [slot for parameter, slot in self._slots.items() if parameter not in self.missing and self.changes(slot)]

    def arrive(self, slots: Sequence[Slot]) -> List[Slot]:
        """Brings parameters into the model that have had their update. Returns the slots that the program has written
        since :meth:`expect`.
        """
        written = [slot for slot in slots if slot.left != slot.versions()]
        inside = self._group.shared
        for slot in slots:
            if not (inside and slot.contiguous):
                self._fetch(slot)
        if not inside:
            self._group.transfer.join()
        for slot in slots:
            slot.left = slot.versions()
            self.missing.pop(slot.piece.parameter, None)
        return written

    def _fetch(self, slot: Slot) -> None:
        parameter = local(slot.piece.parameter.detach())
        if self._group.shared:
            parameter.copy_(slot.in_arena.view(parameter.shape))
        elif slot.contiguous:
            self._group.transfer.fetch(parameter.view(-1), slot.in_arena)
        else:
            values = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            self._group.transfer.begin()  # the computation so far may still have tensors in this memory
            self._group.transfer.fetch(values, slot.in_arena)
            self._group.transfer.join()
            parameter.copy_(values.view(parameter.shape))

    def arrive_partly(self, slot: Slot, ranges: Sequence[Tuple[int, int]]) -> None:
        """Brings ranges of a parameter's elements into the model. The parameter is contiguous."""
        if self._group.shared or slot.left != slot.versions():
            return  # it is there; or the program has written it, as :meth:`arrive` will find
        flat = slot.piece.parameter.detach().view(-1)
        for first, count in ranges:
            self._group.transfer.fetch(flat[first : first + count], slot.in_arena[first : first + count])
        self._group.transfer.join()
        slot.left = slot.versions()

    def complete(self) -> List[Slot]:
        """Records that all parameters have arrived. Returns the slots that the program has written since
        :meth:`expect`, in pages of its own.
        """
        written = self._written() if self._own_pages is not None else []
        self.forget_loaded()
        self._is_whole()
        return written

    def will_change(self) -> None:
        """Announces that the service will change parameters, until :meth:`pull` has brought them into the model."""
        if self._forkable is not None:
            self._forkable.generation.begin()

    def check_untouched(self) -> None:
        """Refuses to bring parameters into a model that the program has changed since the step began."""
        names = [slot.piece.name for slot in self._slots.values() if slot.left != slot.versions()]
        if not names and self._pulled is not None:
            names = self._weights.unlike(self._pulled, [(slot.piece, slot.piece.parameter) for slot in self._slots.values()])
        if names:
            raise RuntimeError(
                f"{len(names)} parameters were changed while their update was under way, {names[0]} among them: the update "
                "does not have these changes. Call optimizer.synchronize() before the program changes parameters"
            )

    def _show(self, after_step: bool) -> None:
        """Shows the program the parameters in the arena. Before a step it had no pages of its own."""
        if self._own_pages is None:
            return
        if not after_step:
            self._own_pages.give_up(self._own_pages.written())
        if (self._shown.in_arena() != self._weights.in_arena()).any():
            raise PlimsollError(STALE)

    def forget_loaded(self) -> None:
        """Forgets the master weights of a state_dict, which are of no use to the weights after a step."""
        for slot in self._slots.values():
            slot.loaded = None

    def changed(self) -> List[Slot]:
        """The slots whose parameters the program has changed in the model without the state getting them from there.

        Raises RuntimeError if a parameter was changed without autograd noticing, and the next step would overwrite
        it.
        """
        inside = [slot for slot in self._slots.values() if self._group.shares_parameters and slot.contiguous]
        outside = self._changed_outside([slot for slot in self._slots.values() if not (self._group.shares_parameters and slot.contiguous)])
        if self._group.name == "fp32":
            return outside  # the parameters inside are the state
        if self._own_pages is not None:
            return self._written() + outside
        return [slot for slot in inside if slot.left not in (None, slot.versions())] + outside

    def _changed_outside(self, slots: Sequence[Slot]) -> List[Slot]:
        """The slots that the program has changed, of parameters outside the arena."""
        left = [slot for slot in slots if slot.left is not None]
        kept = [(s.piece, s.piece.parameter) for s in left if s.left == s.versions()]
        # After another step the arena has other weights than were left in the model.
        names = self._weights.unlike_arena(kept) if kept and self._session.step == self._pulled_step else []
        if names:
            raise RuntimeError(
                f"{len(names)} parameters were written since the last step, {names[0]} among them, in a way that autograd does not "
                "count: through .data, numpy or an address. Write the parameter itself (with torch.no_grad(): p.copy_(x)), or "
                "call torch.autograd.graph.increment_version(p) afterwards: then the optimizer takes the new weights"
            )
        return [slot for slot in left if slot.left != slot.versions()]

    def _written(self) -> List[Slot]:
        """The slots whose weights in the program's own pages differ from the arena's."""
        size = self._group.dtype.itemsize
        slots, found = iter(self._slots.values()), []
        slot = next(slots, None)
        self._to_give_up = self._own_pages.written()
        for begin, end in self._to_give_up:
            while slot is not None and slot.piece.offset * size < end:
                if (slot.piece.offset + slot.piece.count) * size > begin and not _same_bits(slot.weight, slot.in_arena):
                    found.append(slot)
                slot = next(slots, None)
        return found

    def knows_weights_before(self) -> bool:
        """Whether the state still has the previous values of weights that the program has changed."""
        return self._own_pages is not None or not (self._group.shares_parameters and self.has_weights)

    def taken(self, slots: Sequence[Slot]) -> None:
        """Records that the state now has the weights of these slots from the model."""
        for slot in slots:
            slot.left = slot.versions()
        if slots and self._pulled is not None:
            self._pulled = self._weights.of([(slot.piece, slot.piece.parameter) for slot in self._slots.values()])
        if self._own_pages is not None:
            self._own_pages.give_up(self._to_give_up)

    def _copy_parameters(self, after_step: bool) -> None:
        # Parameters that are not contiguous (channels_last) come in full: blocks have the order of the shape.
        whole = {
            p: torch.empty(local(p).numel(), dtype=p.dtype, device=local(p).device)
            for p in self._group.pieces_of()
            if not local(p).is_contiguous()
        }
        self._group.transfer.begin()
        moving: Deque[Tuple[Any, torch.Tensor, List[Tuple[Piece, int, int]]]] = collections.deque()
        for tensor, block, owner in self._blocks(after_step):
            work = None
            if self.gathers():
                self._group.transfer.join()
                source = torch.distributed.get_global_rank(self._group.mesh.group, owner)
                # As bytes: gloo of torch 2.1 does not know bf16.
                work = torch.distributed.broadcast(tensor.view(torch.uint8), source, group=self._group.mesh.group, async_op=True)
            moving.append((work, tensor, block))
            if len(moving) >= _IN_FLIGHT:
                self._place(*moving.popleft(), whole)
        while moving:
            self._place(*moving.popleft(), whole)
        self._group.transfer.join()
        for parameter, values in whole.items():
            own = local(parameter.detach())
            own.copy_(values.view(own.shape))

    def gathers(self) -> bool:
        """Whether the ranks send each other parameters: they do unless the parameters are divided as the shards are.
        """
        mesh = self._group.mesh
        return mesh.world > 1 and not mesh.is_local and not any(is_sharded(p.parameter) for p in self._group.own[:1])

    def _blocks(self, after_step: bool) -> Iterator[Tuple[torch.Tensor, List[Tuple[Piece, int, int]], int]]:
        """All shards in blocks: a tensor for the block, its pieces as (piece, first in it, count), and its owner."""
        dtype = self._group.dtype
        blocks = list(self.cut(self._group.pieces))
        asked: Deque[Request] = collections.deque()
        ahead = iter([b for b in blocks if b[0] == self._group.mesh.rank] if after_step else [])
        for _ in range(_IN_FLIGHT):
            self._ask(ahead, asked)
        for owner, first, block in blocks:
            count = sum(c for _, _, c in block)
            if owner == self._group.mesh.rank:
                if asked:
                    protocol.parse_stepped(self._session.result(asked.popleft()), protocol.Kind.WAIT)
                    self._ask(ahead, asked)
                tensor = self.elements(first, count)
                if self.gathers() and local(self._group.pieces[0].parameter).device.type != "cpu":
                    buffer = torch.empty(count, dtype=dtype, device=local(self._group.pieces[0].parameter).device)
                    self._group.transfer.begin()
                    self._group.transfer.fetch(buffer, tensor)
                    tensor = buffer
            else:
                tensor = torch.empty(count, dtype=dtype, device=local(self._group.pieces[0].parameter).device)
            yield tensor, block, owner

    def _ask(self, ahead: Iterator[Any], asked: Deque[Request]) -> None:
        for _, first, block in ahead:
            asked.append(self._session.wait(first, sum(c for _, _, c in block)))
            return

    def cut(self, pieces: Sequence[Piece]) -> Iterator[Tuple[int, int, List[Tuple[Piece, int, int]]]]:
        """Pieces in blocks: (owner, offset in its shard, [(piece, first in its parameter, count), ...])."""
        return _cut_blocks(pieces, _BLOCK_BYTES // self._group.dtype.itemsize)

    def elements(self, first: int, count: int) -> torch.Tensor:
        """Elements of this rank's shard, in the arena."""
        dtype = self._group.dtype
        return torch.frombuffer(self._session.parameters.memory, dtype=dtype, count=count, offset=first * dtype.itemsize)

    def _place(
        self,
        work: Any,
        tensor: torch.Tensor,
        block: List[Tuple[Piece, int, int]],
        whole: Dict[torch.Tensor, torch.Tensor],
    ) -> None:
        """Copies a block into the parameters that it has pieces of, or into their stand-ins."""
        if work is not None:
            work.wait()
        at = 0
        for piece, first, count in block:
            begin = first if not is_sharded(piece.parameter) else first - piece.first
            into = whole.get(piece.parameter)
            flat = local(piece.parameter.detach()).view(-1) if into is None else into
            parameter = flat[begin : begin + count]
            source = tensor[at : at + count]
            if work is None:
                self._group.transfer.fetch(parameter, source)
            else:
                parameter.copy_(source)
            at += count


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def _cut_blocks(pieces: Sequence[Piece], size: int) -> Iterator[Tuple[int, int, List[Tuple[Piece, int, int]]]]:
    """Pieces that lie one after another in an owner's shard, or parts of pieces, in blocks of at most ``size`` elements:
    (owner, offset, pieces).
    """
    block: List[Tuple[Piece, int, int]] = []
    owner, offset, filled = 0, 0, 0
    for piece in pieces:
        done = 0
        while done < piece.count:
            if block and (filled == size or piece.owner != owner or piece.offset + done != offset + filled):
                yield owner, offset, block
                block = []
            if not block:
                owner, offset, filled = piece.owner, piece.offset + done, 0
            count = min(piece.count - done, size - filled)
            block.append((piece, piece.first + done, count))
            done, filled = done + count, filled + count
    if block:
        yield owner, offset, block
