"""A memory snapshot when PyTorch finds no memory on a GPU, for ``plimsoll explain``.

``plimsoll run`` sets the variable ``PLIMSOLL_SNAPSHOTS`` to the name of its recording. The snapshot is written beside it.
"""

import os
import pickle
import sys
from typing import Any, Callable, Dict, Optional

import torch

#: How many of the last allocations PyTorch keeps, with the Python lines that asked for them.
ENTRIES = 2_000
#: The largest file, in bytes. A snapshot that is larger is written without what the last allocations were.
LARGEST = 256 << 20

_attach: Optional[Callable[..., None]] = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
_is_recording: Callable[[], bool] = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)


class Snapshots:
    """The snapshots of this process: the last one stays."""

    def __init__(self, rank: int):
        recording = os.environ.get("PLIMSOLL_SNAPSHOTS")
        self._path = f"{recording}.rank{rank}.pickle" if recording else None
        self._pid = os.getpid()
        self._listens = self._is_attached = self._is_recorder = False

    def begin(self) -> None:
        """Begins to listen, once this process uses a GPU."""
        if self._listens or self._path is None or _attach is None or not torch.cuda.is_initialized():
            return
        self._listens = True  # also if this fails
        if not _is_recording():  # else it is the program's own
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=ENTRIES)
            self._is_recorder = True
        if not self._is_attached:  # PyTorch does not let go of it
            self._is_attached = True
            _attach(self._observe)

    def end(self) -> None:
        """Ends the history of allocations that :meth:`begin` has begun."""
        self._listens = False
        if self._is_recorder:
            self._is_recorder = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def _observe(self, device: int, asked: int, total: int, free: int) -> None:
        """What PyTorch calls before it raises. Whatever fails here, its own error must reach the program."""
        if os.getpid() != self._pid or not self._listens:
            return
        try:
            self._write(torch.cuda.memory._snapshot())
        except Exception as error:
            print(f"plimsoll: GPU {device} is out of memory, and writing a snapshot of it failed: {error!r}", file=sys.stderr)
        else:
            print(f"plimsoll: GPU {device} is out of memory: {self._path} has who held it", file=sys.stderr)

    def _write(self, snapshot: Dict[str, Any]) -> None:
        text = pickle.dumps(snapshot)
        if len(text) > LARGEST:
            snapshot["device_traces"] = [[] for _ in snapshot["device_traces"]]
            text = pickle.dumps(snapshot)
        if len(text) > LARGEST:
            raise ValueError(f"it has {len(text):,} bytes, at most {LARGEST:,} are written")
        part = f"{self._path}.part"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text)
        os.replace(part, self._path)
