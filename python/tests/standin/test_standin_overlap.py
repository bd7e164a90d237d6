"""Steps that overlap with the forward and the backward pass, on a device that punishes mistakes."""

from contextlib import closing

import pytest
import torch
from torch import nn

import gpt
import plimsoll.torch
from plimsoll.torch import gradient_arena
from plimsoll.torch.modes import Async, ZenFlow
from plimsoll.torch.transfer import StreamTransfer
from transfers import PromptTransfer, use_copies

STEPS = 4
OVERLAPS = ("forward", "backward")


@pytest.fixture
def slow_copies(monkeypatch):
    """Parameters come to the device late."""
    init, used = StreamTransfer.__init__, []

    def slow(self, *arguments):
        init(self, *arguments)
        used.append(self._to_device.stream_id)
        torch.ops.standin.slow_down(used[-1], 2000)

    monkeypatch.setattr(StreamTransfer, "__init__", slow)
    yield
    for stream in used:
        torch.ops.standin.slow_down(stream, 0)


def train(model, loss, device, overlap, passes=1, **options):
    """The parameters after some steps. ``loss`` takes the model and the number of the pass."""
    model = model.to(device)
    with closing(plimsoll.torch.AdamW(model.parameters(), lr=1e-2, model=model, overlap=overlap, **options)) as optimizer:
        for step in range(STEPS):
            for i in range(passes):
                loss(model, passes * step + i).backward()
            assert overlap != "backward" or optimizer._overlap.has_begun == (step > 1)  # the first is not seen
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
    return [p.detach().cpu() for p in model.parameters()]


def assert_same(make, loss, overlap="forward", **options):
    """Training on the device, overlapped, has the bits of steps on the CPU that are awaited."""
    torch.manual_seed(0)
    awaited = train(make(), loss, "cpu", None, **options)
    torch.manual_seed(0)
    overlapped = train(make(), loss, "standin", overlap, **options)
    assert all(map(torch.equal, awaited, overlapped))


def gpt_loss(model, step):
    return model.loss(gpt.batch(gpt.text(), step).to(model.head.weight.device))


@pytest.mark.each_choice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_training_has_the_bits_of_the_cpu(slow_copies, dtype, moments):
    assert_same(lambda: gpt.GPT().to(dtype), gpt_loss, moments=moments)


@pytest.mark.each_choice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("passes", [1, 2])
def test_updates_in_the_backward_pass_have_the_bits_of_the_cpu(monkeypatch, slow_copies, dtype, passes):
    monkeypatch.setattr(gradient_arena, "_READY_BYTES", 64)  # the service hears of every gradient at once
    assert_same(lambda: gpt.GPT().to(dtype), gpt_loss, "backward", passes=passes)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_rows_of_an_embedding_that_come_first(slow_copies, overlap):
    assert_same(lambda: gpt.GPT(vocabulary=1 << 14, layers=1), gpt_loss, overlap)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_parameters_that_are_not_contiguous(overlap):
    """They come by way of fresh memory, in which earlier computation may still have its tensors."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 32).t())

        def forward(self, x):
            return x @ self.weight

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Transposed(), Transposed()

        def forward(self, x):
            temporary = torch.ones(32 * 64, device=x.device) + 1
            x = self.first(x * temporary.mean())
            del temporary
            return self.second(x[:, :32])

    def loss(model, step):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        return model(x.to(model.first.weight.device)).square().mean()

    with torch.standin.slow(torch.accelerator.current_stream(), 3000):
        assert_same(Both, loss, overlap)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_modules_on_several_streams(slow_copies, overlap):
    """A parameter that has come for one stream has come for the next one too."""

    def loss(model, step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 32, generator=generator).to(model.weight.device)
        if x.device.type == "cpu":
            return (model(x) + model(2 * x)).square().mean()
        current, side = torch.accelerator.current_stream(), torch.Stream("standin")
        side.wait_stream(current)
        first = model(x)
        with torch.standin.stream(side):
            second = model(2 * x)
        current.wait_stream(side)
        second.record_stream(current)
        return (first + second).square().mean()

    assert_same(lambda: nn.Linear(32, 32), loss, overlap)


def test_parameters_that_another_stream_reads_after_synchronize(slow_copies):
    model = nn.Linear(32, 32).to("standin")
    side = torch.Stream("standin")
    with closing(plimsoll.torch.AdamW(model.parameters(), lr=1e-2, model=model, overlap="forward")) as optimizer:
        for _ in range(STEPS):
            x = torch.ones(1, 32, device="standin")
            side.wait_stream(torch.accelerator.current_stream())
            with torch.standin.stream(side):
                model(x)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        side.wait_stream(torch.accelerator.current_stream())
        with torch.standin.stream(side):
            model(torch.ones(1, 32, device="standin"))
        optimizer.synchronize()
        read = [p.detach().clone() for p in model.parameters()]
        slots = optimizer._shards[0].slots
        assert all(torch.equal(a.cpu().view(-1), slot.in_arena) for a, slot in zip(read, slots.values()))


INEXACT = [
    Async(warm_up_steps=1),
    ZenFlow(select_strategy="step", select_interval=4, update_interval=2, topk_ratio=0.3),
    ZenFlow(select_strategy="step", select_interval=2, update_interval=1, topk_ratio=0.3, overlap_step=False),
    ZenFlow(select_strategy="step", select_interval=4, full_warm_up_rounds=1),
]


@pytest.mark.each_choice
@pytest.mark.parametrize("mode", INEXACT, ids=["async", "zenflow", "zenflow awaited", "zenflow auto"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_overlaps_that_are_not_exact_have_the_bits_of_the_cpu(monkeypatch, slow_copies, mode, max_grad_norm):
    options = dict(lr=1e-2, overlap=mode, max_grad_norm=max_grad_norm)
    found = []
    for device in ("standin", "cpu"):
        if device == "cpu":
            use_copies(monkeypatch, PromptTransfer)
        torch.manual_seed(0)
        model = gpt.GPT(layers=1).to(device)
        with closing(plimsoll.torch.AdamW(model.parameters(), model=model, **options)) as optimizer:
            for step in range(7):
                gpt_loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
        found.append([p.detach().cpu() for p in model.parameters()])
    assert all(map(torch.equal, *found))
