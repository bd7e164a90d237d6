"""The heap of the C library, which keeps the memory of freed tensors on the CPU."""

import ctypes


def give_back() -> None:
    """Gives free memory of the heap back to the kernel, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(ctypes.c_size_t(0))
