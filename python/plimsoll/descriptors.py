"""File descriptors of this process: a session has one for each arena that it maps, and one for its connection."""

import os
import resource
from typing import Dict, Iterator, Sequence, Tuple

from plimsoll.errors import PlimsollError


def make_room(needed: int = 16) -> None:
    """Sees to it that this process can open so many descriptors more, and raises its soft limit where that is in the way.

    Raises PlimsollError where the hard limit is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sum(1 for _ in in_use())
    if soft == resource.RLIM_INFINITY or used + needed <= soft:
        return
    wanted = max(2 * soft, used + needed)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if used + needed > wanted:
        raise PlimsollError(
            f"this process has {used} file descriptors open, but may have only {hard} (ulimit -Hn): a session needs up to "
            f"{needed} more; raise that limit, or give several parameters to one optimizer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def by_file() -> Dict[Tuple[int, int], int]:
    """A descriptor of each file that is open, by the device and number of the file."""
    return {identity: descriptor for descriptor, identity in in_use()}


def in_use() -> Iterator[Tuple[int, Tuple[int, int]]]:
    """The descriptors that are open, each with the device and number of its file."""
    try:
        candidates = map(int, os.listdir("/proc/self/fd"))
    except OSError:
        candidates = iter(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)))
    for descriptor in candidates:
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue  # that of the list itself
        yield descriptor, (status.st_dev, status.st_ino)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
