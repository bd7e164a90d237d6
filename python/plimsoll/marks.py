"""Marks: where a program is in its training loop, and what it held in the phase that ends there.

``plimsoll run --record`` sets the variable ``PLIMSOLL_MARKS`` and receives the marks. Without the variable nothing is
measured or sent.
"""

import contextlib
import os
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Union

from plimsoll import resident
from plimsoll.sender import Sender

#: The phases that Plimsoll plans. A mark may have any other name, too.
PHASES = ("load", "initialize", "forward", "backward", "step", "checkpoint")
_IN_LOOP = ("forward", "backward", "step")


class Instant(NamedTuple):
    """What the process held at one time, in bytes."""

    resident: int
    free_heap: int  # -1 if unknown
    holdings: Optional[List[Dict[str, Any]]]  # None if they were not counted


class Measured(NamedTuple):
    """What the process held in a phase."""

    end: Instant
    peak_resident: int
    peak: Optional[Instant] = None  # the instant of the peak if it is known, and is not the end
    gpus: Optional[List[Dict[str, Any]]] = None


class Place(NamedTuple):
    """A place in the training loop."""

    phase: str  # empty outside of all phases
    name: str  # the user's own name
    iteration: str  # first, steady, or empty outside of the training loop


_BEFORE_MARKS = Place("load", "", "")
_NOWHERE = Place("", "", "")


def measure(ended: Place) -> Measured:
    """What the process has held since the last mark, in the phase that ends."""
    now = resident.read()
    return Measured(Instant(now.all, resident.free_heap(), None), now.peak)


class Recorder:
    """The marks of this process. The time before the first one is the phase load."""

    def __init__(self, path: str):
        self._sender = Sender(path)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # hooks run on autograd's threads, too
        self.place = _BEFORE_MARKS
        #: Optimizer steps whose iteration has begun.
        self.step = 0
        #: Whether the optimizer has made the step of this iteration.
        self.stepped = False
        #: What measures a phase that ends.
        self.measure: Callable[[Place], Measured] = measure

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child that was forked after the first mark, such as a data loader's worker."""
        return os.getpid() != self._pid

    def begin(self, phase: str, name: str = "", *, first: Optional[bool] = None, advance: bool = True) -> None:
        """Begins a phase. Where ``first`` is None, the first step of the program is the first iteration.

        With ``advance`` a phase of the training loop that follows an optimizer step begins the next iteration.
        """
        with self._lock:
            before, step = self.place, self.step
            iteration = ""
            if phase in _IN_LOOP:
                if self.step == 0 or (self.stepped and advance):
                    self.step, self.stepped = self.step + 1, False
                iteration = "first" if (self.step == 1 if first is None else first) else "steady"
            self._mark(Place(phase, name, iteration), before, step)

    def resume(self, place: Place) -> None:
        """Goes on with a phase that was interrupted."""
        with self._lock:
            self._mark(place, self.place, self.step)

    def _mark(self, place: Place, before: Place, step: int) -> None:
        if self.is_forked:
            return
        self.place = place
        mark = {"rank": rank(), "pid": self._pid, **_place(place, self.step), "source": "client"}
        if place.name:
            mark["name"] = place.name
        self._sender.send({**mark, "ended": {**_place(before, step), **_fields(self.measure(before))}})
        resident.reset_peak()


def _place(place: Place, step: int) -> Dict[str, Union[str, int]]:
    fields: Dict[str, Union[str, int]] = {"phase": place.phase, "step": step}
    if place.iteration:
        fields["iteration"] = place.iteration
    return fields


def _fields(measured: Measured) -> Dict[str, Any]:
    end, peak = measured.end, measured.peak or measured.end
    fields = {
        "resident_bytes": end.resident,
        "peak_resident_bytes": measured.peak_resident,
        "free_heap_bytes": end.free_heap,
        "peak_free_heap_bytes": peak.free_heap,
        "holdings": end.holdings,
    }
    if measured.peak is not None:
        fields["peak_holdings"] = peak.holdings
    if measured.gpus:
        fields["gpus"] = measured.gpus
    return fields


def rank() -> int:
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0


_recorder: Optional[Recorder] = None


def recorder() -> Optional[Recorder]:
    """The recorder of this process, or None if nobody records it."""
    global _recorder
    if _recorder is None:
        path = os.environ.get("PLIMSOLL_MARKS")
        if not path:
            return None
        _recorder = Recorder(path)
    return None if _recorder.is_forked else _recorder


def mark(name: str) -> None:
    """Says that a phase begins here and ends the one before it.

    ``name`` is load, initialize, forward, backward, step or checkpoint, or any name of the program's own, such as
    "evaluation". What such a name begins is none of these phases.

    Without ``plimsoll run --record`` this does nothing. Processes that were forked after the first mark, such as
    workers of a data loader, send nothing.
    """
    to = recorder()
    if to is None:
        return
    if name in PHASES:
        to.begin(name)
        to.stepped = to.stepped or name == "step"
    else:
        to.begin("", name)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """``with plimsoll.phase("forward"):`` marks a phase from its beginning to its end, also where an exception ends it.

    Phases nest: at the end of one, the phase around it goes on. A name of the program's own names a part of the phase
    around it.
    """
    to = recorder()
    if to is None:
        yield
        return
    around = to.place
    if name in PHASES:
        around = _NOWHERE if around is _BEFORE_MARKS else around
        mark(name)
    else:
        to.resume(around._replace(name=name))
    try:
        yield
    finally:
        to.resume(around)
