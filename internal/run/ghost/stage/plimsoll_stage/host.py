"""Memory of the host that the kernel counts: of this process, and of those that it has started."""

import contextlib
import ctypes
import faulthandler
import glob
import os
import signal
from typing import Any

_ADOPT = 36  # PR_SET_CHILD_SUBREAPER: linux/prctl.h


def be_watched(settings: Any) -> Any:
    """Has this process say where it is when it is asked by a signal. The first one of a program also adopts the processes
    whose parents have ended, and is what the kernel ends first where memory runs out. Returns what must be kept."""
    if not settings.get("is_started"):
        ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    where = open(os.path.join(settings["scratch"], f"where-{os.getpid()}"), "w")
    faulthandler.register(signal.SIGUSR2, file=where, all_threads=False)
    return where


def end_children() -> None:
    """Ends the processes that this one has started, in whatever session."""
    for child in _children(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def resident() -> int:
    """The bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def of_children() -> int:
    """The bytes that only the processes have which this one has started, and theirs."""
    return sum(map(_private, _children(os.getpid())))


def _children(pid: int) -> list:
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(path) as file:
                for child in map(int, file.read().split()):
                    found += [child, *_children(child)]
        except OSError:  # it has ended
            pass
    return found


def _private(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = [line.split() for line in file]
    except OSError:  # it has ended, or the kernel is older than 4.14
        return 0
    return sum(1024 * int(line[1]) for line in lines if line[0] in ("Private_Clean:", "Private_Dirty:"))
