"""What is asked of CUDA, where there is none: stand-ins note it."""

import contextlib
import gc
import itertools
import platform
import types

import pytest
import torch

import plimsoll.torch
from plimsoll import PlimsollError
from plimsoll.torch import shards as shards_module
from plimsoll.torch import Async
from plimsoll.torch.layout import Mesh, Piece
from plimsoll.torch.shard import Shard
from plimsoll.torch.slot import DtypeGroup
from plimsoll.torch.pinning import CudaDriver, PinnedArenas
from plimsoll.torch.transfer import HostTransfer, StreamTransfer
from test_optimizer import assert_same, backward, network


class Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.notes.append(("wait", self.name, other.name))

    def synchronize(self):
        self.cuda.check()
        self.cuda.notes.append(("synchronize", self.name))


class Cuda:
    """The runtime: streams, its last error, and what it was asked for, in order."""

    def __init__(self, monkeypatch):
        self.notes, self.names, self.last, self.capturing, self.broken = [], itertools.cycle(("out", "in")), 0, False, False
        self.refuses, self.registered = lambda bytes: 0, []
        self.current = Stream(self, "current")
        for name, stand_in in {
            "Stream": lambda device: Stream(self, next(self.names)),
            "current_stream": lambda device: self.current,
            "stream": self.on,
            "device": lambda device: contextlib.nullcontext(),
            "cudart": lambda: self,
            "Event": lambda: types.SimpleNamespace(record=lambda s: None, query=self.query, synchronize=lambda: None),
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.record(tensor, stream))
        fill = torch.Tensor.fill_
        monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: self.check() or fill(tensor, value))

    def record(self, tensor, stream):
        self.notes.append(("record", tensor.numel(), stream.name))

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def query(self):
        assert not self.capturing, "operation not permitted when stream is capturing"
        return True

    def check(self):
        """Of a kernel, or a call that waits: it fails with the last error, which is forgotten unless the device is broken."""
        error, self.last = self.last, self.last if self.broken else 0
        if error:
            raise RuntimeError(f"CUDA error: {self.cudaGetErrorString(error)}")

    def cudaHostRegister(self, address, size, flags):
        error = self.refuses(size)
        self.last = error or self.last
        self.registered += [address] * (error == 0)
        return error

    def cudaHostUnregister(self, address):
        if self.broken:
            return 710
        self.registered.remove(address)
        return 0

    cudaError = int

    def cudaGetErrorString(self, error):
        return {2: "out of memory", 710: "device-side assert triggered"}[error]


def cuda_transfer(device):
    return StreamTransfer(device, torch.cuda, PinnedArenas(CudaDriver(device)))


@pytest.fixture
def cuda(monkeypatch):
    """Parameters of the CPU are treated as those of a CUDA device."""
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(shards_module, "transfer_for", cuda_transfer)
    return cuda


def test_streams_of_both_directions(cuda):
    """Gradients wait for what was computed; parameters do not wait for gradients, nor these for them."""
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    cuda.notes.clear()
    for i in range(3):
        for model, its in ((ours, optimizer), (theirs, reference)):
            backward(model, i)
            its.step()
            its.zero_grad()
    assert_same(ours, theirs)
    waits = {n[1:] for n in cuda.notes if n[0] == "wait"}
    assert waits == {("out", "current"), ("in", "current"), ("current", "in")}
    assert {"out", "in"} == {n[1] for n in cuda.notes if n[0] == "synchronize"}
    assert {"out", "in"} == {n[2] for n in cuda.notes if n[0] == "record"}


@pytest.mark.parametrize("kernel, advice", [("6.8.0-generic", "ulimit -l does not limit it"), ("5.15-microsoft-standard-WSL2", "under WSL2")])
def test_memory_that_cannot_be_pinned(cuda, monkeypatch, kernel, advice):
    """The error is not left to the next kernel, and what was pinned before is let go."""
    monkeypatch.setattr(platform, "release", lambda: kernel)
    cuda.refuses = lambda size: 2 if cuda.registered else 0  # the second arena
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    with pytest.raises(PlimsollError) as failure:
        optimizer.open()
    text = str(failure.value)
    assert "arena rank0/fp32" in text and "gradients of 4096 bytes: out of memory (cudaHostRegister, error 2)" in text
    assert "has pinned 4096 bytes before, and this host has" in text and advice in text and "ulimit -l)" not in text
    assert cuda.last == 0 and not cuda.registered
    torch.ones(1).fill_(2)  # a kernel of the program
    cuda.refuses = lambda size: 0
    optimizer.open()
    optimizer.close()
    assert not cuda.registered


