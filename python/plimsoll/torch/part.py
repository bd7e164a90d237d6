"""A rank's shard of the parameters of one type, and the way of gradients and parameters to it and back."""

import collections
import contextlib
import warnings
from typing import Any, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed
from torch.autograd.graph import increment_version
from torch.utils.weak import TensorWeakRef

from plimsoll import protocol
from plimsoll.client import Arena, Request, Session
from plimsoll.errors import PlimsollError
from plimsoll.torch.forked import SharedParameters
from plimsoll.torch.layout import DTYPES, Mesh, Piece, Stretches, is_sharded, local
from plimsoll.torch.own_pages import STALE, OwnPages
from plimsoll.torch.samples import Samples
from plimsoll.torch.transfer import HostTransfer

_READY_BYTES = 4 << 20  # of gradients for a message
_BLOCK_BYTES = 16 << 20  # of parameters that are copied at once
_IN_FLIGHT = 4  # blocks
_REDUCING_BYTES = 64 << 20  # of gradients on their way to their owners


class _Seen:
    """A gradient at one moment. It is not held, and one that gets its memory when it is gone is another."""

    def __init__(self, gradient: torch.Tensor):
        self._gradient, self._state = TensorWeakRef(gradient), self._state_of(gradient)

    def is_still(self, gradient: torch.Tensor) -> bool:
        return self._gradient() is gradient and self._state_of(gradient) == self._state

    @staticmethod
    def _state_of(gradient: torch.Tensor) -> Tuple[int, ...]:
        return (local(gradient).data_ptr(), *_versions(gradient))


def _versions(tensor: torch.Tensor) -> Tuple[int, int]:
    """Other than they were where the tensor was changed. A DTensor counts changes of itself, not of what it consists of.

    That is asked itself: what ``detach`` makes of it counts anew.
    """
    return tensor._version, tensor._local_tensor._version if is_sharded(tensor) else 0


class Slot:
    """The place of a piece in this rank's shard, and what became of its gradient since the last step."""

    def __init__(self, piece: Piece, parameters: Arena, gradients: Arena, own_pages: Optional[OwnPages]):
        self.piece = piece
        # Each has a storage of its own, so that a change of one gradient does
        # not show in the versions of all others.
        self.in_arena = _tensor(parameters, piece, parameters.memory)
        # What the model has as its parameter, where that is in the arena.
        self.weight = self.in_arena if own_pages is None else _tensor(parameters, piece, own_pages.memory)
        # The arenas have the order of the shape. A parameter with another layout (channels_last) stays where it is.
        self.contiguous = local(piece.parameter).is_contiguous()
        self.gradient = _tensor(gradients, piece, gradients.memory)
        self.shown: Optional[torch.Tensor] = None  # what the parameter has as its gradient, where that is in the arena
        self.seen: Optional[_Seen] = None  # the gradient that was brought, as it was then
        self.zero = False
        self.fired = 0  # gradients that were accumulated since the last step
        self.expected = 1  # and how many there were before the last one
        # Versions of the parameter that was brought into the model, once it is there.
        self.left: Optional[Tuple[int, int]] = None
        # Master weights of a state_dict that are of other weights than the model had when it was loaded. The model may
        # get those later.
        self.loaded: Optional[torch.Tensor] = None

    def versions(self) -> Tuple[int, int]:
        return _versions(self.piece.parameter)

    def like_parameter(self, elements: torch.Tensor) -> torch.Tensor:
        """Elements in an arena with the shape and strides of the parameter, which is contiguous."""
        return elements.as_strided(self.piece.parameter.shape, self.piece.parameter.stride())


def _tensor(arena: Arena, piece: Piece, memory: Any) -> torch.Tensor:
    dtype = DTYPES[arena.type]
    return torch.frombuffer(memory, dtype=dtype, count=piece.count, offset=piece.offset * dtype.itemsize)


