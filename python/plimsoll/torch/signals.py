"""Handlers of signals that come at a bad time, and threads that do."""

import contextlib
import functools
import signal
import threading
from typing import Any, Callable, Dict, Iterator, List, Tuple, TypeVar

import torch

from plimsoll.torch.ranks import is_distributed

_Result = TypeVar("_Result")

# Those that are handled in Python to end, to save and to time out.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Handlers of signals run when this is over: they may raise, as that of Ctrl-C does, and break off what is under way."""
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


def uninterrupted(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """A method that another thread's is not in the middle of; nor is an interrupt, with several ranks.

    Threads wait for the object's ``_lock``. All ranks call the method: one that was taken out of it would leave the others
    waiting, and lose its place among them.
    """

    @functools.wraps(method)
    def whole(self: Any, *arguments: Any, **keywords: Any) -> _Result:
        # In inference mode, what is made here and becomes a parameter or its gradient could not be trained any more.
        with torch.inference_mode(False), torch.no_grad():
            with self._lock, deferred() if is_distributed() else contextlib.nullcontext():
                return method(self, *arguments, **keywords)

    return whole
