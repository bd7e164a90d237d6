"""Parameters in channels_last, and optimizers that are opened where autograd is off."""

import pytest
import torch
from torch.nn import functional as F

import plimsoll.torch
from plimsoll.torch import parameter_arena
from plimsoll.torch.transfer import HostTransfer
from test_optimizer import assert_same, network, train

pytestmark = pytest.mark.usefixtures("one_service")


@pytest.fixture(params=["shared", "copied"])
def way(request, monkeypatch):
    """How gradients and parameters reach the arenas. Copies stand for a device such as CUDA."""
    if request.param == "copied":
        monkeypatch.setattr(HostTransfer, "shares", False)
        monkeypatch.setattr(parameter_arena, "_BLOCK_BYTES", 100)
    return request.param


def convolutions(dtype=torch.float32, layout=torch.channels_last):
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5)
    return torch.nn.Sequential(*layers).to(dtype).to(memory_format=layout)


def backward(model, i):
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(4, 3, 8, 8, generator=generator).to(model[0].weight.dtype).to(memory_format=torch.channels_last)
    loss = F.cross_entropy(model(x).float(), torch.randint(5, (4,), generator=generator))
    loss.backward()
    return loss.item()


def strides(model):
    return [p.stride() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"state": "fp32"}, {"max_grad_norm": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_keeps_its_layout(way, dtype, options):
    ours, theirs = convolutions(dtype), convolutions(dtype, torch.contiguous_format)
    before = strides(ours)
    assert before != strides(theirs)
    optimizers = [plimsoll.torch.AdamW(m.parameters(), lr=1e-2, **options) for m in (ours, theirs)]
    losses = [[], []]
    for i in range(5):
        for model, optimizer, of_this in zip((ours, theirs), optimizers, losses):
            of_this.append(backward(model, i))
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 2 == 0)
        assert strides(ours) == before
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if dtype is torch.float32 else 2e-2)
    if dtype is torch.float32:
        assert_same(ours, theirs, 1e-4, 1e-5)
    states = [o.state_dict()["state"] for o in optimizers]
    for i in states[0]:
        torch.testing.assert_close(states[0][i]["exp_avg"], states[1][i]["exp_avg"], rtol=0.1, atol=1e-3)


def test_a_checkpoint_has_the_order_of_the_shape(way, tmp_path):
    """It is loaded into a model of another layout."""
    ours = convolutions()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, model=ours)
    for i in range(3):
        backward(ours, i)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(tmp_path)
    optimizer.saved()
    for layout in (torch.channels_last, torch.contiguous_format):
        torch.manual_seed(1)
        other = convolutions(layout=layout)
        before = strides(other)
        plimsoll.torch.AdamW(other.parameters(), lr=1e-2, model=other).load(tmp_path)
        assert_same(other, ours, 0, 0)
        assert strides(other) == before


def test_weights_in_channels_last_that_the_program_changes(way):
    ours, theirs = convolutions(), convolutions()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for i in range(4):
        for model, its in ((ours, optimizer), (theirs, reference)):
            backward(model, i)
            if i == 2:
                model[0].weight.grad.mul_(0.5)
                with torch.no_grad():
                    model[0].weight.clamp_(-0.1, 0.1)
            its.step()
            its.zero_grad()
    assert_same(ours, theirs)


def test_a_transposed_parameter(way):
    ours, theirs = (torch.nn.Parameter(torch.arange(12.0).view(3, 4).t()) for _ in range(2))
    optimizer, reference = plimsoll.torch.AdamW([ours]), torch.optim.AdamW([theirs])
    for _ in range(3):
        for p, its in ((ours, optimizer), (theirs, reference)):
            (p * torch.arange(12.0).view(4, 3)).sum().backward()
            its.step()
            its.zero_grad()
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == (1, 4)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("first", ["open", "resumed_step", "state_dict", "load_state_dict", "load"])
def test_opened_where_autograd_is_off(way, mode, first, tmp_path):
    ours, theirs = network(), network()
    optimizer, reference = (plimsoll.torch.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs))
    train(theirs, reference, 2)
    reference.save(tmp_path)
    reference.saved()
    with mode():
        if first == "load_state_dict":
            ours.load_state_dict(theirs.state_dict())
            optimizer.load_state_dict(reference.state_dict())
        elif first == "load":
            optimizer.load(tmp_path)
        elif first == "resumed_step":
            assert optimizer.resumed_step == 0
        else:
            optimizer.open()
            assert first == "open" or optimizer.state_dict()["state"] == {}
    if first.startswith("load"):
        assert train(ours, optimizer, 3) == train(theirs, reference, 3)
    else:
        train(ours, optimizer, 3)
        with mode():
            entry = optimizer.state_dict()["state"][0]
        assert not entry["exp_avg"].is_inference() and entry["step"] == 3
    assert all(p.requires_grad and not p.is_inference() for p in ours.parameters())


def test_a_model_that_was_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    with pytest.raises(ValueError, match="group0.parameter0 was made in inference mode, and autograd refuses to train it"):
        optimizer.open()
