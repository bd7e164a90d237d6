"""StateOffload on a device that punishes mistakes: its copies, and what it holds of the device."""

import contextlib
import gc
from contextlib import closing

import pytest
import torch

from plimsoll import PlimsollError
from plimsoll.torch import StateOffload
from plimsoll.torch.held_state import HeldState
from plimsoll.torch.pinning import DRIVERS
from plimsoll.torch.window import DeviceStreams, Slot
from wrapping import CHUNK_BYTES, OPTIMIZERS, STEPS, assert_same_training, give_gradients, on_host, parameters, same, steps

WAYS = [
    {},
    {"chunk_bytes": 1},
    {"fraction": 0.3},
    {"recovery": False},
    {"mode": "whole"},
    {"mode": "whole", "fraction": 0.3},
]


def wrap(optimizer, **options):
    return StateOffload(optimizer, **{"chunk_bytes": CHUNK_BYTES, **options})


def name_of(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else getattr(value, "__name__", "")


@pytest.mark.each_choice
@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize("name", ["foreach", "fused", "sgd", "adafactor", "muon"])
def test_training_has_the_bits_of_the_optimizer(name, way):
    ps, qs = parameters("standin"), parameters("standin")
    make = OPTIMIZERS.get(name) or (lambda given: torch.optim.Muon([p for p in given if p.ndim == 2 and p.numel()]))
    theirs = make(qs)
    with closing(wrap(make(ps), **way)) as ours:
        steps(ps, ours, STEPS)
        steps(qs, theirs, STEPS)
        assert_same_training(ours, theirs, ps, qs)


@pytest.mark.parametrize("mode", ["chunked", "whole"])
@pytest.mark.parametrize("master", ["fp32", "split"])
def test_masters_have_the_bits_of_the_cpu(master, mode):
    def trained(device):
        ps = parameters(device, torch.bfloat16)
        with closing(wrap(torch.optim.AdamW(ps, lr=1e-2, fused=True), mode=mode, master=master, moments="bf16")) as optimizer:
            for step in range(4):
                optimizer.prefetch()
                steps(ps, optimizer, 1, step)
            return [*map(on_host, ps), *(v for e in optimizer.state_dict()["state"].values() for v in e.values())]

    assert all(map(same, trained("standin"), trained("cpu")))


def test_options_that_are_tensors_of_the_device():
    ps, qs = parameters("standin"), parameters("standin")
    options = {"lr": torch.tensor(1e-2, device="standin"), "capturable": True, "foreach": True}
    theirs = torch.optim.AdamW(qs, **options)
    with closing(wrap(torch.optim.AdamW(ps, **options))) as ours:
        steps(ps, ours, 3)
        steps(qs, theirs, 3)
        assert_same_training(ours, theirs, ps, qs)


# Faults


def no_wait_for_the_copy_in(monkeypatch):
    monkeypatch.setattr(Slot, "await_filled", lambda self: None)


def a_slot_is_used_again_too_early(monkeypatch):
    copying_in = DeviceStreams.copying_in
    monkeypatch.setattr(DeviceStreams, "copying_in", lambda self, after=(): copying_in(self))


def freed_before_the_copy_has_ended(monkeypatch):
    monkeypatch.setattr(DeviceStreams, "used_by_copies_out", lambda self, tensor: None)


def the_wrong_stream(monkeypatch):
    """Copies out run on the stream of copies in, which waits for no update."""
    monkeypatch.setattr(DeviceStreams, "copying_out", lambda self, after=(): self.copying_in())


def no_wait_before_a_save(monkeypatch):
    monkeypatch.setattr(HeldState, "settle", lambda self: None)


def slow_streams(monkeypatch, current_us, in_us, out_us):
    init = DeviceStreams.__init__

    def slow(self, *arguments):
        init(self, *arguments)
        for stream, us in ((self._in, in_us), (self._out, out_us)):
            torch.ops.standin.slow_down(stream.stream_id, us)

    monkeypatch.setattr(DeviceStreams, "__init__", slow)
    return torch.standin.slow(torch.accelerator.current_stream(), current_us)


def trained(options):
    ps = parameters("standin")
    with closing(wrap(torch.optim.AdamW(ps, lr=1e-2, foreach=True), **options)) as optimizer:
        for step in range(4):
            give_gradients(ps, step)
            optimizer.step()
        return [*map(on_host, ps), *(v for e in optimizer.state_dict()["state"].values() for v in e.values())]


@pytest.mark.parametrize(
    "fault, options, slow",
    [
        (no_wait_for_the_copy_in, {}, (0, 2000, 0)),
        (a_slot_is_used_again_too_early, {}, (0, 0, 2000)),
        (freed_before_the_copy_has_ended, {"mode": "whole"}, (0, 0, 2000)),
        (the_wrong_stream, {}, (2000, 0, 0)),
        (no_wait_before_a_save, {}, (0, 0, 2000)),
    ],
    ids=name_of,
)
def test_faults_are_caught(monkeypatch, quick_again, fault, options, slow):
    right = trained(options)
    with slow_streams(monkeypatch, *slow):
        assert all(map(same, trained(options), right))
        fault(monkeypatch)
        try:
            wrong = trained(options)
            torch.standin.synchronize()
        except (PlimsollError, RuntimeError):
            with contextlib.suppress(RuntimeError):
                torch.standin.synchronize()
            return
    assert not all(map(same, wrong, right))


def test_gradients_are_on_the_host_before_the_program_overwrites_them(monkeypatch, quick_again):
    """And so are parameters: what a program does after the step is no part of it."""

    def held():
        ps = parameters("standin")
        with closing(wrap(torch.optim.SGD(ps, lr=0.1, momentum=0.9))) as optimizer:
            give_gradients(ps, 0)
            expected = [on_host(p.grad) for p in ps]
            optimizer.step()
            after = [p.detach().clone() for p in ps]
            with torch.no_grad():
                for p in ps:
                    p.grad.zero_()
                    p.zero_()
            memory = optimizer._state._memory
            optimizer.synchronize()
            gradients = all(same(h.gradient.within(memory.gradients), e) for h, e in zip(memory.layout.held, expected))
            copies = all(
                same(h.copy.within(memory.region(r, 1)), after[h.index]) for r in memory.layout.regions for h in r.held
            )
            return gradients and copies

    with slow_streams(monkeypatch, 0, 0, 2000):
        assert held()
        compute_after = DeviceStreams.compute_after
        calls = []

        def first_alone(self, events):  # the wait at the end of a step has many
            calls.append(events)
            if len(events) < 3:
                compute_after(self, events)

        monkeypatch.setattr(DeviceStreams, "compute_after", first_alone)
        assert not held()


# What it holds of the device


def peak(act):
    """The most bytes of the device while ``act`` runs, beyond those before."""
    torch.standin.synchronize()
    torch.standin.reset_peak_memory_stats()
    before = torch.standin.memory_stats()["allocated_bytes.all.current"]
    act()
    torch.standin.synchronize()
    return torch.standin.memory_stats()["allocated_bytes.all.peak"] - before


def in_use():
    return torch.standin.memory_stats()["allocated_bytes.all.current"]


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["chunked", "whole"])
@pytest.mark.parametrize("master", [None, "fp32", "split"])
def test_the_window_is_exact(master, mode, moments):
    """The fused update needs no memory of its own, so the window is all there is."""
    ps = parameters("standin", torch.bfloat16 if master else torch.float32)
    options = {"mode": mode, "master": master, "moments": moments}
    with closing(wrap(torch.optim.AdamW(ps, lr=1e-2, fused=True), **options)) as optimizer:
        give_gradients(ps, 0)
        gc.collect()  # what earlier tests have left
        begun = in_use()
        assert peak(optimizer.step) == optimizer.first_window_bytes
        optimizer.step()
        for _ in range(2):
            held = in_use() - begun
            assert held + peak(optimizer.step) == optimizer.window_bytes
        saved = {}
        assert peak(lambda: saved.update(optimizer.state_dict())) == 0
        assert peak(lambda: optimizer.load_state_dict(saved)) == 0
        assert held + peak(optimizer.step) == optimizer.window_bytes
        assert mode == "chunked" or held == 512
    torch.standin.synchronize()
    assert in_use() == begun


def test_saves_and_loads_leave_the_device_alone(tmp_path):
    ps = parameters("standin", torch.bfloat16)
    with closing(wrap(torch.optim.AdamW(ps, lr=1e-2, fused=True), master="split")) as optimizer:
        steps(ps, optimizer, 3)
        assert peak(lambda: optimizer.save(tmp_path)) == 0
        steps(ps, optimizer, 2, 3)
        assert optimizer.saved() == 3
        expected = [on_host(p) for p in ps]
        assert peak(lambda: optimizer.load(tmp_path)) == 0
        steps(ps, optimizer, 2, 3)
        assert all(map(same, ps, expected))


def test_memory_that_cannot_be_pinned():
    optimizer = wrap(torch.optim.AdamW(parameters("standin")))
    with torch.standin.limit_pinned(8192), pytest.raises(PlimsollError, match="cannot pin arena rank0/states"):
        optimizer.open()
    assert torch.ops.standin.pinned_bytes() == 0


def test_an_accelerator_whose_driver_pins_nothing_in_place(monkeypatch):
    right = trained({})
    monkeypatch.delitem(DRIVERS, "standin")
    assert all(map(same, trained({}), right))
