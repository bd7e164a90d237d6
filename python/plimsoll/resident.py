"""What this process holds in memory, as Linux and malloc say."""

import ctypes
import math
import mmap
import os
import time
import warnings
from typing import NamedTuple, Optional

import numpy as np

_KIB = 1024
_PAGES = 1 << 16  # that are looked up at once
_PRESENT = np.uint64(1 << 63)
_NOTICED = 1 << 20  # bytes
#: Looking for absent pages takes no more than one part in so many of the time.
_RARELY = 200


class Resident(NamedTuple):
    """Memory of this process, in bytes."""

    all: int  # VmRSS
    peak: int  # VmHWM: since the process began, or since reset_peak


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _mallinfo2() -> Optional["ctypes._FuncPointer"]:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # another libc, or an older one
        return None
    function.restype = _MallInfo
    return function


_MALLINFO = _mallinfo2()
_can_reset = True
_absent = 0  # bytes of free heap that the kernel had back when they were last looked for
_look_at = math.inf  # time.perf_counter() from which on to look again: never, while malloc has given nothing back


def read() -> Resident:
    """What the process holds now."""
    with open("/proc/self/status", "rb", buffering=0) as status:
        lines = status.read(8192)
    return Resident(_field(lines, b"\nVmRSS:"), _field(lines, b"\nVmHWM:"))


def _field(lines: bytes, name: bytes) -> int:
    at = lines.index(name) + len(name)
    return int(lines[at : lines.index(b"kB", at)]) * _KIB


def reset_peak() -> None:
    """Lets the peak begin anew. The kernel has one peak (VmHWM) for a process, so every other reader sees the reset, too."""
    global _can_reset
    if not _can_reset:
        return
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")
    except OSError as error:
        _can_reset = False
        warnings.warn(
            f"plimsoll: the peak of resident memory cannot be reset ({error}): the peaks of marks are those since the "
            "process began",
            stacklevel=2,
        )


def of_range(address: int, size: int) -> int:
    """The bytes of a range of memory whose pages this process has mapped: it has touched them, or the kernel has for it."""
    first, end = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    present = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for page in range(first, end, _PAGES):
            count = min(_PAGES, end - page)
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * count, 8 * page), np.uint64)
            present += int(np.count_nonzero(entries & _PRESENT))
    return present * mmap.PAGESIZE


def trim_heap() -> None:
    """Gives free memory of malloc's heap back to the kernel, where the C library can: freed tensors on the CPU lie there."""
    global _look_at
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(ctypes.c_size_t(0))
        _look_at = 0.0


def free_heap(at_once: bool = False) -> int:
    """Resident bytes that malloc keeps for its next use, or -1 if unknown. Requests of 128 KiB and more come from the kernel,
    and return to it, until malloc has seen larger ones freed: then it keeps up to 32 MiB each.

    Malloc counts what trim_heap has given back as free, until it is used again. To find it takes some milliseconds a GiB of
    heap, so it is looked for now and then, or now, if ``at_once``.
    """
    if _MALLINFO is None:
        return -1
    _look(at_once)
    return max(0, _MALLINFO().fordblks - _absent)


def _look(at_once: bool) -> None:
    global _absent, _look_at
    began = time.perf_counter()
    if _look_at == math.inf or not at_once and began < _look_at:
        return
    _absent = _absent_heap()
    ended = time.perf_counter()
    # Nothing but trim_heap takes many pages away, so once they are back there is nothing to look for.
    _look_at = ended + _RARELY * (ended - began) if _absent >= _NOTICED else math.inf


def _absent_heap() -> int:
    """Bytes of the heap that have no memory: malloc counts them as free, and the kernel has them back."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if line.endswith("[heap]\n"):
                first, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
                return end - first - of_range(first, end - first)
    return 0
