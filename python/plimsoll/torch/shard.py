"""A rank's shard of the parameters of one dtype: its session and its arenas."""

import contextlib
import warnings
from typing import Any, Dict, Optional, Sequence

import numpy as np
import torch

from plimsoll import protocol
from plimsoll.client import Session
from plimsoll.errors import PlimsollError
from plimsoll.torch.gradient_arena import GradientArena
from plimsoll.torch.own_pages import OwnPages
from plimsoll.torch.parameter_arena import ParameterArena
from plimsoll.torch.slot import DtypeGroup, Slot, flat


class Shard:
    """This rank's share of a dtype group. A rank without a share has no session, and only exchanges data with the
    others' shards.
    """

    def __init__(self, group: DtypeGroup, *, announces: bool = False, waits: bool = False):
        self.group = group
        self.session: Optional[Session] = None
        self._options = {"announces": announces, "waits": waits}
        self._first_moments: Sequence[float] = ()  # their initial value, in each parameter group
        self._leave_arenas()

    @property
    def name(self) -> str:
        return self.group.name

    def open(self, path: str, document: Dict[str, Any], first_moments: Sequence[float]) -> None:
        """Opens the session of this rank's shard, if it has one."""
        self._first_moments = first_moments
        if self.group.own:
            self.session = Session(path, document)
            self._use_arenas()

    def open_anew(self) -> None:
        """Gives back a state that was found, as it is useless without another shard's state. Then no arena is
        registered.
        """
        if self.session is None:
            return
        found = self.session
        if found.attached:
            torn = found.opened.torn_step or found.opened.arriving_step
            if torn:
                warnings.warn(
                    f"the trainer of job {found.document['job']} died in the middle of step {torn}, before all gradients were "
                    f"there: only some of the {self.name} state has had that step, and its memory is freed. Training begins "
                    "anew, unless a checkpoint is loaded"
                )
            elif found.step > 0:
                whose = "that of another shard was" if found.initialized else "was"
                warnings.warn(
                    f"the {self.name} state of job {found.document['job']} was at step {found.step}, and {whose} being "
                    "changed when its trainer died: it is inconsistent, and its memory is freed. Training begins anew, "
                    "unless a checkpoint is loaded"
                )
            path, document = found.path, found.document
            found.close(give_back=True)
            self.session = found = None  # its pages are free when nobody has them mapped
            self._leave_arenas()
            self.session = Session(path, document)
        self._use_arenas()

    def _leave_arenas(self) -> None:
        self.slots: Dict[torch.Tensor, Slot] = {}
        self.gradients = GradientArena(self.group, None, self.slots, **self._options)
        self.parameters = ParameterArena(self.group, None, self.slots, None)

    def _use_arenas(self) -> None:
        session, group = self.session, self.group
        group.transfer.register(session.parameters)
        group.transfer.register(session.gradients)
        # The weights of fp32 parameters are the parameters, so there is nothing else to lose.
        own_pages = OwnPages.of(session.parameters) if group.shares_parameters and group.name != "fp32" else None
        self.slots = {p.parameter: Slot(p, session.parameters, session.gradients, own_pages) for p in group.own}
        self.gradients = GradientArena(group, session, self.slots, **self._options)
        self.parameters = ParameterArena(group, session, self.slots, own_pages)

    def give_back_if_new(self) -> None:
        """Gives back a state that was never begun: nobody has a use for it, and it would keep its memory."""
        if self.session is not None and not self.session.initialized:
            with contextlib.suppress(PlimsollError):  # the reason is being raised
                self.session.close(give_back=True)

    def initialize(self) -> None:
        """Writes the model's parameters into a new state."""
        if self.session is None:
            return
        for slot in self.slots.values():
            values = flat(slot.piece)
            if self.parameters.has_weights:
                slot.in_arena.copy_(values)
            else:
                self.session.write(protocol.MASTER_WEIGHTS, slot.piece.offset, values.float().cpu().numpy())
            if self._first_moments[slot.piece.group]:
                self.session.write(protocol.FIRST_MOMENT, slot.piece.offset, self.first_moment(slot))
        self.session.set_step(0)

    def first_moment(self, slot: Slot) -> np.ndarray:
        """The first moment of a parameter that has seen no step."""
        return np.broadcast_to(np.float32(self._first_moments[slot.piece.group]), (slot.piece.count,))

    def depart(self) -> None:
        """Gives the model memory of its own: the arenas belong to the next trainer."""
        for parameter, slot in self.slots.items() if self.group.shared else ():
            if self.group.shares_parameters and parameter.data_ptr() == slot.weight.data_ptr():
                parameter.data = parameter.data.clone()
            if parameter.grad is not None and parameter.grad is slot.shown:
                parameter.grad = parameter.grad.clone()
