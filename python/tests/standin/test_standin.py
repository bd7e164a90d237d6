"""The stand-in device does as CUDA does, where it matters, and punishes what is wrong."""

import contextlib
import ctypes
import faulthandler
import mmap
import os
import signal
import time

import pytest
import torch

import gpt

STEPS = 4


@contextlib.contextmanager
def pinned(count):
    """A tensor of float32 in pinned memory."""
    tensor = torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32)
    assert torch.ops.standin.host_register(tensor.data_ptr(), tensor.nbytes) == 0
    try:
        yield tensor
    finally:
        torch.standin.synchronize()
        torch.ops.standin.host_unregister(tensor.data_ptr())


def test_the_host_may_not_touch_device_memory():
    tensor = torch.ones(8, device="standin")
    torch.standin.synchronize()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


def test_fresh_and_freed_memory_is_poisoned():
    fresh = torch.empty(1 << 16, device="standin")
    assert fresh.cpu().isnan().all()
    fresh.fill_(1)
    address = fresh.data_ptr()
    del fresh
    again = torch.empty(1 << 16, device="standin")
    assert again.data_ptr() == address and again.cpu().isnan().all()


def test_freed_memory_belongs_to_its_stream():
    side = torch.Stream("standin")
    tensor = torch.ones(1 << 15, device="standin")
    address = tensor.data_ptr()
    with torch.standin.slow(side, 500_000):
        with torch.standin.stream(side):
            other = torch.ones(1 << 15, device="standin")
            late = tensor.clone()
        assert other.data_ptr() != address
        tensor.record_stream(side)
        del tensor
        assert torch.empty(1 << 15, device="standin").data_ptr() != address  # side still reads it
        stats = torch.standin.memory_stats()
        assert stats["active_bytes.all.current"] > stats["allocated_bytes.all.current"]
        side.synchronize()
    assert torch.empty(1 << 15, device="standin").data_ptr() == address
    assert (late.cpu() == 1).all()


def test_a_missing_record_stream_shows():
    side = torch.Stream("standin")
    tensor = torch.ones(1 << 14, device="standin")
    side.wait_stream(torch.accelerator.current_stream())
    with torch.standin.slow(side, 500_000):
        with torch.standin.stream(side):
            late = tensor.clone()
        del tensor
        side.synchronize()
    assert late.cpu().isnan().any()


def test_copies_from_and_to_pinned_memory_are_late():
    current = torch.accelerator.current_stream()
    with pinned(1000) as host, torch.standin.slow(current, 500_000):
        host.fill_(1)
        prompt, late = host.to("standin"), host.to("standin", non_blocking=True)
        host.fill_(2)
        assert (prompt.cpu() == 1).all() and (late.cpu() == 2).all()
        torch.standin.synchronize()
        host.copy_(prompt, non_blocking=True)
        assert (host == 2).all() and not current.query()
        current.synchronize()
        assert (host == 1).all()
        deadline = time.monotonic() + 120
        while not current.query():  # its thread puts a task away after it has said that the task is done
            assert time.monotonic() < deadline


def test_copies_of_other_memory_are_staged():
    current, host = torch.accelerator.current_stream(), torch.ones(1000)
    with torch.standin.slow(current, 500_000):
        device = host.to("standin", non_blocking=True)
        host.fill_(2)
        assert not current.query() and (device.cpu() == 1).all()
        host.copy_(device, non_blocking=True)
        assert (host == 1).all()


def test_streams_wait_for_events_only():
    current, side = torch.accelerator.current_stream(), torch.Stream("standin")
    tensor = torch.zeros(1000, device="standin")
    torch.standin.synchronize()
    with torch.standin.slow(current, 500_000):
        tensor.copy_(torch.ones(1000, device="standin"))
        event = torch.Event("standin")
        event.record(current)
        assert not event.query()
        with torch.standin.stream(side):
            early = tensor.clone()
            side.wait_event(event)
            late = tensor.clone()
        assert (early.cpu() == 0).all() and (late.cpu() == 1).all() and event.query()


def test_pinned_memory_has_a_limit():
    with torch.standin.limit_pinned(8000), pinned(1000) as host:
        other = torch.ones(1001)
        assert torch.ops.standin.host_register(other.data_ptr(), other.nbytes) == 2
        assert torch.ops.standin.host_register(host.data_ptr() + 100, 8) == 712
        assert torch.ops.standin.pinned_bytes() == 4000
    assert torch.ops.standin.host_unregister(host.data_ptr()) == 713


def test_memory_that_is_pinned_no_longer():
    current = torch.accelerator.current_stream()
    with pinned(1000) as host, torch.standin.slow(current, 500_000):
        host.to("standin", non_blocking=True)
        torch.ops.standin.host_unregister(host.data_ptr())
        with pytest.raises(RuntimeError, match="a copy reads host memory that is pinned no longer"):
            current.synchronize()


def test_the_high_water_mark():
    torch.standin.reset_peak_memory_stats()
    before = torch.standin.memory_stats()["allocated_bytes.all.current"]
    tensors = [torch.empty(1000, device="standin") for _ in range(3)]
    del tensors[1:]
    stats = torch.standin.memory_stats()
    assert stats["allocated_bytes.all.peak"] - before == 3 * 4096
    assert stats["allocated_bytes.all.current"] - before == 4096


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="expected all tensors"):
        torch.ones(3, device="standin").index_select(0, torch.tensor([1]))


def train(device, dtype, optimizer_of):
    model = gpt.GPT().to(dtype).to(device)
    optimizer = optimizer_of(model)
    data = gpt.text()
    for step in range(STEPS):
        model.loss(gpt.batch(data, step).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
        lambda m: torch.optim.AdamW(m.parameters(), foreach=False),
        lambda m: torch.optim.AdamW(m.parameters(), fused=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
        lambda m: torch.optim.Adafactor(m.parameters(), foreach=False),
        lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]),
    ],
    ids=["foreach", "single", "fused", "sgd", "adafactor", "muon"],
)
def test_training_has_the_bits_of_the_cpu(dtype, optimizer_of):
    torch.manual_seed(0)
    ours = train("standin", dtype, optimizer_of)
    torch.manual_seed(0)
    theirs = train("cpu", dtype, optimizer_of)
    assert all(map(torch.equal, ours, theirs))
