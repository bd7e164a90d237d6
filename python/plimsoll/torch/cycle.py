"""A step of a held state: chunk after chunk through the window, or all of it at once."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from plimsoll.torch.control import Control
from plimsoll.torch.held_update import Batch, Resident
from plimsoll.torch.layout import local
from plimsoll.torch.regions import Layout, Region
from plimsoll.torch.window import HostStreams, Slot
from plimsoll.torch.wrapped import Wrapped


class Memory:
    """The arenas of a held state, as bytes on the host."""

    def __init__(self, layout: Layout, states: Any, gradients: Any, control: Control):
        self.layout, self.control = layout, control
        self._states = torch.frombuffer(states, dtype=torch.uint8)
        self.gradients = torch.frombuffer(gradients, dtype=torch.uint8) if gradients is not None else None

    def region(self, region: Region, step: int) -> torch.Tensor:
        """The bytes of a region after ``step`` steps."""
        begin = self.layout.begin(region, step)
        return self._states[begin : begin + region.bytes]


class Cycle:
    """Makes steps. What it needs of the device it allocates in its first step with a state (chunked), or in each
    (whole).
    """

    def __init__(
        self, memory: Memory, wrapped: Wrapped, streams: HostStreams, whole: bool, resident: Sequence[Tuple[int, torch.Tensor]]
    ):
        self._memory, self._layout, self._control = memory, memory.layout, memory.control
        self._wrapped, self._streams, self._whole = wrapped, streams, whole
        self._slots: List[Slot] = []
        self._prefetched: Optional[Dict[int, Slot]] = None
        self._gradients_out: Dict[int, Any] = {}
        self._prepared: Any = None  # event: all gradients are on the host
        self._last: Any = None  # event: all is on the host
        #: Whether a step has changed something, and has not ended.
        self.under_way = False
        self._resident = resident  # parameters whose state stays on the device, with their groups
        self.resident_state: Resident = {}

    def settle(self) -> None:
        """Waits until the host has the last step's state."""
        self._streams.finish(self._last)

    def prepare(self) -> None:
        """Begins the next step: brings its gradients and options to the host, from where it can be finished."""
        self.settle()  # this step's numbers and options take the place of those of the one before the last
        step = self._control.step
        self._wrapped.begin()
        self._control.describe_step(self._wrapped.groups, [h.index for h in self._layout.held if h.parameter.grad is None])
        self._check_gradients()
        self._bring_gradients(step)

    def await_prepared(self) -> None:
        """Waits until the host has all gradients of the step."""
        self._streams.finish(self._prepared)

    def make(self) -> None:
        """Makes the step that was begun, with the gradients of the model."""
        step = self._control.step
        self.under_way = True
        self._update_resident(step)
        self._go_through(step, self._layout.order(step), 0)
        self._wrapped.end()
        self.under_way = False

    def go_on(self, committed: int) -> None:
        """Finishes a step of which some regions are committed, with the gradients that the model has now."""
        step = self._control.step
        self._wrapped.begin()
        self._gradients_out = {}
        self._go_through(step, self._layout.order(step)[committed:], committed)
        self._wrapped.end()

    def prefetch(self) -> None:
        """Begins the copies in of the next step (whole)."""
        self.settle()
        step = self._control.step
        if self._whole and self._prefetched is None and self._control.any_state(step):
            self._prefetched = {r.index: self._fetched(r, step) for r in self._layout.regions}

    # Gradients

    def _check_gradients(self) -> None:
        for held in self._layout.held:
            if held.gradient is None or held.parameter.grad is None:
                continue
            found = local(held.parameter.grad).dtype
            if found != held.gradient.dtype:
                raise TypeError(
                    f"the gradient of {held.name} is {found}: expected {held.gradient.dtype}, for which there is room on the host; "
                    "set grad_dtype of the parameter before StateOffload is made, or recovery=False"
                )

    def _bring_gradients(self, step: int) -> None:
        """Copies the gradients to the host, from where a step that is broken off can be finished."""
        self._gradients_out = {}
        if self._memory.gradients is None:
            return
        ready = self._streams.event()
        for region in self._layout.order(step):
            with self._streams.copying_out([ready]):
                for held in region.held:
                    if held.gradient is not None and held.parameter.grad is not None:
                        place = held.gradient.within(self._memory.gradients)
                        place.copy_(local(held.parameter.grad), non_blocking=True)
                self._gradients_out[region.index] = self._streams.event()
        with self._streams.copying_out():
            self._streams.set_word(self._control.gradients_of, step + 1)
            self._prepared = self._streams.event()

    # Regions

    def _go_through(self, step: int, regions: List[Region], committed: int) -> None:
        if self._whole:
            copied = self._all_at_once(step, regions, committed)
        elif not self._control.any_state(step):
            copied = self._first(step, regions, committed)
        else:
            copied = self._chunk_by_chunk(step, regions, committed)
        # Later work may change parameters and gradients; it waits until they are on the host.
        self._streams.compute_after([copied, *self._gradients_out.values()])
        with self._streams.copying_out():
            self._last = self._streams.event()

    def _slot(self, i: int) -> Slot:
        """One of the two slots of the chunks. They are made once."""
        while len(self._slots) <= i:
            self._slots.append(Slot(self._streams, max(r.device_bytes for r in self._layout.regions)))
        return self._slots[i]

    def _chunk_by_chunk(self, step: int, regions: List[Region], committed: int) -> Any:
        copied = None
        for i, region in enumerate(regions):
            for ahead in range(i + 1 if i else 0, min(i + 2, len(regions))):
                self._slot(ahead % 2).fill(regions[ahead], self._memory.region(regions[ahead], step))
            slot = self._slot(i % 2)
            slot.await_filled()
            self._update([region], {region.index: slot}, step)
            copied = self._commit(region, slot, step, committed + i)
        return copied

    def _first(self, step: int, regions: List[Region], committed: int) -> Any:
        """The optimizer makes its state. One slot takes it: with what the optimizer has just made, these are two."""
        copied = None
        for i, region in enumerate(regions):
            slot = self._slot(0)
            self._update([region], {region.index: slot}, step, fresh=True)
            copied = self._commit(region, slot, step, committed + i)
        return copied

    def _all_at_once(self, step: int, regions: List[Region], committed: int) -> Any:
        fresh = not self._control.any_state(step)
        slots = self._prefetched
        if slots is None:
            slots = {} if fresh else {r.index: self._fetched(r, step) for r in regions}
        self._prefetched = None
        for slot in slots.values():
            slot.await_filled()
        # In the order of the parameters, in which the optimizer may add numbers up or draw them.
        self._update(sorted(regions, key=lambda region: region.index), slots, step, fresh=fresh)
        copied = None
        for i, region in enumerate(regions):
            copied = self._commit(region, slots[region.index], step, committed + i)
            slots.pop(region.index).let_go()
        return copied

    def _fetched(self, region: Region, step: int) -> Slot:
        slot = Slot(self._streams, region.device_bytes)
        slot.fill(region, self._memory.region(region, step))
        return slot

    # The update

    def _update(self, regions: Sequence[Region], slots: Dict[int, Slot], step: int, fresh: bool = False) -> None:
        batch = Batch(self._wrapped, self._control, step)
        for region in regions:
            batch.add(region, None if fresh else slots[region.index].memory)
        if self._whole:
            batch.add_resident(self._resident, self.resident_state)
        self._streams.compute_after([self._gradients_out.get(r.index) for r in regions])  # some optimizers change them
        state = batch.update()
        if self._whole:
            self._keep_resident(state)
        for region in regions:
            if region.index not in slots:
                slots[region.index] = Slot(self._streams, region.device_bytes)
            if fresh:
                slots[region.index].await_drained()
        batch.put_back({h.index: slots[r.index].memory for r in regions for h in r.held})

    def _update_resident(self, step: int) -> None:
        if self._whole or not self._resident:
            return
        batch = Batch(self._wrapped, self._control, step)
        batch.add_resident(self._resident, self.resident_state)
        self._keep_resident(batch.update())

    def _keep_resident(self, state: Resident) -> None:
        self.resident_state = {p: state[p] for _, p in self._resident if state.get(p)}

    def _commit(self, region: Region, slot: Slot, step: int, committed: int) -> Any:
        """Copies a region out, and counts it. Returns the event at which its parameters are on the host, if they go there."""
        updated = self._streams.event()
        self._control.await_read(step, committed)
        host = self._memory.region(region, step + 1)
        copies, copied = [h for h in region.held if h.copy is not None], None
        if copies:
            with self._streams.copying_out([updated]):
                for held in copies:
                    held.copy.within(host).copy_(local(held.parameter).detach(), non_blocking=True)
                copied = self._streams.event()
        slot.drain(region, host, updated)
        with self._streams.copying_out():
            self._streams.set_word(self._control.position, step * len(self._layout.regions) + committed + 1)
        return copied

    def forget(self) -> None:
        """Forgets what was copied in: the state on the host is about to change."""
        self._streams.settle()
        self._prefetched = None