class Part:
    """All parameters of one type, of which this rank's shard holds some.

    ``shared`` says that the model's parameters and gradients are in the arenas
    themselves. Otherwise they are copied.
    """

    def __init__(self, name: str, pieces: Sequence[Piece], mesh: Mesh, transfer: HostTransfer, shared: bool):
        self.name, self.mesh, self.transfer, self.shared = name, mesh, transfer, shared
        self.pieces = pieces
        self.own = [p for p in pieces if p.owner == mesh.rank]
        self.session: Optional[Session] = None
        self.slots: Dict[torch.Tensor, Slot] = {}
        self.reduced: Dict[torch.Tensor, int] = {}  # how often a parameter's gradient was reduced since the last step
        self._pieces_of: Dict[torch.Tensor, List[Piece]] = collections.defaultdict(list)
        for piece in pieces:
            self._pieces_of[piece.parameter].append(piece)
        self._stretches = Stretches(max(1, _READY_BYTES // DTYPES[name].itemsize))
        self._copying: Deque[Tuple[Any, Optional[Slot]]] = collections.deque()
        self._reducing: Deque[Tuple[Any, torch.Tensor, Piece, bool]] = collections.deque()
        self._reducing_bytes = 0
        self.first_moments: Sequence[float] = ()  # what they begin with, in each parameter group
        self.announces = False  # whether gradients are said to be ready
        self.waits = False  # whether gradients are taken in the step alone, not as they arrive
        self.torn = False  # whether parameters of the last step have not come into the model
        self._own_pages: Optional[OwnPages] = None
        self._pulled_step = 0  # that of the parameters in the model
        self._forkable: Optional[SharedParameters] = None
        self._to_give_up: List[Tuple[int, int]] = []  # pages with weights that the state is getting
        self.in_arena = False  # whether the weights of the state are in the arena of parameters, not beside it

    # The session

    def open(self, path: str, document: Dict[str, Any]) -> None:
        """Opens the session of this rank's shard, if it has one."""
        if not self.own:
            return
        self.in_arena = document["parameter"] == "fp32" or document["state"] == "split"
        self.session = Session(path, document)
        self._use_arenas()

    def open_anew(self) -> None:
        """Gives a state back that was found, as it is of no use without that of another shard. No arena is registered any more."""
        if self.session is None:
            return
        found = self.session
        if found.attached:
            if found.step > 0:
                whose = "that of another shard was" if found.initialized else "was"
                warnings.warn(
                    f"the {self.name} state of job {found.document['job']} was at step {found.step}, and {whose} being changed when its trainer died: "
                    "it is a mixture, and is given back. Training begins anew, unless a checkpoint is loaded"
                )
            path, document = found.path, found.document
            found.close(give_back=True)
            self.session = found = None  # its pages are free when nobody has them mapped
            self.slots = {}
            self._own_pages = None
            del self._gradients, self._weights, self._shown
            self.session = Session(path, document)
        self._use_arenas()

    def _use_arenas(self) -> None:
        self.transfer.register(self.session.parameters)
        self.transfer.register(self.session.gradients)
        parameters, gradients = self.session.parameters, self.session.gradients
        # The weights of fp32 parameters are the parameters: there is nothing else to lose.
        self._own_pages = OwnPages.of(parameters) if self.shared and self.name != "fp32" else None
        self.slots = {p.parameter: Slot(p, parameters, gradients, self._own_pages) for p in self.own}
        dtype = DTYPES[self.name]
        self._weights = Samples(self.own, dtype, parameters.memory)
        self._shown = Samples(self.own, dtype, self._own_pages.memory) if self._own_pages else None
        self._gradients = Samples(self.own, dtype, gradients.memory)
        # Samples of the gradients for which the service has added up its part of the norm, as they were then.
        self._announced, self._announced_bits = np.zeros(len(self._gradients), bool), self._gradients.in_arena()

    def give_back_if_new(self) -> None:
        """Nobody has a use for a state that was not begun, and it would keep its memory."""
        if self.session is not None and not self.session.initialized:
            with contextlib.suppress(PlimsollError):  # the reason is being raised
                self.session.close(give_back=True)

    def initialize(self) -> None:
        """Writes the model's parameters into a new state."""
        if self.session is None:
            return
        for slot in self.slots.values():
            values = _flat(slot.piece)
            if self.in_arena:
                slot.in_arena.copy_(values)
            else:
                self.session.write(protocol.MASTER_WEIGHTS, slot.piece.offset, values.float().cpu().numpy())
            if self.first_moments[slot.piece.group]:
                self.session.write(protocol.FIRST_MOMENT, slot.piece.offset, self.first_moment(slot))
        self.session.set_step(0)

    def first_moment(self, slot: Slot) -> np.ndarray:
        """The first moment of a parameter that has seen no step."""
        return np.broadcast_to(np.float32(self.first_moments[slot.piece.group]), (slot.piece.count,))

    def adopt(self) -> None:
        """Makes the model's parameters those of the state."""
        self.forget_loaded()
        if self.shared and self.slots and self._forkable is None:
            self._forkable = SharedParameters(list(self.slots), self._shown or self._weights)
        if self.shared:
            for parameter, slot in self.slots.items():
                if slot.contiguous:
                    parameter.data = slot.like_parameter(slot.weight)
        self.pull(after_step=False)

    def depart(self) -> None:
        """Gives the model memory of its own: what is in the arenas is the next trainer's."""
        for parameter, slot in self.slots.items() if self.shared else ():
            if parameter.data_ptr() == slot.weight.data_ptr():
                parameter.data = parameter.data.clone()
            if parameter.grad is not None and parameter.grad is slot.shown:
                parameter.grad = parameter.grad.clone()

    # Gradients

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The hook of a parameter whose gradient stays here: one more was added to it."""
        slot = self.slots.get(parameter)
        if slot is None:
            return
        slot.fired += 1
        slot.seen = None
        if parameter.grad.requires_grad:
            return  # of backward(create_graph=True): the program may want its graph until the step, and nobody after it
        if self._is_elsewhere(slot):
            return  # and may be changed there, as DistributedDataParallel averages its buckets
        if self.shared and slot.contiguous:
            self._share(slot)
        if slot.fired == slot.expected and not self.waits:
            self.bring(slot)

    def _is_elsewhere(self, slot: Slot) -> bool:
        """Whether a gradient is to stay where it is: in a buffer that the program has for several, or of another type."""
        gradient = _dense(slot.piece.parameter, slot.piece)
        if self.shared and gradient.dtype is not slot.gradient.dtype:
            return True
        return not is_sharded(gradient) and gradient.untyped_storage().nbytes() > gradient.nbytes

    def _share(self, slot: Slot) -> None:
        """Makes the gradient one that is in the arena."""
        parameter = slot.piece.parameter
        if parameter.grad is slot.shown and slot.shown is not None:
            return
        if slot.shown is None:
            slot.shown = slot.like_parameter(slot.gradient)
        slot.shown.copy_(_dense(parameter, slot.piece))
        slot.zero = False
        parameter.grad = slot.shown

    def bring(self, slot: Slot) -> bool:
        """Brings a gradient into the arena, unless it is there as it is now. Whether it was brought."""
        gradient = _dense(slot.piece.parameter, slot.piece)
        if slot.seen is not None and slot.seen.is_still(gradient):
            return False
        slot.zero = False
        token = None
        if self.shared and slot.contiguous and not self._is_elsewhere(slot):
            self._share(slot)
            gradient = slot.shown
        else:
            token = self.transfer.store(slot.gradient, local(gradient).reshape(-1)[_within(slot.piece)])
        slot.seen = _Seen(gradient)
        self._arriving(token, slot)
        return True

    def _arriving(self, token: Any, slot: Slot) -> None:
        self._copying.append((token, slot))
        while self._copying and self.transfer.is_done(self._copying[0][0]):
            self._arrived(self._copying.popleft()[1])

    def _arrived(self, slot: Optional[Slot]) -> None:
        if self.announces and slot is not None:
            stretch = self._stretches.add(slot.piece.offset, slot.piece.count)
            if stretch:
                self._announce(*stretch)

    def _announce(self, first: int, count: int) -> None:
        """Says that gradients are ready. The service adds up their part of the norm."""
        self.session.ready(first, count)
        which = self._gradients.between(first, count)
        self._announced[which], self._announced_bits[which] = True, self._gradients.in_arena(which)

    def check_dense(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient of a parameter. Raises TypeError where it is not dense."""
        return _dense(parameter, self._pieces_of[parameter][0])

    def reduce(self, parameter: torch.Tensor, has_come: bool) -> None:
        """Sends a gradient to its owners, or zeros where none has come: the average over all ranks, pieces to each."""
        if not has_come or parameter.grad is None:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            gradient = torch.zeros_like(parameter, dtype=dtype).reshape(-1)
        else:
            gradient = self.check_dense(parameter).detach().reshape(-1)
        again = self.reduced.get(parameter, 0) > 0
        self.reduced[parameter] = self.reduced.get(parameter, 0) + 1
        if has_come:
            parameter.grad = None
        if self.mesh.world > 1:
            gradient.div_(self.mesh.world)
        for piece in self._pieces_of[parameter]:
            stretch = gradient[_within(piece)]
            work = None
            if self.mesh.world > 1:
                owner = torch.distributed.get_global_rank(self.mesh.group, piece.owner)
                work = torch.distributed.reduce(stretch, owner, group=self.mesh.group, async_op=True)
            self._reducing.append((work, stretch, piece, again))
            self._reducing_bytes += stretch.nbytes
        self._take_reduced(_REDUCING_BYTES)

    def _take_reduced(self, leave_bytes: int) -> None:
        """Puts gradients that have come from all ranks into the arena, until only so many bytes are on their way."""
        while self._reducing and self._reducing_bytes > leave_bytes:
            work, stretch, piece, again = self._reducing.popleft()
            self._reducing_bytes -= stretch.nbytes
            if work is not None:
                work.wait()
                self.transfer.keep(stretch)  # its stream may be another than that which waits, as autograd has its own
            if piece.owner != self.mesh.rank:
                continue
            slot = self.slots[piece.parameter]
            slot.zero = False
            slot.fired += 1
            token = (self.transfer.add if again else self.transfer.store)(slot.gradient, stretch)
            if slot.fired == slot.expected:
                self._arriving(token, slot)
            else:
                self._copying.append((token, None))

    def collect(self, reduces: bool, anew: bool) -> None:
        """Brings all gradients to the arena that are not there, says which are ready, and waits for them.

        A parameter without a gradient counts as one whose gradient is zero. With ``anew`` all gradients are brought
        again. Otherwise it raises RuntimeError where it finds one that was changed behind autograd's back.
        """
        if anew:
            for slot in self.slots.values():
                slot.seen = None
        self._announce_rest()
        again = []
        if reduces:
            self._take_reduced(0)
            # Said to be ready too early, or not at all.
            again = [s for p, s in self.slots.items() if self.reduced.get(p) and s.fired != s.expected]
        absent, kept, changed = [], [], 0
        for parameter, slot in self.slots.items():
            if reduces and self.reduced.get(parameter):
                continue
            if not reduces and parameter.grad is not None:
                changed += slot.seen is not None and not slot.seen.is_still(parameter.grad)
                if not self.bring(slot) and parameter.grad is not slot.shown:
                    kept.append((slot.piece, parameter.grad))
            elif not slot.zero:
                absent.append(slot)
        if not self.transfer.shares and 2 * changed > len(self.slots):
            warnings.warn(
                "most gradients were changed after they were copied to the host, and are copied again in the step: where the program "
                "clips them (clip_grad_norm_, or max_grad_norm of a Trainer), let the optimizer do it (AdamW(..., max_grad_norm=1.0))"
            )
        while self._copying:
            token, slot = self._copying.popleft()
            self.transfer.finish(token)
            self._arrived(slot)
        # The step will change parameters, which the last one's may still be read from; and a gradient that was
        # discarded may have been on its way.
        self.transfer.settle()
        for slot in absent:
            slot.gradient.zero_()
            slot.zero, slot.seen = True, None
        for slot in again + absent:
            self._arrived(slot)
        self._announce_rest()
        if self.slots:
            self._check_gradients(kept)

    def _announce_rest(self) -> None:
        for stretch in self._stretches.rest():
            if self.announces:
                self._announce(*stretch)

    def _check_gradients(self, kept: Sequence[Tuple[Piece, torch.Tensor]]) -> None:
        """Refuses gradients that were written since they were brought or announced, and autograd has not counted it.

        ``kept`` are those outside the arena that were not brought again.
        """
        stale = np.flatnonzero(self._announced & (self._announced_bits != self._gradients.in_arena()))
        names = self._gradients.names(stale) or self._gradients.unlike_arena(kept)
        if names:
            raise RuntimeError(
                f"the gradients of {len(names)} parameters were written after the backward pass, {names[0]} among them, in a way that "
                "autograd does not count: through .data, numpy or an address. Write p.grad itself (p.grad.mul_(x)), or give the "
                "optimizer gradients='step': then it takes all gradients in the step, not as they arrive"
            )

    def forget(self) -> None:
        """What was learned of the gradients of this step is over."""
        self.reduced.clear()
        for slot in self.slots.values():
            if slot.fired:
                slot.expected = slot.fired
            slot.fired, slot.seen = 0, None
        if self.slots:
            self._announced[:] = False

    # Parameters

    def check(self) -> None:
        """Refuses a step where the model's parameters are no longer those in the arena, or of the last step."""
        if self.torn:
            raise PlimsollError(
                "the model has parameters of two steps: those of the last step have not come as a whole "
                "from the other ranks or the service; load the last checkpoint, or close the optimizers of all ranks and open them again"
            )
        if not self.shared:
            return
        for parameter, slot in self.slots.items():
            if slot.contiguous and parameter.data_ptr() != slot.weight.data_ptr():
                raise RuntimeError(
                    f"parameter {slot.piece.name} has got other memory since the optimizer was opened (model.to(), or an assignment to "
                    "its data): do that before the first step, or make a new optimizer"
                )

    def pull(self, *, after_step: bool) -> None:
        """Brings the parameters of all ranks' shards into the model, block by block.

        With ``after_step`` a block comes when the step that has begun is through with it.
        """
        self.torn = True
        for slot in self.slots.values():
            slot.left = None
        if self.shared:
            self._show(after_step)
            for parameter, slot in self.slots.items():
                if slot.contiguous:
                    increment_version(parameter)
                else:
                    parameter.copy_(slot.in_arena.view(parameter.shape))
        else:
            self._copy_parameters(after_step)
        for slot in self.slots.values():
            slot.left = slot.versions()
        if after_step:
            self.forget_loaded()
        if self.session is not None:
            self._pulled_step = self.session.step
        self.torn = False
        if self._forkable is not None:
            self._forkable.generation.end()

    def will_change(self) -> None:
        """The service is about to change parameters, until :meth:`pull` has brought them into the model."""
        if self._forkable is not None:
            self._forkable.generation.begin()

    def _show(self, after_step: bool) -> None:
        """Makes sure that the program sees the parameters in the arena. Before a step it had no pages of its own."""
        if self._own_pages is None:
            return
        if not after_step:
            self._own_pages.give_up(self._own_pages.written())
        if (self._shown.in_arena() != self._weights.in_arena()).any():
            raise PlimsollError(STALE)

    def forget_loaded(self) -> None:
        """Masters of a state_dict are of no use to weights that come after a step."""
        for slot in self.slots.values():
            slot.loaded = None

    def changed(self) -> List[Slot]:
        """Those whose parameters the program has changed in the model, where the state does not have them from there.

        Raises RuntimeError where it finds one that was changed behind autograd's back, and the next step would overwrite it.
        """
        inside = [slot for slot in self.slots.values() if self.shared and slot.contiguous]
        outside = self._changed_outside([slot for slot in self.slots.values() if not (self.shared and slot.contiguous)])
        if self.name == "fp32":
            return outside  # the parameters inside are the state
        if self._own_pages is not None:
            return self._written() + outside
        return [slot for slot in inside if slot.left not in (None, slot.versions())] + outside

    def _changed_outside(self, slots: Sequence[Slot]) -> List[Slot]:
        """Those that the program has changed of parameters that are not in the arena."""
        left = [slot for slot in slots if slot.left is not None]
        kept = [(s.piece, s.piece.parameter) for s in left if s.left == s.versions()]
        # Of another step the arena has other weights than were left in the model.
        names = self._weights.unlike_arena(kept) if kept and self.session.step == self._pulled_step else []
        if names:
            raise RuntimeError(
                f"{len(names)} parameters were written since the last step, {names[0]} among them, in a way that autograd does not "
                "count: through .data, numpy or an address. Write the parameter itself (with torch.no_grad(): p.copy_(x)), or "
                "call torch.autograd.graph.increment_version(p) afterwards: then the optimizer takes the new weights"
            )
        return [slot for slot in left if slot.left != slot.versions()]

    def _written(self) -> List[Slot]:
        """The slots that have other weights in pages of the program's own than in the arena."""
        size = DTYPES[self.name].itemsize
        slots, found = iter(self.slots.values()), []
        slot = next(slots, None)
        self._to_give_up = self._own_pages.written()
        for begin, end in self._to_give_up:
            while slot is not None and slot.piece.offset * size < end:
                if (slot.piece.offset + slot.piece.count) * size > begin and not _same_bits(slot.weight, slot.in_arena):
                    found.append(slot)
                slot = next(slots, None)
        return found

    def knows_weights_before(self) -> bool:
        """Whether what the state has of weights that the program has changed is as it was before."""
        return self._own_pages is not None or not (self.shared and self.in_arena)

    def taken(self, slots: Sequence[Slot]) -> None:
        """The state has the weights of these from the model now."""
        for slot in slots:
            slot.left = slot.versions()
        if self._own_pages is not None:
            self._own_pages.give_up(self._to_give_up)

    def _copy_parameters(self, after_step: bool) -> None:
        # Others than contiguous ones (channels_last) come as a whole: blocks have the order of the shape.
        whole = {
            p: torch.empty(local(p).numel(), dtype=p.dtype, device=local(p).device)
            for p in self._pieces_of
            if not local(p).is_contiguous()
        }
        self.transfer.begin()
        moving: Deque[Tuple[Any, torch.Tensor, List[Tuple[Piece, int, int]]]] = collections.deque()
        for tensor, block, owner in self._blocks(after_step):
            work = None
            if self.gathers():
                self.transfer.join()
                source = torch.distributed.get_global_rank(self.mesh.group, owner)
                # As bytes: gloo of torch 2.1 does not know bf16.
                work = torch.distributed.broadcast(tensor.view(torch.uint8), source, group=self.mesh.group, async_op=True)
            moving.append((work, tensor, block))
            if len(moving) >= _IN_FLIGHT:
                self._place(*moving.popleft(), whole)
        while moving:
            self._place(*moving.popleft(), whole)
        self.transfer.join()
        for parameter, values in whole.items():
            own = local(parameter.detach())
            own.copy_(values.view(own.shape))

    def gathers(self) -> bool:
        """Whether the ranks send each other parameters: they do unless these are divided as the shards are."""
        return self.mesh.world > 1 and not any(is_sharded(p.parameter) for p in self.own[:1])

    def _blocks(self, after_step: bool) -> Iterator[Tuple[torch.Tensor, List[Tuple[Piece, int, int]], int]]:
        """All shards in blocks: the tensor for a block, the (piece, first in it, count) of which it consists, its owner."""
        dtype = DTYPES[self.name]
        own = self._whole_arena() if self.session else None
        blocks = list(_cut_blocks(self.pieces, _BLOCK_BYTES // dtype.itemsize))
        asked: Deque[Request] = collections.deque()
        ahead = iter([b for b in blocks if b[0] == self.mesh.rank] if after_step else [])
        for _ in range(_IN_FLIGHT):
            self._ask(ahead, asked)
        for owner, first, block in blocks:
            count = sum(c for _, _, c in block)
            if owner == self.mesh.rank:
                if asked:
                    protocol.parse_stepped(self.session.result(asked.popleft()), protocol.Kind.WAIT)
                    self._ask(ahead, asked)
                tensor = own[first : first + count]
                if self.gathers() and local(self.pieces[0].parameter).device.type != "cpu":
                    buffer = torch.empty(count, dtype=dtype, device=local(self.pieces[0].parameter).device)
                    self.transfer.begin()
                    self.transfer.fetch(buffer, tensor)
                    tensor = buffer
            else:
                tensor = torch.empty(count, dtype=dtype, device=local(self.pieces[0].parameter).device)
            yield tensor, block, owner

    def _ask(self, ahead: Iterator[Any], asked: Deque[Request]) -> None:
        for _, first, block in ahead:
            asked.append(self.session.wait(first, sum(c for _, _, c in block)))
            return

    def _whole_arena(self) -> torch.Tensor:
        arena = self.session.parameters
        return torch.frombuffer(arena.memory, dtype=DTYPES[arena.type], count=self.session.elements)

    def _place(
        self,
        work: Any,
        tensor: torch.Tensor,
        block: List[Tuple[Piece, int, int]],
        whole: Dict[torch.Tensor, torch.Tensor],
    ) -> None:
        """Copies a block into the parameters that it has pieces of, or into what is there in their place."""
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
                self.transfer.fetch(parameter, source)
            else:
                parameter.copy_(source)
            at += count


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def _cut_blocks(pieces: Sequence[Piece], size: int) -> Iterator[Tuple[int, int, List[Tuple[Piece, int, int]]]]:
    """Consecutive pieces of an owner, and parts of pieces, in blocks of at most ``size`` elements: (owner, offset, what)."""
    block: List[Tuple[Piece, int, int]] = []
    owner, offset, filled = 0, 0, 0
    for piece in pieces:
        done = 0
        while done < piece.count:
            if block and (filled == size or piece.owner != owner):
                yield owner, offset, block
                block = []
            if not block:
                owner, offset, filled = piece.owner, piece.offset + done, 0
            count = min(piece.count - done, size - filled)
            block.append((piece, piece.first + done, count))
            done, filled = done + count, filled + count
    if block:
        yield owner, offset, block


def _within(piece: Piece) -> slice:
    """Where a piece is in this rank's own elements of its parameter."""
    first = 0 if is_sharded(piece.parameter) else piece.first
    return slice(first, first + piece.count)


def _flat(piece: Piece) -> torch.Tensor:
    return local(piece.parameter.detach()).reshape(-1)[_within(piece)]


def _dense(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    gradient = parameter.grad
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {piece.name} is {gradient.layout}: expected a dense one; make it so (sparse=False), or leave it to an optimizer of torch"
        )
    if tuple(parameter.shape) != tuple(piece.shape):
        raise RuntimeError(
            f"parameter {piece.name} has the shape {list(parameter.shape)}, and had {list(piece.shape)} when the optimizer was opened: "
            "resize the model before the optimizer is opened, or close it and make a new one"
        )
    return gradient
