"""Handlers of signals that come at a bad time."""

import contextlib
import signal
import threading
from typing import Any, Callable, Dict, Iterator, List, Tuple

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
