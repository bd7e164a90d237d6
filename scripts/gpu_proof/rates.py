"""Rates: copies by size and direction, from pinned and registered memory, and the time that registration takes."""

import json
import mmap
import os
import subprocess
import time
from typing import Any, Callable, Dict, List

import torch

from gpu_proof import device
from plimsoll.torch.pinning import DRIVERS

SIZES = [1 << p for p in ((12, 16) if device.DRY else (16, 18, 20, 22, 24, 26, 28, 30))]
REGISTERED = [1 << p for p in ((16, 20) if device.DRY else (26, 28, 30, 32))]
ENOUGH = 0.01 if device.DRY else 0.05  # seconds that a measurement takes


def driver() -> Any:
    return DRIVERS[device.NAME](torch.device(device.NAME, 0))


class Registered:
    """Memory of a memfd that the driver has pinned in place, as the arenas of the service are."""

    def __init__(self, size: int):
        self._file = os.memfd_create("gpu-proof")
        os.ftruncate(self._file, size)
        self.tensor = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        began = time.perf_counter()
        self.tensor.fill_(1)
        self.touch_seconds = time.perf_counter() - began
        began = time.perf_counter()
        error = driver().register(self.tensor.data_ptr(), size)
        self.seconds = time.perf_counter() - began
        if error:
            raise RuntimeError(f"the driver cannot pin {size} bytes: {driver().describe(error)}")

    def close(self) -> float:
        device.synchronize()
        began = time.perf_counter()
        driver().unregister(self.tensor.data_ptr())
        seconds = time.perf_counter() - began
        os.close(self._file)
        return seconds


class Pinned:
    """Memory that PyTorch's allocator has pinned. The stand-in device has no such allocator."""

    def __init__(self, size: int):
        began = time.perf_counter()
        pin = {} if device.DRY else {"pin_memory": True}
        self.tensor = torch.empty(size, dtype=torch.uint8, **pin).fill_(1)
        self.seconds = time.perf_counter() - began

    def close(self) -> None:
        device.synchronize()


class Pageable(Pinned):
    def __init__(self, size: int):
        self.tensor = torch.ones(size, dtype=torch.uint8)


KINDS: Dict[str, Callable[[int], Any]] = {"registered": Registered, "pinned": Pinned, "pageable": Pageable}


def seconds_of(act: Callable[[], None]) -> float:
    """How long one of many takes, all begun before the last is waited for."""
    act()
    device.synchronize()
    count = 1
    while True:
        began = time.perf_counter()
        for _ in range(count):
            act()
        device.synchronize()
        seconds = time.perf_counter() - began
        if seconds >= ENOUGH:
            return seconds / count
        count *= 2 if seconds < ENOUGH / 4 else 4


def copies() -> Dict[str, Any]:
    rows: List[Dict[str, Any]] = []
    into, out = device.stream(), device.stream()
    for kind, make in KINDS.items():
        for size in SIZES if kind != "pageable" else SIZES[-1:]:
            here, back = make(size), make(size)
            there, other = (torch.empty(size, dtype=torch.uint8, device=device.NAME) for _ in range(2))

            def to_device() -> None:
                with device.on_stream(into):
                    there.copy_(here.tensor, non_blocking=True)

            def to_host() -> None:
                with device.on_stream(out):
                    back.tensor.copy_(other, non_blocking=True)

            def both() -> None:
                to_device()
                to_host()

            def rate(act: Callable[[], None], copies: int) -> float:
                return copies * size / seconds_of(act)

            rows.append(
                {
                    "memory": kind,
                    "bytes": size,
                    "to_device": rate(to_device, 1),
                    "to_host": rate(to_host, 1),
                    "both_added": rate(both, 2),
                }
            )
            for memory in (here, back):
                memory.close()
    return {"rows": rows}


def registration() -> Dict[str, Any]:
    rows = []
    for size in REGISTERED:
        registered = Registered(size)
        row = {"bytes": size, "touch_seconds": registered.touch_seconds, "register_seconds": registered.seconds}
        row["unregister_seconds"] = registered.close()
        row["pin_memory_seconds"] = Pinned(size).seconds
        rows.append(row)
    return {"rows": rows}


def host() -> Dict[str, Any]:
    """What updates by the service move, and what a pass without arithmetic moves: plimsoll bench."""
    size, rounds = ("1Mi", "1") if device.DRY else ("256Mi", "3")
    workers = str(len(os.sched_getaffinity(0)))
    command = [
        os.environ["PLIMSOLL"],
        "bench",
        "--parameters",
        size,
        "--rounds",
        rounds,
        "--workers",
        workers,
        "--checks=false",
        "--json",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    case = json.loads(done.stdout)["cases"][-1]
    return {
        "parameters": case["parameters"],
        "workers": case["workers"],
        "update_bytes_per_second": case["update_bytes_per_second"]["median"],
        "limit_bytes_per_second": case["limit_bytes_per_second"]["median"],
    }


def run(case: str) -> Dict[str, Any]:
    return {"copies": copies, "registration": registration, "host": host}[case]()
