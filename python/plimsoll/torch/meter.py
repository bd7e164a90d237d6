"""Measures the phases of a training loop for the marks of this process."""

import time
from typing import Any, Callable, Dict, List, Optional

import torch

from plimsoll import resident
from plimsoll.marks import Instant, Measured, Place
from plimsoll.torch import cuda_memory, mkl
from plimsoll.torch.storages import Tally

#: Growth of the peak, in bytes, that is noticed.
NOTICED = 1 << 20

_CPU = torch.device("cpu")
_FULL_STEPS = 2
_RARELY = 200  # times as long as counting takes, before tensors are counted again

Holdings = List[Dict[str, Any]]


class Meter:
    """Measures what a phase has held.

    Resident memory is read at every mark. Tensors are counted in the first two steps, and then in a step now and then, so
    that counting takes no more than one part in 200 of the time.
    """

    def __init__(self, count: Callable[[], Tally]):
        self._count = count
        self._step, self._spent, self._counted_at = 0, 0.0, 0.0
        #: Whether tensors are counted in this step.
        self.counts = True
        #: What has been counted already for the next mark, or None.
        self.counted: Optional[Tally] = None
        #: Temporary tensors of the optimizer's step under way, where a formula is known.
        self.temporaries: Optional[Dict[str, Any]] = None
        #: Bytes that the model has returned in the forward pass under way, and that the program has dropped since.
        self.dropped = 0
        self._peak: Optional[Instant] = None
        self._start: Optional[Instant] = None  # of the phase under way, if tensors were counted there
        self._shares = False  # whether our optimizers shared memory with the service then
        now, free = resident.read(), max(resident.free_heap(at_once=True), 0)
        tensors = _total([*count().holdings(_CPU), *mkl.holdings()])
        self._process = {
            "component": "python_process",
            "bytes": max(0, now.all - free - tensors),
            "why": f"{now.all} B resident when watch() was called, less {tensors} B of tensors and {free} B of free heap",
        }

    def begin_step(self, step: int) -> None:
        """Decides whether tensors are counted in this step."""
        if step == self._step:
            return
        now = time.monotonic()
        if self.counts:
            self._counted_at = now
        self.counts = step <= _FULL_STEPS or now - self._counted_at >= _RARELY * self._spent
        self._step = step
        if self.counts:
            self._spent = 0.0

    def instant(self, holdings: Optional[Holdings]) -> Instant:
        """This instant."""
        now, counted = resident.read(), holdings is not None
        free = resident.free_heap(at_once=counted)
        return Instant(now.all, free, [*holdings, *mkl.holdings(), self._process] if counted else None)

    def measure(self, ended: Place) -> Measured:
        """What the phase that ends has held."""
        began = time.monotonic()
        tally = self.counted or (self._count() if self.counts else None)
        end = self.instant(tally.holdings(_CPU) if tally is not None else None)
        highest = resident.read().peak
        peak = self._peak
        if end.holdings is not None:
            peak = self._peak_of(ended.phase, end, highest, tally.has_shared) or peak
            self._shares = tally.has_shared
        self._start = end if end.holdings is not None else None
        self._peak, self.counted, self.dropped = None, None, 0
        gpus = cuda_memory.read(tally or Tally())
        self._spent += time.monotonic() - began
        return Measured(end, highest, peak, gpus)

    def _peak_of(self, phase: str, end: Instant, highest: int, shares: bool) -> Optional[Instant]:
        """The instant of the phase's peak, where what was held then follows from what was held at its begin and its end."""
        start = self._start
        if phase == "forward" and 0 < self.dropped < highest - end.resident + NOTICED:
            return _peak_of_forward(end, highest, self.dropped)
        if start is None:
            return None
        if shares and not self._shares:
            return _peak_with(_moved(start), start, end, highest)
        if phase == "step":
            return _peak_with(self.temporaries or _by_difference(start, end, highest), start, end, highest)
        return start if highest < start.resident + NOTICED and end.resident < start.resident else None

    def found_peak(self, instant: Optional[Instant]) -> None:
        """Takes the instant of the peak of the phase under way."""
        self._peak = instant


def _total(holdings: Holdings) -> int:
    return sum(h["bytes"] for h in holdings)


def _peak_of_forward(end: Instant, peak: int, dropped: int) -> Instant:
    """The instant at which the model has returned: its output is still there in full."""
    holdings = [dict(h) for h in end.holdings or ()]
    why = f"with {dropped} B that the model has returned and the program has dropped before the backward pass"
    for holding in holdings:
        if holding["component"] == "logits_and_loss":
            holding.update(bytes=holding["bytes"] + dropped, why=why)
            break
    else:
        holdings.append({"component": "logits_and_loss", "bytes": dropped, "why": why})
    return Instant(peak, end.free_heap, holdings)


def _moved(start: Instant) -> Dict[str, Any]:
    """What an optimizer of ours needs while it opens: parameters are there twice."""
    size = sum(h["bytes"] for h in start.holdings or () if h["component"] == "parameters")
    why = "the model's own parameters, while their values are copied to memory shared with the service"
    return {"component": "optimizer_temporaries", "bytes": size, "why": why}


def _by_difference(start: Instant, end: Instant, peak: int) -> Dict[str, Any]:
    """What a step needs beside the growth of its states, where no formula is known."""
    growth, larger = _total(end.holdings or []) - _total(start.holdings or []), peak - start.resident
    why = f"by difference: {larger} B more than when the step began, less {growth} B of new states"
    return {"component": "optimizer_temporaries", "bytes": max(0, larger - growth), "why": why}


def _peak_with(temporaries: Dict[str, Any], start: Instant, end: Instant, peak: int) -> Instant:
    """The instant of a peak at which temporary tensors are there beside all that is held at the end.

    What does not make the process larger lies in memory that malloc had kept before.
    """
    holdings = [*(end.holdings or ()), *([temporaries] if temporaries["bytes"] else ())]
    from_heap = _total(holdings) - _total(start.holdings or []) - (peak - start.resident)
    return Instant(peak, max(0, start.free_heap - max(0, from_heap)) if start.free_heap >= 0 else -1, holdings)
