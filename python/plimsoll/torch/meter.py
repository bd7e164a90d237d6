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
        self._peak: Optional[Instant] = None
        self._start: Optional[Instant] = None  # of the phase under way, if tensors were counted there
        now, free, tensors = resident.read(), max(resident.free_heap(), 0), _total([*count().holdings(_CPU), *mkl.holdings()])
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
        now = resident.read()
        return Instant(now.all, resident.free_heap(), None if holdings is None else [*holdings, *mkl.holdings(), self._process])

    def measure(self, ended: Place) -> Measured:
        """What the phase that ends has held."""
        began = time.monotonic()
        tally = self.counted or (self._count() if self.counts else None)
        end = self.instant(tally.holdings(_CPU) if tally is not None else None)
        highest = resident.read().peak
        peak, start = self._peak, self._start
        if start is not None and end.holdings is not None:
            if ended.phase == "step":
                peak = _peak_of_step(start, end, highest, self.temporaries)
            elif highest < start.resident + NOTICED and end.resident < start.resident:
                peak = start
        self._start, self._peak, self.counted = (end if end.holdings is not None else None), None, None
        gpus = cuda_memory.read(tally or Tally())
        self._spent += time.monotonic() - began
        return Measured(end, highest, peak, gpus)

    def found_peak(self, instant: Optional[Instant]) -> None:
        """Takes the instant of the peak of the phase under way."""
        self._peak = instant


def _total(holdings: Holdings) -> int:
    return sum(h["bytes"] for h in holdings)


def _peak_of_step(start: Instant, end: Instant, peak: int, known: Optional[Dict[str, Any]]) -> Instant:
    """The instant of the peak of an optimizer's step: states have grown, gradients are still there, and there are
    temporary tensors. ``known`` are those of an optimizer whose formula is known.

    What does not make the process larger lies in memory that malloc had kept before.
    """
    assert start.holdings is not None and end.holdings is not None
    growth, larger = _total(end.holdings) - _total(start.holdings), peak - start.resident
    temporaries = known or {
        "component": "optimizer_temporaries",
        "bytes": max(0, larger - growth),
        "why": f"by difference: {larger} B more than when the step began, less {growth} B of new states",
    }
    from_heap = growth + temporaries["bytes"] - larger
    free = max(0, start.free_heap - max(0, from_heap)) if start.free_heap >= 0 else -1
    return Instant(peak, free, [*end.holdings, temporaries])
