"""A stand-in for an accelerator, on the CPU, that punishes what a real one may forgive: ``torch.device("standin")``.

* Its memory has addresses that the host may not touch: whoever reads ``data_ptr()`` dies of it.
* Its streams are threads that run late, with random delays. What a stream does not wait for has not happened yet.
* Its allocator gives freed memory to the next allocation of the same stream at once, poisoned with NaNs, unless
  ``record_stream`` was called. Fresh memory is poisoned, too.
* Copies from and to pinned host memory are late with ``non_blocking=True``; those of other memory are as CUDA's. How much
  memory can be pinned has a limit.

Kernels are the CPU's, on the threads of streams: so are the bits. What the host's next decision depends on is waited for,
and so are random numbers, which come from the CPU's generator. The extension is built once for each version of torch.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import pathlib
import sys
import types
from typing import Any, Dict, Iterator

import torch
from torch.utils import cpp_extension

from plimsoll.torch.pinning import DRIVERS

_FOLDER = pathlib.Path(__file__).parent
_SOURCES = [_FOLDER / name for name in ("device.cpp", "operators.cpp")]


def _build() -> None:
    digest = hashlib.sha256(torch.__version__.encode())
    for source in (*_SOURCES, _FOLDER / "standin.h"):
        digest.update(source.read_bytes())
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    folder = cache / "plimsoll" / f"standin-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    # ninja may be in the virtual environment only.
    os.environ["PATH"] = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
    with open(folder / "held", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # let go by a process that dies, unlike torch's own lock
        (folder / "lock").unlink(missing_ok=True)
        cpp_extension.load(
            "standin",
            list(map(str, _SOURCES)),
            extra_cflags=["-O1", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            build_directory=str(folder),
            is_python_module=False,
        )


class _Module(types.ModuleType):
    """What ``torch.cuda`` is to CUDA."""

    Stream = torch.Stream

    @staticmethod
    def Event(**options: Any) -> torch.Event:
        return torch.Event("standin", **options)

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _lazy_init() -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Its random numbers are the CPU's."""

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device(device: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.ops.standin.synchronize()

    @staticmethod
    def memory_stats() -> Dict[str, int]:
        """Bytes of tensors (allocated), and with those that other streams still use (active), as CUDA counts them."""
        names = ("allocated_bytes.all", "active_bytes.all")
        return dict(zip([f"{n}.{when}" for n in names for when in ("current", "peak")], torch.ops.standin.usage()))

    @staticmethod
    def reset_peak_memory_stats() -> None:
        torch.ops.standin.reset_peaks()

    # What only this device has.

    @staticmethod
    def set_delays(seed: int, most_us: int) -> None:
        """Half of the copies, and some kernels, wait at random for up to so long."""
        torch.ops.standin.set_delays(seed, most_us)

    @staticmethod
    @contextlib.contextmanager
    def slow(stream: torch.Stream, us: int) -> Iterator[None]:
        """Has a stream wait before each copy, and where it begins to compute."""
        torch.ops.standin.slow_down(stream.stream_id, us)
        try:
            yield
        finally:
            torch.ops.standin.slow_down(stream.stream_id, 0)

    @staticmethod
    @contextlib.contextmanager
    def limit_pinned(size: int) -> Iterator[None]:
        torch.ops.standin.limit_pinned(size)
        try:
            yield
        finally:
            torch.ops.standin.limit_pinned(-1)


class Driver:
    """Pins pages of the host in place."""

    name, call = "the stand-in's driver", "host_register"

    def __init__(self, device):
        pass

    def register(self, address, size):
        return torch.ops.standin.host_register(address, size)

    def unregister(self, address):
        return torch.ops.standin.host_unregister(address)

    def describe(self, error):
        return {2: "out of memory", 712: "already registered", 713: "not registered"}[error]

    def take_last_error(self):
        """It leaves none."""


def load() -> None:
    """Builds the device, and makes it torch's accelerator in this process."""
    if hasattr(torch, "standin"):
        return
    _build()
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", _Module("torch.standin"))
    DRIVERS["standin"] = Driver
    atexit.register(torch.ops.standin.synchronize)
