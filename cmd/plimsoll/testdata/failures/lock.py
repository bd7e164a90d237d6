"""Locks the given MiB of memory, as a library for pinned memory does."""

import ctypes
import mmap
import os
import sys


def main() -> None:
    size = int(sys.argv[1]) << 20
    memory = mmap.mmap(-1, size)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"mlock of {size} bytes: {os.strerror(errno)}")


if __name__ == "__main__":
    main()
