"""A held state that is open: its session, and the steps that it makes."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from plimsoll import states
from plimsoll.held import HeldStates
from plimsoll.torch import environment, held_entries, regions
from plimsoll.torch.control import Control
from plimsoll.torch.cycle import Cycle, Memory
from plimsoll.torch.demands import Demands
from plimsoll.torch.redo import finish_step, restore_parameters
from plimsoll.torch.regions import Layout
from plimsoll.torch.window import streams_for
from plimsoll.torch.wrapped import Wrapped

Entries = Dict[torch.Tensor, Dict[str, Any]]
Resident = List[Tuple[int, torch.Tensor]]


class Found(NamedTuple):
    """How a rank has found its state, if it has any."""

    has_state: bool
    steps: int
    prepared_step: int  # the last step whose gradients are held
    torn: Optional[str]  # why it cannot go on, if so


def why_torn(found: Sequence[Found]) -> Optional[str]:
    """Why the ranks that have found these cannot go on together, or None."""
    last = max(f.steps for f in found)
    if any(f.steps < last and not f.steps + 1 == f.prepared_step == last for f in found):
        return "the ranks of the job have states of different steps"
    return next((f.torn for f in found if f.torn is not None), None)


class HeldState:
    """The state of a wrapped optimizer: in arenas of the service, and for a fraction below 1 partly on the device."""

    def __init__(self, wrapped: Wrapped, layout: Layout, resident: Resident, demands: Demands, device: torch.device):
        self._wrapped, self._layout, self._demands = wrapped, layout, demands
        self._streams = streams_for(device)
        self.session: Optional[HeldStates] = None  # none if there is nothing to hold
        self._resident = resident
        self._broken = False  # a step has failed half made

    # Beginning

    def open(self, job: str, name: Optional[str], socket: Optional[str]) -> None:
        """Opens the session, and registers its memory with the device."""
        if self._layout.is_empty:
            document = regions.document(self._layout)
            control = states.Control(bytearray(states.sizes_of(document)["held_control"]), document)
            control.begin()
            self._use(control, bytearray(1), None, lambda position: None)
            return
        try:
            self.session = HeldStates.open(self._document(job, name), socket=socket)
            for arena in self.session.arenas.values():
                self._streams.pin(arena)
            arenas = {n: a.memory for n, a in self.session.arenas.items()}
            self._use(self.session.control, arenas["states"], arenas.get("gradients"), self.session.wait_until_read)
        except BaseException:
            self.close()
            raise

    def _document(self, job: str, name: Optional[str]) -> Dict[str, Any]:
        world, cpus = environment.world(), environment.optimizer_cpus()
        return {
            "schema": "plimsoll.hold/1",
            "job": job,
            "rank": environment.rank(),
            "world": world,
            "local_world": environment.local_ranks(world),
            "part": f"{name}.states" if name else "states",
            **({"cpus": cpus} if cpus else {}),
            **regions.document(self._layout),
        }

    def _use(self, control: states.Control, memory: Any, gradients: Any, wait: Callable[[int], None]) -> None:
        self._control = Control(control, self._layout, wait)
        self._memory = Memory(self._layout, memory, gradients, self._control)
        self._cycle = Cycle(self._memory, self._wrapped, self._streams, self._demands.whole, self._resident)

    @torch.no_grad()
    def begin(self) -> "Found":
        """Begins with a new state, or goes on from the one that was found."""
        torn = self._begin()
        return Found(self.session is not None, self.steps, self._control.step_of_gradients, torn)

    def _begin(self) -> Optional[str]:
        """The same. Returns why it cannot, if so."""
        if self._control.step == 0:
            self._control.clear_numbers()
            return None
        if self._control.condition == "torn":
            return f"the process that held it died in the middle of step {self.steps + 1}, which cannot be finished"
        if not self._demands.recovers:
            return "it lacks what has died with its process: the parameters of the model, or options that the optimizer changes itself"
        self._recover()
        return None

    def _recover(self) -> None:
        restore_parameters(self._memory)
        if self._control.condition == "redo":
            finish_step(self._memory, self._wrapped, self._cycle)

    # Steps

    @property
    def steps(self) -> int:
        """How many steps the whole state has made."""
        return self._control.step

    @torch.no_grad()
    def prepare(self, wait: bool = False) -> None:
        """Begins a step. If it waits, the host has all that finishes the step."""
        self._cycle.prepare()
        if wait:
            self._cycle.await_prepared()

    @torch.no_grad()
    def make(self) -> None:
        """Makes the step that was begun."""
        try:
            self._cycle.make()
        except BaseException:
            self._broken = self._cycle.under_way
            raise

    @torch.no_grad()
    def finish_prepared(self, step: int) -> None:
        """Makes this step if an earlier process has prepared it only, while other ranks have made it."""
        if self.session is not None and self.steps < step:
            finish_step(self._memory, self._wrapped, self._cycle)

    def refuse_broken(self) -> None:
        """Raises if a step has failed after it had changed something. What can be finished is finished then."""
        if not self._broken:
            return
        self._streams.settle()
        step = self.steps
        if not self._demands.recovers or step == 0 or self._control.condition == "torn":
            raise RuntimeError(
                f"step {step + 1} failed after it had changed some parameters, and cannot be finished: load a state (load_state_dict)"
            )
        with torch.no_grad():
            self._recover()
        self._broken = False
        if self.steps > step:
            raise RuntimeError(
                f"step {step + 1} failed after it had changed some parameters. It is finished now, with the gradients that it began "
                "with: drop those of the model (zero_grad), and go on with the next step"
            )

    @torch.no_grad()
    def loaded(self) -> None:
        """Goes on with what a load has left in the arenas."""
        self._broken = False
        if self._demands.keeps_parameters:
            restore_parameters(self._memory)

    def prefetch(self) -> None:
        self._cycle.prefetch()

    def settle(self) -> None:
        """Waits until the state is on the host."""
        self._cycle.settle()

    def forget(self) -> None:
        """Waits until nothing is under way, and forgets what was copied in: the state on the host is about to change."""
        self._cycle.forget()

    # State

    def entries(self) -> Entries:
        """The entries of all parameters that have a state: on the host, but for those that stay on the device."""
        self.settle()
        found = {h.parameter: held_entries.read(self._memory, r, h) for r in self._layout.regions for h in r.held}
        found.update(self._cycle.resident_state)
        return {p: entry for p, entry in found.items() if entry}

    def entry(self, parameter: torch.Tensor) -> Dict[str, Any]:
        self.settle()
        for region in self._layout.regions:
            for held in region.held:
                if held.parameter is parameter:
                    return held_entries.read(self._memory, region, held)
        return self._cycle.resident_state.get(parameter, {})

    def parameters_with_state(self) -> List[torch.Tensor]:
        self.settle()
        step = self._control.step
        return [h.parameter for h in self._layout.held if self._control.has_state(h, step)] + list(self._cycle.resident_state)

    @torch.no_grad()
    def replace(self, entries: Entries) -> None:
        """Takes these entries as the state. Raises ValueError if they do not fit, and nothing has changed then."""
        for held in self._layout.held:
            if entries.get(held.parameter):
                held_entries.check(held, entries[held.parameter])
        self.forget()
        self._control.await_save()
        target = held_entries.step_of(entries.values()) or self.steps + 1
        if len(self._layout.regions) > 1:
            # Until all regions are written, this is a step that was broken off.
            self._control.forget_gradients()
            self._control.set_moment(self.steps, 1)
        elif target % 2 == self.steps % 2:
            self._write(entries, target + 1)  # so that the old state is whole until then
        self._write(entries, target)
        self._cycle.resident_state = held_entries.on_device(entries, [p for _, p in self._resident])
        self._broken = False

    def _write(self, entries: Entries, step: int) -> None:
        for region in self._layout.regions:
            for held in region.held:
                held_entries.write(self._memory, region, held, entries.get(held.parameter), step)
        self._control.set_moment(step)

    def close(self) -> None:
        """Gives the memory of the device back, and ends the session. The state stays in a service that lives on."""
        self._streams.release()
        if self.session is not None:
            self.session.close()
