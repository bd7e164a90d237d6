"""The copies of the optimizers, on a device that punishes mistakes."""

import contextlib
from contextlib import closing

import pytest
import torch

import gpt
import plimsoll.torch
from plimsoll import PlimsollError
from plimsoll.torch.pinning import DRIVERS
from plimsoll.torch.transfer import StreamTransfer, transfer_for
from transfers import use_copies

STEPS = 4


def train(device, make, dtype=torch.bfloat16, steps=STEPS, **options):
    """The parameters after training, and the state of the optimizer."""
    torch.manual_seed(0)
    model = gpt.GPT().to(dtype).to(device)
    data = gpt.text()
    with closing(make(model.parameters(), lr=1e-2, **options)) as optimizer:
        optimizer.open()
        for step in range(steps):
            model.loss(gpt.batch(data, step).to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {} if "sharding" in options else optimizer.state_dict()["state"]
    return [p.detach().cpu() for p in model.parameters()] + [
        v.cpu() for values in state.values() for v in values.values() if isinstance(v, torch.Tensor)
    ]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


OPTIMIZERS = [
    (plimsoll.torch.AdamW, {}),
    (plimsoll.torch.AdamW, {"dtype": torch.float32}),
    (plimsoll.torch.AdamW, {"moments": "bf16"}),
    (plimsoll.torch.AdamW, {"moments": "int8"}),
    (plimsoll.torch.AdamW, {"state": "fp32", "max_grad_norm": 0.5}),
    (plimsoll.torch.AdamW, {"gradients": "step"}),
    (plimsoll.torch.AdamW, {"sharding": "zero2"}),
    (plimsoll.torch.Adam, {"moments": "bf16"}),
    (plimsoll.torch.Lion, {}),
    (plimsoll.torch.Lion, {"moments": "bf16"}),
    (plimsoll.torch.Adagrad, {}),
    (plimsoll.torch.SGD, {"momentum": 0.9}),
]


def name_of(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else getattr(value, "__name__", "")


@pytest.mark.parametrize("make, options", OPTIMIZERS, ids=name_of)
def test_training_has_the_bits_of_the_cpu(monkeypatch, make, options):
    ours = train("standin", make, **options)
    use_copies(monkeypatch, block_bytes=4096)
    assert same(ours, train("cpu", make, **options))


def no_wait_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(StreamTransfer, "_after_current", lambda self, stream: None)


def no_wait_for_the_gradients(monkeypatch):
    monkeypatch.setattr(StreamTransfer, "finish", lambda self, token: None)
    monkeypatch.setattr(StreamTransfer, "is_done", lambda self, token: True)
    monkeypatch.setattr(StreamTransfer, "settle", lambda self: None)


def no_wait_for_the_parameters(monkeypatch):
    monkeypatch.setattr(StreamTransfer, "join", lambda self: None)


def no_wait_before_it_is_added_to(monkeypatch):
    """The gradients in the arena are read on another stream than writes them."""

    def add(self, arena, gradient):
        self._after_current(self._to_device)
        with self._runtime.stream(self._to_device):
            total = arena.to(self._device, non_blocking=True).add_(gradient)
            arena.copy_(total, non_blocking=True)
            return self._mark(gradient)

    monkeypatch.setattr(StreamTransfer, "add", add)


def freed_before_it_is_copied(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


def the_wrong_stream(monkeypatch):
    def fetch(self, parameter, arena):
        with self._runtime.stream(self._to_host):
            parameter.copy_(arena, non_blocking=True)
            parameter.record_stream(self._to_host)

    monkeypatch.setattr(StreamTransfer, "fetch", fetch)


def slow_streams(monkeypatch, current_us, to_host_us, to_device_us):
    init = StreamTransfer.__init__

    def slow(self, *arguments):
        init(self, *arguments)
        for stream, us in ((self._to_host, to_host_us), (self._to_device, to_device_us)):
            torch.ops.standin.slow_down(stream.stream_id, us)

    monkeypatch.setattr(StreamTransfer, "__init__", slow)
    return torch.standin.slow(torch.accelerator.current_stream(), current_us)


FAULTS = [
    (no_wait_for_the_backward_pass, {}, (3000, 0, 0)),
    (no_wait_for_the_gradients, {}, (0, 3000, 0)),
    (no_wait_for_the_parameters, {}, (0, 0, 3000)),
    (no_wait_before_it_is_added_to, {"sharding": "zero2"}, (0, 3000, 0)),
    (freed_before_it_is_copied, {"sharding": "zero2"}, (0, 3000, 0)),
    (the_wrong_stream, {}, (0, 3000, 0)),
]


def accumulated(options):
    """The parameters after steps of two micro-batches each."""
    torch.manual_seed(0)
    model = gpt.GPT(layers=1).to("standin")
    data = gpt.text()
    with closing(plimsoll.torch.AdamW(model.parameters(), lr=1e-2, **options)) as optimizer:
        optimizer.open()
        for step in range(2 * STEPS):
            model.loss(gpt.batch(data, step).to("standin")).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("fault, options, slow", FAULTS, ids=name_of)
def test_faults_are_caught(monkeypatch, quick_again, fault, options, slow):
    """Each change of the copies gives other parameters, or an error: so do mistakes of this kind."""
    right = accumulated(options)
    with slow_streams(monkeypatch, *slow):
        assert same(accumulated(options), right)
        fault(monkeypatch)
        try:
            wrong = accumulated(options)
            torch.standin.synchronize()
        except (PlimsollError, RuntimeError):
            with contextlib.suppress(RuntimeError):
                torch.standin.synchronize()
            return
    assert not same(wrong, right)


def test_no_wait_before_a_save_is_caught(monkeypatch):
    """Weights that the program has just changed on the device are in the state that is saved."""
    model = gpt.GPT(layers=1).to("standin")
    current = torch.accelerator.current_stream()
    to = torch.Tensor.to
    with closing(plimsoll.torch.AdamW(model.parameters(), lr=1e-2)) as optimizer:
        model.loss(gpt.batch(gpt.text(), 0).to("standin")).backward()
        optimizer.step()

        def saved():
            with torch.no_grad(), torch.standin.slow(current, 3000):
                for parameter in model.parameters():
                    parameter.mul_(2)
                optimizer.state_dict()
            torch.standin.synchronize()
            slots = optimizer._shards[0].slots
            return all(torch.equal(p.detach().cpu().view(-1), slot.in_arena) for p, slot in slots.items())

        assert saved()
        monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: to(self, *a, **{**k, "non_blocking": True}))
        assert not saved()


def test_memory_that_cannot_be_pinned():
    model = gpt.GPT().to("standin")
    optimizer = plimsoll.torch.AdamW(model.parameters())
    size = 4096 * -(-4 * sum(p.numel() for p in model.parameters()) // 4096)
    with torch.standin.limit_pinned(2 * size - 1), pytest.raises(PlimsollError) as failure:
        optimizer.open()
    text = str(failure.value)
    assert f"the stand-in's driver cannot pin arena rank0/fp32/gradients of {size} bytes: out of memory" in text
    assert f"(host_register, error 2). This optimizer has pinned {size} bytes before" in text
    assert torch.ops.standin.pinned_bytes() == 0


def test_an_accelerator_whose_driver_pins_nothing_in_place(monkeypatch):
    """Its copies wait. A device without streams is refused."""
    right = accumulated({})
    monkeypatch.delitem(DRIVERS, "standin")
    assert same(accumulated({}), right)
    with pytest.raises(ValueError, match="parameters are on meta: expected cpu, cuda, or another accelerator with streams"):
        transfer_for(torch.device("meta"))


def test_graphs():
    """The device has none, and is not asked for them."""
    transfer = transfer_for(torch.device("standin"))
    assert not transfer.is_capturing()
    transfer.release()


def test_scaled_losses():
    """GradScaler looks for numbers that are not finite on the device."""

    def train(device):
        torch.manual_seed(0)
        model = gpt.GPT(layers=1).to(device)
        scaler, data = torch.amp.GradScaler(device, init_scale=2.0**10), gpt.text()
        with closing(plimsoll.torch.AdamW(model.parameters(), lr=1e-2)) as optimizer:
            for step in range(STEPS):
                loss = model.loss(gpt.batch(data, step).to(device))
                scaler.scale(loss * (float("inf") if step == 1 else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert optimizer.skipped == 1
        return [p.detach().cpu() for p in model.parameters()]

    assert same(train("standin"), train("cpu"))


def test_checkpoints(tmp_path):
    """A checkpoint is loaded while copies of the last step are under way."""

    def trained(model, optimizer, steps):
        for step in steps:
            model.loss(gpt.batch(gpt.text(), step).to("standin")).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = gpt.GPT(layers=1).to("standin")
    with closing(plimsoll.torch.AdamW(model.parameters(), lr=1e-2)) as optimizer:
        trained(model, optimizer, range(2))
        optimizer.save(tmp_path)
        optimizer.saved()
        trained(model, optimizer, range(2, 4))
        first = [p.detach().cpu() for p in model.parameters()]
        trained(model, optimizer, range(4, 5))
        optimizer.load(tmp_path)
        trained(model, optimizer, range(2, 4))
        assert same([p.detach().cpu() for p in model.parameters()], first)
