"""A held state that is open: its arenas, and the steps that it makes."""

from typing import Any, Dict, List, Optional, Tuple

import torch

from plimsoll.torch import held_entries
from plimsoll.torch.control import FILLED, GRADIENTS_OF, NOTHING, POSITION, REPLACED, WHOLE, Control, torn
from plimsoll.torch.cycle import Cycle, Memory
from plimsoll.torch.demands import Demands
from plimsoll.torch.layout import local
from plimsoll.torch.redo import can_finish, finish_step, restore_parameters
from plimsoll.torch.regions import Layout
from plimsoll.torch.window import streams_for
from plimsoll.torch.wrapped import Wrapped

_Entries = Dict[torch.Tensor, Dict[str, Any]]


class HeldState:
    """The state of a wrapped optimizer: in arenas, and for a fraction below 1 partly on the device."""

    def __init__(
        self,
        wrapped: Wrapped,
        layout: Layout,
        resident: List[Tuple[int, torch.Tensor]],
        demands: Demands,
        arenas: Dict[str, Any],
        device: torch.device,
    ):
        self._wrapped, self._demands, self.layout = wrapped, demands, layout
        self._arenas = arenas
        self._streams = streams_for(device)
        try:
            for arena in arenas.values():
                self._streams.pin(arena)
        except BaseException:
            self._streams.release()
            raise
        gradients = arenas["gradients"].memory if "gradients" in arenas else None
        self.control = Control(arenas["control"].memory, layout)
        self._memory = Memory(layout, arenas["states"].memory, gradients, self.control)
        self._cycle = Cycle(self._memory, wrapped, self._streams, demands.whole)
        self._cycle.resident = resident
        self._broken = False  # a step has failed half made

    # Beginning

    @torch.no_grad()
    def start(self, is_new: bool) -> Optional[str]:
        """Begins with the model's parameters, or goes on from a state that was found. Returns why it cannot, if so."""
        if is_new or self.control.get(FILLED) == NOTHING:
            self._fill()
            return None
        why = torn(self.control)
        if why is None and not self._demands.recovers:
            why = "the process that held it died with the parameters of the model, which the state does not have"
        if why is None:
            self._recover()
        return why

    def _fill(self) -> None:
        self.control.words.zero_()
        for region in self.layout.regions:
            host = self._memory.region(region, 0)
            for held in region.held:
                if held.copy is not None:
                    held.copy.within(host).copy_(local(held.parameter).detach())
        self.control.set(FILLED, WHOLE)

    def _recover(self) -> None:
        restore_parameters(self._memory)
        if can_finish(self.control):
            finish_step(self._memory, self._wrapped, self._cycle)

    # Steps

    @property
    def steps(self) -> int:
        return self.control.step

    @property
    def prepared_step(self) -> int:
        """The last step whose gradients the host has: it can be finished from there."""
        return self.control.get(GRADIENTS_OF)

    @torch.no_grad()
    def prepare(self, wait: bool = False) -> None:
        """Begins a step. If it waits, the host has all that finishes the step."""
        self.mend()
        self._broken = True
        self._cycle.prepare()
        if wait:
            self._cycle.await_prepared()

    @torch.no_grad()
    def make(self) -> None:
        """Makes the step that was begun."""
        self._cycle.make()
        self._broken = False

    @torch.no_grad()
    def finish_prepared(self) -> None:
        """Makes the step that an earlier process has begun, if only its gradients were there."""
        finish_step(self._memory, self._wrapped, self._cycle)

    def mend(self) -> None:
        """Finishes a step that an exception has broken off, as after the death of a process."""
        if not self._broken:
            return
        self._streams.settle()
        if self.control.committed and not can_finish(self.control):
            raise RuntimeError(
                "an earlier step failed after it had changed some parameters, and recovery is False: load a state (load_state_dict, load)"
            )
        if self._cycle.resident:
            raise RuntimeError("an earlier step failed, and fraction is below 1: load a state (load_state_dict)")
        with torch.no_grad():
            self._recover()
        self._broken = False

    def prefetch(self) -> None:
        self._cycle.prefetch()

    def settle(self) -> None:
        """Waits until the state is on the host."""
        self._cycle.settle()

    # State

    def entries(self) -> _Entries:
        """The entries of all parameters that have a state, on the host but for those that stay on the device."""
        self.settle()
        found = {h.parameter: held_entries.read(self._memory, r, h) for r in self.layout.regions for h in r.held}
        found.update(self._cycle.resident_state)
        return {p: entry for p, entry in found.items() if entry}

    def entry(self, parameter: torch.Tensor) -> Dict[str, Any]:
        self.settle()
        for region in self.layout.regions:
            for held in region.held:
                if held.parameter is parameter:
                    return held_entries.read(self._memory, region, held)
        return self._cycle.resident_state.get(parameter, {})

    def parameters_with_state(self) -> List[torch.Tensor]:
        self.settle()
        step = self.control.step
        return [h.parameter for h in self.layout.held if self.control.has_state(h, step)] + list(self._cycle.resident_state)

    @torch.no_grad()
    def replace(self, entries: _Entries) -> None:
        """Takes these entries as the state. Raises ValueError if they do not fit, and nothing has changed then."""
        self._streams.settle()
        for held in self.layout.held:
            if entries.get(held.parameter):
                held_entries.check(held, entries[held.parameter])
        self._cycle.forget()
        step = self.control.step
        self.control.set(FILLED, REPLACED)
        self.control.set(POSITION, step * len(self.layout.regions))
        self.control.set(GRADIENTS_OF, 0)
        for region in self.layout.regions:
            for held in region.held:
                held_entries.write(self._memory, region, held, entries.get(held.parameter), step)
        self.control.set(FILLED, WHOLE)
        self._cycle.resident_state = {
            p: {k: _like(p, v) for k, v in entries[p].items()} for _, p in self._cycle.resident if entries.get(p)
        }
        self._broken = False

    def close(self) -> None:
        self._cycle.release()
        self._streams.release()


def _like(parameter: torch.Tensor, value: Any) -> Any:
    """A value of the state where the optimizer expects it: numbers stay on the host."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 and value.device.type == "cpu":
        return value
    return value.detach().to(local(parameter).device, copy=True)
