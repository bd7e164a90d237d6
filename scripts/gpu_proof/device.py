"""The device of the proof: CUDA, or the stand-in device of the Python tests in a dry run."""

import contextlib
import os
from typing import Any, Iterator

import torch

NAME = os.environ.get("GPU_PROOF_DEVICE", "cuda")
DRY = NAME != "cuda"

if NAME == "standin":
    from standin import device as _standin

    _standin.load()

_module: Any = getattr(torch, NAME)

Stream, Event = _module.Stream, _module.Event


def stream() -> Any:
    return torch.cuda.Stream() if NAME == "cuda" else torch.Stream(NAME)


on_stream = _module.stream


def synchronize() -> None:
    _module.synchronize()


def peak_bytes() -> int:
    return _module.memory_stats()["allocated_bytes.all.peak"]


def reset_peak() -> None:
    _module.reset_peak_memory_stats()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Captures a CUDA graph. The stand-in device has none: there torch says that it captures one."""
    if NAME == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            yield
        return
    asked = {name: getattr(torch.cuda, name) for name in ("is_available", "is_current_stream_capturing")}
    for name in asked:
        setattr(torch.cuda, name, lambda: True)
    try:
        yield
    finally:
        for name, function in asked.items():
            setattr(torch.cuda, name, function)


class _Done:
    """A collective that is over."""

    def wait(self) -> None:
        pass


def _through_host(collective: Any) -> Any:
    def call(tensor: torch.Tensor, *arguments: Any, async_op: bool = False, **named: Any) -> Any:
        host = tensor.detach().cpu()
        collective(host, *arguments, **named)
        tensor.detach().copy_(host)
        return _Done() if async_op else None

    return call


@contextlib.contextmanager
def collectives() -> Iterator[None]:
    """gloo takes tensors of CUDA, and none of the stand-in device: those go through the host."""
    if NAME == "cuda":
        yield
        return
    import torch.distributed as distributed

    asked = {name: getattr(distributed, name) for name in ("reduce", "broadcast", "all_reduce")}
    for name, function in asked.items():
        setattr(distributed, name, _through_host(function))
    try:
        yield
    finally:
        for name, function in asked.items():
            setattr(distributed, name, function)
