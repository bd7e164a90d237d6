"""Signal handlers and threads that come at a bad time."""

import contextlib
import functools
import signal
import threading
from typing import Any, Callable, Dict, Iterator, List, Tuple, TypeVar

import torch

from plimsoll.torch.ranks import is_distributed

_Result = TypeVar("_Result")

# Signals that Python programs handle to end, to save and to time out.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Delays signal handlers until the end: they may raise, as Ctrl-C's does, and interrupt the work under way."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where handlers do not run
        return
    handlers: Dict[int, Callable[[int, Any], Any]] = {}
    came: List[Tuple[int, Any]] = []
    over = False

    def later(number: int, frame: Any) -> None:
        if over:
            handlers[number](number, frame)
        else:
            came.append((number, frame))

    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, later)
        yield
    finally:
        over = True  # the first to run may raise
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)


def deferred_if_distributed() -> Any:
    """Delays signal handlers where other ranks may wait for this one."""
    return deferred() if is_distributed() else contextlib.nullcontext()


def uninterrupted(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """A method that runs for one thread at a time, and with several ranks is not interrupted.

    Threads wait for the object's ``_lock``. All ranks call the method. A rank interrupted inside it would leave the
    others waiting, and lose its place among them.
    """

    @functools.wraps(method)
    def whole(self: Any, *arguments: Any, **keywords: Any) -> _Result:
        # Inference mode is off: a tensor made in it could not be trained after it becomes a parameter or its
        # gradient.
        with torch.inference_mode(False), torch.no_grad():
            with self._lock, deferred_if_distributed():
                return method(self, *arguments, **keywords)

    return whole
