"""The window of the device through which a held state comes: copies in, updates and copies out, in order by events."""

import contextlib
from typing import Any, Iterator, List, Sequence

import torch

from plimsoll import states
from plimsoll.client import Arena
from plimsoll.torch.regions import Region
from plimsoll.torch.transfer import pinned_arenas, runtime_of

_PIECES = 8  # of a slot: each is filled as soon as it was emptied


class HostStreams:
    """The parameters are on the host: all is done when a call returns."""

    def __init__(self, device: torch.device):
        self.device = device

    def pin(self, arena: Arena) -> None:
        """Prepares an arena for copies."""

    def allocate(self, size: int) -> torch.Tensor:
        """Memory that copies in may fill."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    @contextlib.contextmanager
    def copying_in(self, after: Sequence[Any] = ()) -> Iterator[None]:
        """Runs what is inside when these events have happened, on the stream of copies in."""
        yield

    @contextlib.contextmanager
    def copying_out(self, after: Sequence[Any] = ()) -> Iterator[None]:
        """The same, on the stream of copies out."""
        yield

    def compute_after(self, events: Sequence[Any]) -> None:
        """Has the current stream wait for events."""

    def event(self) -> Any:
        """The instant at which what was asked for so far is done: on the stream of the copies, where one is open."""

    def used_by_copies_out(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of a tensor that is let go until the copies out that were begun are done."""

    def set_word(self, word: torch.Tensor, value: int) -> None:
        """Writes a number, with its checksum, to the host behind the copies out that were begun."""
        word.fill_(states.signed(value))

    def finish(self, event: Any) -> None:
        """Waits for an event on the host."""

    def settle(self) -> None:
        """Waits on the host until nothing is under way."""

    def release(self) -> None:
        """Undoes pin, for all arenas."""


class DeviceStreams(HostStreams):
    """The parameters are on an accelerator: copies have a stream for each direction."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._runtime, self._arenas = runtime_of(device), pinned_arenas(device)
        self._in, self._out = self._runtime.Stream(device), self._runtime.Stream(device)
        with self._runtime.stream(self._out):
            self._number = torch.empty(1, dtype=torch.int64, device=device)

    def pin(self, arena: Arena) -> None:
        self._arenas.add(arena)

    def allocate(self, size: int) -> torch.Tensor:
        memory = super().allocate(size)
        self._in.wait_stream(self._runtime.current_stream(self.device))  # which may still use what this memory was
        return memory

    @contextlib.contextmanager
    def copying_in(self, after: Sequence[Any] = ()) -> Iterator[None]:
        self._wait(self._in, after)
        with self._runtime.stream(self._in):
            yield

    @contextlib.contextmanager
    def copying_out(self, after: Sequence[Any] = ()) -> Iterator[None]:
        self._wait(self._out, after)
        with self._runtime.stream(self._out):
            yield

    def compute_after(self, events: Sequence[Any]) -> None:
        self._wait(self._runtime.current_stream(self.device), events)

    @staticmethod
    def _wait(stream: Any, events: Sequence[Any]) -> None:
        for event in events:
            if event is not None:
                stream.wait_event(event)

    def event(self) -> Any:
        event = self._runtime.Event()
        event.record(self._runtime.current_stream(self.device))
        return event

    def used_by_copies_out(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._out)

    def set_word(self, word: torch.Tensor, value: int) -> None:
        # The word comes from the device: only so it is written behind the copies, without a thread of the host.
        word.copy_(self._number.fill_(states.signed(value)), non_blocking=True)

    def finish(self, event: Any) -> None:
        if event is not None:
            event.synchronize()

    def settle(self) -> None:
        self._in.synchronize()
        self._out.synchronize()

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):  # as after a kernel that has failed
            self.settle()
        self._arenas.release()


def streams_for(device: torch.device) -> HostStreams:
    return HostStreams(device) if device.type == "cpu" else DeviceStreams(device)


class Slot:
    """A part of the window: the state of one region at a time."""

    def __init__(self, streams: HostStreams, size: int):
        self._streams, self._size = streams, size
        self.memory = streams.allocate(size)
        self._filled: Any = None
        self._drained: List[Any] = [None] * _PIECES

    def _pieces(self, size: int) -> Iterator[Any]:
        step = -(-self._size // _PIECES)
        for i in range(_PIECES):
            begin, end = min(i * step, size), min((i + 1) * step, size)
            if begin < end:
                yield i, slice(begin, end)

    def fill(self, region: Region, host: torch.Tensor) -> None:
        """Copies a region in, piece by piece behind the copies of what was there before."""
        for i, piece in self._pieces(region.device_bytes):
            with self._streams.copying_in([self._drained[i]]):
                self.memory[piece].copy_(host[piece], non_blocking=True)
        with self._streams.copying_in():
            self._filled = self._streams.event()

    def await_filled(self) -> None:
        self._streams.compute_after([self._filled])

    def await_drained(self) -> None:
        """Lets the update write to the slot itself."""
        self._streams.compute_after(self._drained)

    def drain(self, region: Region, host: torch.Tensor, after: Any) -> None:
        """Copies a region out when the update is done, which ends with the event ``after``."""
        with self._streams.copying_out([after]):
            for i, piece in self._pieces(region.device_bytes):
                host[piece].copy_(self.memory[piece], non_blocking=True)
                self._drained[i] = self._streams.event()

    def let_go(self) -> None:
        """Keeps the memory until the copies out of it are done, whatever becomes of the slot."""
        self._streams.used_by_copies_out(self.memory)
