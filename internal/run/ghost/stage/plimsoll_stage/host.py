"""Memory of the host that the kernel counts: of this process, and of those that it has started."""

import glob
import os


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