def test_a_broken_device_does_not_hide_its_cause(cuda, monkeypatch):
    """After an assertion on the device every call fails, and so does the one that lets go."""
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())

    def fails(*_):
        cuda.broken, cuda.last = True, 710
        raise RuntimeError("index out of bounds, in the program's own kernel")

    monkeypatch.setattr(shards_module.Shard, "initialize", fails)
    with pytest.raises(RuntimeError, match="the program's own kernel"):
        optimizer.open()
    assert optimizer._shards is None

    cuda.broken, cuda.last = False, 0
    monkeypatch.undo()


def test_close_and_collection_after_the_device_broke(cuda):
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    cuda.broken, cuda.last = True, 710
    process = optimizer._shards.service.process
    optimizer.close()
    assert optimizer._shards is None and process is not None


def test_collection_after_the_device_broke_behind_a_step(cuda, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_JOB", "broken")  # whose service no other optimizer of this process has
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, overlap=Async(0))
    backward(model, 0)
    optimizer.step()
    cuda.broken, cuda.last = True, 710
    process = optimizer._shards.service.process
    del optimizer
    gc.collect()
    process.wait(timeout=120)


def test_parameters_that_come_for_other_streams(cuda):
    """A fetch that another thread begins while a stream waits counts for the next wait only."""
    transfer = cuda_transfer(torch.device("cpu"))
    values = torch.zeros(4)
    transfer.fetch(values, values)
    cuda.current.wait_stream = lambda _: transfer.fetch(values, values)
    transfer.join()
    cuda.current.wait_stream = lambda other: cuda.notes.append("waits")
    transfer.catch_up()
    assert cuda.notes[-1] == "waits"


def test_gradients_that_come_while_a_graph_is_captured(cuda):
    """Hooks leave them alone then: the step takes them, as it does after every replay."""
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    for i in range(3):
        cuda.capturing = True
        cuda.notes.clear()
        backward(ours, i)
        assert not cuda.notes
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured: .* call step\\(\\) after each replay"):
            optimizer.step()
        assert not cuda.notes
        cuda.capturing = False
        backward(theirs, i)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
    assert_same(ours, theirs)


def test_zero2_is_no_part_of_a_graph(cuda):
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding="zero2")
    optimizer.open()
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="this backward pass is captured for a CUDA graph: leave it out of the graph"):
        backward(model, 0)


def test_gradients_that_cross_twice(cuda):
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    optimizer.open()
    for clips in (False, True):
        backward(model, 0)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            expected = pytest.warns(UserWarning, match="are copied again in the step: .* max_grad_norm=1.0")
        else:
            expected = contextlib.nullcontext()
        with expected:
            optimizer.step()
        optimizer.zero_grad()


def test_memory_of_gradients_that_other_ranks_were_sent(cuda, monkeypatch):
    """The stream that has waited for the others may not be the one that the memory was taken on."""
    waited = []
    work = types.SimpleNamespace(wait=lambda: waited.append(cuda.current.name) or cuda.notes.append(("waited",)))
    monkeypatch.setattr(torch.distributed, "reduce", lambda *_, **__: work)
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: rank)
    parameter = torch.nn.Parameter(torch.zeros(10))
    pieces = [Piece(parameter, "p", (10,), 0, False, 5 * owner, 5, owner, 0) for owner in range(2)]
    group = DtypeGroup("fp32", pieces, Mesh(0, 2, ("all",)), cuda_transfer(torch.device("cpu")), shared=False)
    shard = Shard(group)
    shard.slots[parameter] = types.SimpleNamespace(gradient=torch.zeros(5), zero=False, fired=0, expected=2)
    parameter.grad = torch.ones(10)
    shard.gradients.reduce(parameter, True)
    cuda.notes.clear()
    cuda.current = Stream(cuda, "step's")
    shard.gradients._take_reduced(0)
    notes = cuda.notes
    assert waited == ["step's"] * 2
    for i in [i for i, note in enumerate(notes) if note == ("waited",)]:
        assert notes[i + 1] == ("record", 5, "step's")
    assert torch.equal(shard.slots[parameter].gradient, torch.full((5,), 0.5))
    assert HostTransfer().keep(torch.zeros(1)) is None
