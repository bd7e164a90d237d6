"""Parameters in shared memory that the program may write without losing the state's values.

A 16-bit parameter in an arena is the upper half, or a rounded copy, of its fp32 master weight. When the program
writes it, the optimizer must know which elements have changed: their master weights change, and all others keep every
bit.

So the model gets a private mapping of the arena (MAP_PRIVATE). It shows what the service writes, until the program
writes to a page. The kernel then gives the program a copy of that page, and the arena still has the old values,
however the program has written.
"""

import ctypes
import mmap
import os
from typing import List, Optional, Tuple

import numpy as np

from plimsoll.client import Arena
from plimsoll.errors import PlimsollError

STALE = (
    "this process has private copies of parameters' pages, which do not show the step: memory was locked (mlock, "
    "mlockall), or weights were written while the step was made. Lock memory before the optimizer is opened, and write "
    "weights between steps"
)
_NO_RESERVE = 0x4000  # MAP_NORESERVE: copies are rare, and no memory is set aside for them
_HUGETLBFS = 0x958458F6
_fstatfs = ctypes.CDLL(None).fstatfs


class OwnPages:
    """A private mapping of an arena. It knows which of its pages have become this process's own."""

    @classmethod
    def of(cls, arena: Arena) -> Optional["OwnPages"]:
        """A private mapping, or None if the kernel cannot copy the program's pages or tell them apart."""
        if not _can_be_copied(arena):
            return None
        own = cls(arena)
        return None if own._has_been_copied() else own

    def __init__(self, arena: Arena):
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self.memory = mmap.mmap(arena.descriptor, len(arena.memory), mmap.MAP_PRIVATE | _NO_RESERVE, protection)
        self._address = np.frombuffer(self.memory, np.uint8).ctypes.data

    def written(self) -> List[Tuple[int, int]]:
        """The (begin, end) of the bytes that the program may have written: whole pages, adjacent ones joined."""
        try:
            own = self._are_own()
        except OSError:  # no /proc, or one that hides it
            return [(0, len(self.memory))]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], own, [False]]).astype(np.int8))) * mmap.PAGESIZE
        return list(zip(edges[::2].tolist(), edges[1::2].tolist()))

    def _has_been_copied(self) -> bool:
        """Whether pages are the process's own from the start, because the program has locked all its memory
        (mlockall).
        """
        try:
            return bool(self._are_own().any())
        except OSError:
            return False

    def _are_own(self) -> np.ndarray:
        """Whether each page is this process's own: anonymous, in memory or swapped out, and not a file's."""
        first, count = self._address // mmap.PAGESIZE, len(self.memory) // mmap.PAGESIZE
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * count, 8 * first), np.uint64)
        if len(entries) != count:
            raise OSError("pagemap is truncated")
        present, swapped, of_file = (entries & np.uint64(1 << bit) != 0 for bit in (63, 62, 61))
        return (present | swapped) & ~of_file

    def give_up(self, ranges: List[Tuple[int, int]]) -> None:
        """Shows the arena again in place of the program's own pages."""
        for begin, end in ranges:
            try:
                self.memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            except OSError as error:
                raise PlimsollError(f"{STALE} ({error})") from None


def _can_be_copied(arena: Arena) -> bool:
    """Whether the kernel can copy the pages. Not from the hugetlb pool: if it has no page left for the copy, the
    kernel kills the process that writes.
    """
    status = (ctypes.c_long * 64)()
    return _fstatfs(arena.descriptor, status) == 0 and status[0] & 0xFFFFFFFF != _HUGETLBFS
