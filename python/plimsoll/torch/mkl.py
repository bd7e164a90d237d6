"""Memory that Intel MKL keeps for matrix products on the CPU."""

import ctypes
import functools
import os
from typing import Any, Dict, List, Optional

import torch


@functools.lru_cache(maxsize=None)
def _mem_stat() -> Optional[Any]:
    """MKL's mkl_mem_stat, where torch was built with MKL."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        function = library.mkl_serv_mem_stat
    except (AttributeError, OSError):
        return None
    function.restype = ctypes.c_longlong
    return function


def holdings() -> List[Dict[str, Any]]:
    """The buffers of MKL, which it keeps from one matrix product to the next."""
    function = _mem_stat()
    if function is None:
        return []
    buffers = ctypes.c_int(0)
    size = function(ctypes.byref(buffers))
    why = f"{buffers.value} buffers of Intel MKL, by mkl_mem_stat"
    return [{"component": "matmul_workspaces", "bytes": size, "why": why}] if size else []
