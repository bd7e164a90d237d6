"""The interface of torch.optim.Optimizer, piece by piece."""

import copy
import ctypes
import gc
import os
import pathlib
import pickle
import threading

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import plimsoll.torch
from plimsoll import PlimsollError, ServiceError
from plimsoll.torch import own_pages
from plimsoll.torch.shard import Shard

BOTH_WAYS = True


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4)).to(dtype)


def data(i, rows=8):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(rows, 16, generator=generator), torch.randint(4, (rows,), generator=generator)


def backward(model, i, scale=1.0):
    x, y = data(i)
    loss = F.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)
    (loss * scale).backward()
    return loss.item()


def train(model, optimizer, steps, first=0):
    losses = []
    for i in range(first, first + steps):
        losses.append(backward(model, i))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


OPTIMIZERS = {
    "AdamW": dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "Adam": dict(lr=1e-2, weight_decay=0.1),
    "Adagrad": dict(lr=1e-2, lr_decay=0.01, weight_decay=0.1),
    "SGD": dict(lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD nesterov": dict(lr=1e-2, momentum=0.9, nesterov=True),
    "SGD plain": dict(lr=1e-2),
}


def test_momentum_that_comes_and_goes():
    """Steps without momentum leave what there is of it alone, and a first one after them finds none."""
    model, reference = network(), network()
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=1e-2)
    wanted = torch.optim.SGD(reference.parameters(), lr=1e-2)
    for i, momentum in enumerate([0, 0, 0.9, 0.9, 0, 0, 0.5]):
        optimizer.param_groups[0]["momentum"] = wanted.param_groups[0]["momentum"] = momentum
        train(model, optimizer, 1, i)
        train(reference, wanted, 1, i)
        assert_same(model, reference, 1e-5, 1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_torch(name):
    ours, theirs = network(), network()
    options, name = OPTIMIZERS[name], name.split()[0]
    a = train(ours, getattr(plimsoll.torch, name)(ours.parameters(), **options), 20)
    b = train(theirs, getattr(torch.optim, name)(theirs.parameters(), **options), 20)
    assert a == pytest.approx(b, rel=1e-5)
    assert_same(ours, theirs)


def test_lion_follows_its_paper():
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.Lion(ours.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    moments = [torch.zeros_like(p) for p in theirs.parameters()]
    for i in range(10):
        train(ours, optimizer, 1, i)
        backward(theirs, i)
        with torch.no_grad():
            for p, m in zip(theirs.parameters(), moments):
                p.mul_(1 - 1e-3 * 0.1).sub_(1e-3 * torch.sign(0.9 * m + 0.1 * p.grad))
                m.mul_(0.99).add_(p.grad, alpha=0.01)
                p.grad = None
    assert_same(ours, theirs)


def test_groups_and_schedulers():
    def make(module, model):
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 1e-3},
        ]
        optimizer = module.AdamW(groups, lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=15)

    ours, theirs = network(), network()
    for model, module in ((ours, plimsoll.torch), (theirs, torch.optim)):
        optimizer, scheduler = make(module, model)
        for i in range(15):
            train(model, optimizer, 1, i)
            scheduler.step()
    assert_same(ours, theirs)


def test_groups_of_a_type_each():
    # A part has but the groups of its own parameters.
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).bfloat16(), torch.nn.Linear(8, 8).bfloat16()])
    optimizer = plimsoll.torch.SGD([{"params": m.parameters(), "lr": 10.0**-i} for i, m in enumerate(model)])
    before = [m.weight.detach().clone().float() for m in model]
    for m in model:
        for p in m.parameters():
            p.grad = torch.ones_like(p)
    optimizer.step()
    for i, (m, b) in enumerate(zip(model, before)):
        torch.testing.assert_close(m.weight.detach().float(), b - 10.0**-i, rtol=1e-2, atol=1e-3)


def test_two_optimizers_of_a_program(service):
    generator, critic = network(), network()
    undisturbed = network()
    train(undisturbed, plimsoll.torch.SGD(undisturbed.parameters(), lr=0.1), 4)
    first = plimsoll.torch.SGD(generator.parameters(), lr=0.1, socket=service.socket)
    train(generator, first, 2)
    with pytest.raises(RuntimeError, match="give each optimizer of a program a name"):
        plimsoll.torch.SGD(critic.parameters(), lr=0.1, socket=service.socket).open()
    second = plimsoll.torch.AdamW(critic.parameters(), lr=0.1, socket=service.socket, name="critic")
    train(critic, second, 3)
    train(generator, first, 2, 2)
    assert_same(generator, undisturbed, 0, 0)
    second.close()
    again = plimsoll.torch.AdamW(critic.parameters(), lr=0.1, socket=service.socket, name="critic")
    assert again.resumed_step == 3
    with pytest.raises(ValueError, match="name is 'the critic': expected"):
        plimsoll.torch.SGD(critic.parameters(), name="the critic")


def of_two_parts():
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).bfloat16()])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = plimsoll.torch.SGD(model.parameters())
    optimizer.step()
    return model, optimizer


def test_a_step_that_is_interrupted_between_parts_is_made():
    model, optimizer = of_two_parts()
    session = optimizer._shards[1].session
    begin = session.begin

    def interrupted(*_, **__):
        session.begin = begin
        raise KeyboardInterrupt

    session.begin = interrupted
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert [p.session.step for p in optimizer._shards] == [2, 2]
    assert all((p != b).any() for p, b in zip(model.parameters(), before))
    optimizer.step()


def test_a_step_that_fails_between_parts_is_noticed(monkeypatch):
    _, optimizer = of_two_parts()

    def fail(*_, **__):
        raise ValueError

    with monkeypatch.context() as m:
        m.setattr(optimizer._shards[1].session, "begin", fail)
        with pytest.raises(ValueError):
            optimizer.step()
    with pytest.raises(RuntimeError, match="at different steps \\(bf16: 2, fp32: 1\\).*load the last checkpoint"):
        optimizer.step()


def test_a_state_that_another_thread_asks_for():
    """It is that of one step."""
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    found, over = set(), threading.Event()

    def ask():
        while not over.is_set():
            entries = optimizer.state_dict()["state"]
            found.add((len(entries), len({int(entry["step"]) for entry in entries.values()})))

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    for _ in range(200):
        optimizer.step()
    over.set()
    for thread in asking:
        thread.join()
    assert found == {(len(list(model.parameters())), 1)}


def test_closure():
    ours, theirs = network(), network()
    for model, optimizer in (
        (ours, plimsoll.torch.AdamW(ours.parameters(), lr=1e-2)),
        (theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2)),
    ):

        def closure():
            optimizer.zero_grad()
            return backward(model, 7)

        first = optimizer.step(closure)
        assert optimizer.step(closure) < first
    assert_same(ours, theirs)


def test_gradients_accumulate_in_place():
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    for i in range(9):
        # The number of backward passes changes: what was expected is wrong at times.
        for j in range(1 + i // 3):
            backward(ours, 10 * i + j), backward(theirs, 10 * i + j)
            if j == 0:
                addresses = [p.grad.data_ptr() for p in ours.parameters()]
        assert addresses == [p.grad.data_ptr() for p in ours.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimizer.step(), reference.step()
        assert optimizer.last_grad_norm == pytest.approx(norm.item(), rel=1e-5)
        optimizer.zero_grad(set_to_none=i % 2 == 0), reference.zero_grad()
    assert_same(ours, theirs, rtol=1e-4)


def test_gradients_may_be_changed_until_the_step():
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=1e9)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    for i in range(5):
        for model in (ours, theirs):
            backward(model, i)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            model[2].weight.grad = model[2].weight.grad * 0.5  # another tensor
        assert norm > 0.05
        optimizer.step(), reference.step()
        assert optimizer.last_grad_norm < 0.05
        optimizer.zero_grad(), reference.zero_grad()
    assert_same(ours, theirs)


def test_gradients_in_one_buffer():
    """As of programs that average or scale all gradients at once."""
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=1e9)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    buffers = []
    for model in (ours, theirs):
        buffers.append(torch.zeros(sum(p.numel() for p in model.parameters())))
        for p, values in zip(model.parameters(), buffers[-1].split([p.numel() for p in model.parameters()])):
            p.grad = values.view_as(p)
    for i in range(5):
        for model, buffer in zip((ours, theirs), buffers):
            backward(model, i)
            buffer.mul_(0.1)
        optimizer.step(), reference.step()
        assert optimizer.last_grad_norm == pytest.approx(buffers[1].norm().item(), rel=1e-5)
        for buffer in buffers:
            buffer.zero_() if i != 3 else None  # and accumulates
    assert_same(ours, theirs)


def test_gradients_of_another_type():
    ours, theirs = network().bfloat16(), network().bfloat16()
    if not hasattr(ours[0].weight, "grad_dtype"):
        pytest.skip("no grad_dtype in this torch")
    for p in ours.parameters():
        p.grad_dtype = torch.float32
    optimizers = [plimsoll.torch.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    for i in range(5):
        for model, optimizer in zip((ours, theirs), optimizers):
            for p in model.parameters():
                (p * torch.full_like(p, i / 3)).sum().backward()
            optimizer.step(), optimizer.zero_grad()
    assert_same(ours, theirs)


def test_parameters_in_the_same_memory_are_refused():
    flat = torch.zeros(9)
    for parameters, message in (
        ((flat, flat), "parameters first and second are in the same memory"),
        ((flat[4:], flat[:5]), "parameters second and first are in the same memory"),
        ((flat[::2], flat[8:]), "parameters first and second are in the same memory"),
        ((flat, flat[:1].expand(3)), "parameters first and second are in the same memory"),
        ((torch.zeros(3), flat[:1].expand(3)), "parameter second has several elements at one address"),
    ):
        named = [(name, torch.nn.Parameter(tensor)) for name, tensor in zip(("first", "second"), parameters)]
        optimizer = plimsoll.torch.AdamW([p for _, p in named], named_parameters=named)
        with pytest.raises(ValueError, match=message):
            optimizer.open()
    halves = [torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])]
    plimsoll.torch.AdamW(halves).open()


def test_not_finite_gradients_skip_the_step():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), max_grad_norm=1.0)
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model[0].bias.grad[3] = float("nan")
    optimizer.step()
    assert optimizer.skipped == 1 and optimizer.last_grad_norm != optimizer.last_grad_norm
    assert_same(model, before, 0, 0)
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert optimizer.skipped == 1


# torch does not unscale fp16 gradients in place.
@pytest.mark.parametrize("dtype, unscale", [(torch.float32, False), (torch.float32, True), (torch.float16, False)])
def test_gradient_scaler(dtype, unscale):
    ours, theirs = network(dtype), network()
    theirs.load_state_dict({n: t.float() for n, t in ours.state_dict().items()})
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.5)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for i in range(10):
        # Overflows once: the scale is halved, and the step is left out.
        scale = scaler.scale(torch.ones(())).item()
        backward(ours, i, scale=float("inf") if i == 4 else scale)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if i != 4:
            backward(theirs, i)
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            reference.step()
            reference.zero_grad()
    assert optimizer.skipped == 1 and scaler.get_scale() == 2.0**7
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype is torch.float32 else dict(rtol=2e-2, atol=5e-3)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p.float(), q, **tolerance)


def bits(model, optimizer):
    """Everything that a step may change, bit by bit."""
    state = optimizer.state_dict()["state"]
    found = {f"weight {i}": p for i, p in enumerate(model.parameters())}
    found.update({f"{name} {i}": t for i, entry in state.items() for name, t in entry.items()})
    return {
        name: (t.dtype, t.contiguous().view(torch.uint8).tolist() if t.ndim else t.item())
        for name, t in copy.deepcopy(found).items()
    }


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"moments": "bf16"}])
def test_an_overflow_leaves_no_trace(options):
    """fp16 gradients overflow because the scale is too large: at first, and again when it has grown."""
    model = network(torch.float16)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
    optimizer.open()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_factor=4.0, growth_interval=3)
    made, skipped = [], []
    for i in range(30):
        scale, before = scaler.get_scale(), bits(model, optimizer)
        assert scaler.scale(torch.ones(())).item() == scale
        backward(model, i, scale)
        infinite = not all(p.grad.isfinite().all() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = bits(model, optimizer)
        if infinite:
            skipped.append(i)
            assert after == before and scaler.get_scale() == scale / 2
        else:
            made.append((i, scale))
            assert after != before and scaler.get_scale() in (scale, 4 * scale)
        assert optimizer.skipped == len(skipped) and optimizer._shards[0].session.step == len(made)
    assert {"weight 0", "step 0", "exp_avg 0", "exp_avg_sq 0", "master_weights 0"} <= set(after)
    assert skipped[0] == 0 and skipped[-1] > made[0][0] and len(made) > 10, (made, skipped)

    # A run in which the steps that overflowed never were ends with the same bits.
    other = network(torch.float16)
    again = plimsoll.torch.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
    for i, scale in made:
        scaler.scale(torch.ones(()))
        scaler.update(scale)
        backward(other, i, scale)
        scaler.step(again)
        scaler.update()
        again.zero_grad()
    assert again.skipped == 0 and bits(other, again) == bits(model, optimizer)


def test_a_step_that_fails_leaves_the_scale():
    """GradScaler multiplies its scale with one that an optimizer has already."""
    ours, theirs = network(torch.float16), network(torch.float16)
    for model, fails in (ours, True), (theirs, False):
        optimizer = plimsoll.torch.AdamW(model.parameters(), eps=1e-3, max_grad_norm=0.1, missing_gradients="refuse")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i in range(3):
            backward(model, i, scaler.scale(torch.ones(())).item())
            if fails:
                gradient, model[0].bias.grad = model[0].bias.grad, None
                with pytest.raises(RuntimeError, match="have no gradient"):
                    scaler.step(optimizer)
                model[0].bias.grad = gradient
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(ours, theirs, 0, 0)


def test_missing_gradients():
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(4, 4)})
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, model=model, missing_gradients="refuse")
    optimizer.step()  # as torch: nothing happens without a gradient
    model["used"](torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="2 parameters have no gradient, unused.bias among them"):
        optimizer.step()
    optimizer.close()

    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, missing_gradients="zero")
    model.zero_grad()
    before = model["unused"].weight.detach().clone()
    for _ in range(2):
        model["used"](torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model["unused"].weight.detach(), before * 0.95**2)
    # A gradient of an earlier step must not come back.
    model["unused"].weight.grad = torch.ones_like(before)
    optimizer.step()
    optimizer.zero_grad()
    model["used"](torch.randn(2, 4)).sum().backward()
    moment = optimizer.state_dict()["state"][2]["exp_avg"].clone()
    optimizer.step()
    torch.testing.assert_close(optimizer.state_dict()["state"][2]["exp_avg"], moment * 0.9)


def test_a_gradient_that_was_discarded_counts_as_zero():
    """Also where more backward passes were expected than there were when it was discarded."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(4, 4)})
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=1.0, missing_gradients="zero")
    optimizer.open()

    def accumulate(*names):
        sum(model[n](torch.ones(2, 4)).sum() for n in names).backward()

    accumulate("used", "unused"), accumulate("used", "unused")
    optimizer.step(), optimizer.zero_grad()
    accumulate("used")
    optimizer.step(), optimizer.zero_grad()
    accumulate("used", "unused")
    optimizer.zero_grad()
    before = model["unused"].weight.detach().clone()
    accumulate("used")
    optimizer.step()
    assert torch.equal(model["unused"].weight, before)


def test_frozen_and_empty_parameters_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0)))
    frozen = model[0].weight.clone()
    optimizer = plimsoll.torch.AdamW([p for p in model.parameters()], lr=0.1)
    before = model[2].weight.clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, frozen) and not torch.equal(model[2].weight, before)


def test_parameters_that_are_trained_later_need_a_new_optimizer():
    ours = network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2)
    ours[0].requires_grad_(False)
    train(ours, optimizer, 3)
    ours[0].requires_grad_(True)
    backward(ours, 3)
    with pytest.raises(RuntimeError, match="2 parameters have a gradient and were frozen .* group0.parameter0 among them"):
        optimizer.step()
    state = optimizer.state_dict()
    optimizer.close()
    ours.zero_grad()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2)
    optimizer.load_state_dict(state)
    before = ours[0].weight.detach().clone()
    train(ours, optimizer, 3, 3)
    assert optimizer.resumed_step == 3 and (ours[0].weight != before).any()


def test_groups_are_added_before_the_first_step_only(way):
    model = network()
    optimizer = plimsoll.torch.AdamW(model[0].parameters())
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-4})
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="add all groups before the first step"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    if way == "shared":
        with pytest.raises(RuntimeError, match="has got other memory"):
            model.double().float()
            train(model, optimizer, 1)


def test_a_parameter_with_another_shape_is_refused():
    """As transformers' resize_token_embeddings makes it: the same parameter with more rows."""
    model = torch.nn.Embedding(10, 4)
    optimizer = plimsoll.torch.AdamW(model.parameters())
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.weight.data = torch.zeros(12, 4)
    with pytest.raises(RuntimeError, match=r"parameter0 has the shape \[12, 4\], but had \[10, 4\] when the optimizer was opened"):
        model(torch.arange(12)).sum().backward()
        optimizer.step()


def test_bad_arguments_are_explained():
    parameters = list(network().parameters())
    for options, message in (
        (dict(state="spilt"), "state is 'spilt': expected one of 'split', 'fp32', 'split24'"),
        (dict(moments="fp8"), "moments is 'fp8'"),
        (dict(sharding="zero3"), "sharding is 'zero3'"),
        (dict(max_grad_norm=0), "max_grad_norm is 0"),
        (dict(missing_gradients="skip"), "missing_gradients is 'skip'"),
    ):
        with pytest.raises(ValueError, match=message):
            plimsoll.torch.AdamW(parameters, **options)
    with pytest.raises(ValueError, match="there is no process group"):
        plimsoll.torch.AdamW(parameters, sharding="zero1").open()
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = plimsoll.torch.AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="make it so \\(sparse=False\\)"):
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_comes_from_torch_and_goes_back(name):
    options, name = OPTIMIZERS[name], name.split()[0]
    ours, theirs = network(), network()
    reference = getattr(torch.optim, name)(theirs.parameters(), **options)
    train(theirs, reference, 5)
    # Come,
    ours.load_state_dict(theirs.state_dict())
    optimizer = getattr(plimsoll.torch, name)(ours.parameters(), lr=5.0)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    train(ours, optimizer, 5, 5), train(theirs, reference, 5, 5)
    assert_same(ours, theirs)
    # and leave.
    left = network()
    left.load_state_dict(ours.state_dict())
    successor = getattr(torch.optim, name)(left.parameters(), lr=5.0)
    successor.load_state_dict(optimizer.state_dict())
    train(left, successor, 5, 10), train(theirs, reference, 5, 10)
    assert_same(left, theirs)


@pytest.mark.parametrize("options", [{}, {"state": "fp32"}, {"state": "split24"}, {"moments": "bf16"}, {"moments": "int8"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_own_state_is_exact(dtype, options):
    model = network(dtype)
    model[0] = torch.nn.Sequential(torch.nn.Linear(16, 512), torch.nn.Tanh(), torch.nn.Linear(512, 40)).to(dtype)
    model[0].weight = model[0][0].weight
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, **options)
    train(model, optimizer, 4)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data = p.data.clone()
    copied = plimsoll.torch.AdamW(other.parameters(), lr=1e-2, **options)
    copied.load_state_dict(optimizer.state_dict())
    if options.get("moments") != "int8":  # moments in a byte are rounded once more
        assert train(model, optimizer, 4, 4) == train(other, copied, 4, 4)
        assert_same(model, other, 0, 0)
        assert str(optimizer.state_dict()) == str(copied.state_dict())
    else:
        torch.testing.assert_close(optimizer.state_dict()["state"], copied.state_dict()["state"], rtol=0.1, atol=1e-3)


def test_other_weights_are_not_overwritten_by_masters():
    model, other = network(torch.bfloat16), network(torch.bfloat16)
    optimizer = plimsoll.torch.AdamW(model.parameters())
    train(model, optimizer, 2)
    with torch.no_grad():
        other[0].weight.copy_(torch.randn(40, 16))
    wanted = other[0].weight.detach().clone()
    copied = plimsoll.torch.AdamW(other.parameters())
    copied.load_state_dict(optimizer.state_dict())
    assert torch.equal(other[0].weight, wanted)


def test_empty_state():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())  # what accelerate does
    assert optimizer._shards is None and optimizer.state_dict()["state"] == {}
    train(model, optimizer, 2)
    optimizer.load_state_dict(torch.optim.AdamW(network().parameters()).state_dict())
    assert optimizer.state_dict()["state"] == {}


def test_wrong_state_is_explained():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    state["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0.bias has the shape \(3,\): expected \(40,\)"):
        optimizer.load_state_dict(state)


def test_a_state_that_does_not_fit_changes_nothing():
    model = network(torch.bfloat16)
    optimizer = plimsoll.torch.AdamW(model.parameters())
    train(model, optimizer, 2)
    before, groups = bits(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    last = max(optimizer.state_dict()["state"])
    for change, message in (
        (
            lambda entry: entry.update(exp_avg_sq=torch.zeros(99)),
            r"exp_avg_sq of parameter group0.parameter3 has the shape \(99,\)",
        ),
        (lambda entry: entry.update(master_weights=torch.zeros(99)), r"master_weights of .* has the shape \(99,\)"),
        (
            lambda entry: entry.pop("exp_avg_sq"),
            "has step, exp_avg, master_weights, but no exp_avg_sq: it is of another optimizer",
        ),
    ):
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0]["lr"] = 7.0
        for entry in state["state"].values():
            entry["exp_avg"].fill_(5.0)
        change(state["state"][last])
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert bits(model, optimizer) == before and optimizer.state_dict()["param_groups"] == groups
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, other, 1)
    with pytest.raises(ValueError, match="has momentum_buffer, but no exp_avg or exp_avg_sq or step"):
        optimizer.load_state_dict(other.state_dict())


def test_frozen_parameters_may_be_at_another_step():
    model = network()
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, reference, 3)
    model[0].requires_grad_(False)
    model.zero_grad()
    train(model, reference, 2)
    ours = copy.deepcopy(model)
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.resumed_step == 5
    train(ours, optimizer, 3), train(model, reference, 3)
    assert_same(ours, model)


def test_model_outlives_its_optimizer(monkeypatch):
    monkeypatch.setenv("PLIMSOLL_JOB", "outlived")  # whose service no other optimizer of this process has
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    train(model, optimizer, 1)
    process = optimizer._shards.service.process
    del optimizer
    gc.collect()
    process.wait(120)
    backward(model, 0)
    successor = plimsoll.torch.AdamW(model.parameters())
    train(model, successor, 1)
    assert successor.resumed_step == 0


@pytest.mark.parametrize("begin", ["open", "load"])
def test_a_state_that_was_not_begun_is_given_back(service, tmp_path, monkeypatch, begin):
    """It would take its memory until the service ends, and keep the job from beginning in another way."""
    model = torch.nn.Sequential(network(), network(torch.bfloat16))

    def refuse(shard, *arguments):
        if shard.name == "fp32":
            raise ServiceError("does_not_fit", "open")
        opens(shard, *arguments)

    opens = Shard.open
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, socket=service.socket)
    with monkeypatch.context() as patched:
        if begin == "open":
            patched.setattr(Shard, "open", refuse)
        with pytest.raises(ServiceError):
            optimizer.open() if begin == "open" else optimizer.load(tmp_path)
    plimsoll.torch.AdamW(model.parameters(), model=model, socket=service.socket, moments="bf16").open()


def test_optimizers_are_not_copied():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    for do in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="AdamW of plimsoll is not copied or pickled: .* state_dict"):
            do(optimizer)
        train(model, optimizer, 1)
    copied = copy.deepcopy(model)
    again = plimsoll.torch.AdamW(copied.parameters())
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert train(copied, again, 2, 1) == train(model, optimizer, 2, 1)


@pytest.mark.parametrize("closed", [False, True])
def test_a_model_holds_nothing_of_optimizers_that_are_gone(closed):
    def held():
        gc.collect()
        files = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.islink(f.path)]
        maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:" in f for f in files), sum("memfd:" in m for m in maps)

    model, found = network(), []
    for _ in range(4):
        optimizer = plimsoll.torch.AdamW(model.parameters())
        train(model, optimizer, 1)
        optimizer.state_dict()
        if closed:
            optimizer.close()
        del optimizer
        found.append((*held(), len(model[0].weight._post_accumulate_grad_hooks)))
    assert found == found[:1] * 4 and found[0][2] == 0


def test_autograd_notices_a_step():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    loss = model(torch.randn(2, 16)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_state_of_which_a_part_could_not_be_loaded_is_not_used(tmp_path):
    """Also where all parts are at the step of the checkpoint, and where weights are written since."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 40).half(), torch.nn.Linear(40, 4).bfloat16())
    optimizer = plimsoll.torch.AdamW(model.parameters(), state="fp32")

    def step():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    optimizer.open()
    step()
    optimizer.save(tmp_path)
    optimizer.saved()
    (file,) = tmp_path.glob("step-*/*fp16.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    with pytest.raises(ServiceError, match="fp16.safetensors: damaged"):
        optimizer.load(tmp_path)
    with torch.no_grad():
        model[1].weight.add_(1)
    for use in optimizer.state_dict, step, lambda: optimizer.save(tmp_path / "other"):
        with pytest.raises(PlimsollError, match="was loaded, but the others' was not: load again"):
            use()
    file.write_bytes(whole)
    optimizer.load(tmp_path)
    step()


def test_weights_that_are_tied_after_the_constructor():
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20, bias=False))
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, missing_gradients="refuse")
    model[1].weight = model[0].weight
    model(torch.arange(20)).sum().backward()
    with pytest.raises(RuntimeError, match="weight that was tied to another, or replaced, after the optimizer was made never gets one"):
        optimizer.step()


FLAGS = ["maximize", "foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay"]


@pytest.mark.parametrize("name, options", [("AdamW", {}), ("Adam", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})])
def test_flags_that_a_loaded_group_lacks_are_those_of_torch(name, options):
    """As in a state that an older release of torch has saved."""
    loaded = []
    for module in (torch.optim, plimsoll.torch):
        model = network()
        optimizer = getattr(module, name)(model.parameters(), maximize=True, **options)
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        for flag in FLAGS:
            saved["param_groups"][0].pop(flag, None)
        optimizer.load_state_dict(saved)
        loaded.append({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
    assert loaded[0] == loaded[1] and loaded[0]["maximize"] is False


def test_a_save_ends_in_the_folder_that_it_began_in(tmp_path, monkeypatch):
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    train(model, optimizer, 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    optimizer.save("checkpoints")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert optimizer.saved() == 1
    assert [p.name for p in (tmp_path / "checkpoints").glob("*")] == ["step-00000001"]


def test_a_model_keeps_its_parameters_where_a_checkpoint_is_damaged(tmp_path):
    saved = network()
    optimizer = plimsoll.torch.AdamW(saved.parameters())
    train(saved, optimizer, 2)
    optimizer.save(tmp_path)
    assert optimizer.saved() == 2
    (file,) = tmp_path.glob("step-*/*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4))
    before = copy.deepcopy(model)
    successor = plimsoll.torch.AdamW(model.parameters())
    with pytest.raises(ServiceError, match="only partly loaded"):
        successor.load(tmp_path)
    assert_same(model, before, rtol=0, atol=0)

    file.write_bytes(whole)
    successor.load(tmp_path)
    assert successor.resumed_step == 2
    assert_same(model, saved, rtol=0, atol=0)
    assert train(model, successor, 2, first=2) == train(saved, optimizer, 2, first=2)


@pytest.fixture
def wide(way):
    """Makes models with more gradients than wait for each other before the service is told of them: 4 MiB, or 64 bytes."""
    width = 1100 if way == "shared" else 40

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 4))

    return make


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}])
def test_gradients_that_a_scaler_has_unscaled(wide, options):
    """Its operator changes gradients and counts no version of them."""
    ours, theirs = wide(), wide()
    optimizer = plimsoll.torch.SGD(ours.parameters(), lr=1.0, **options)
    reference = torch.optim.SGD(theirs.parameters(), lr=1.0)
    optimizer.open()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12) for _ in range(2)]
    for i in range(4):
        for model, its, scaler in zip((ours, theirs), (optimizer, reference), scalers):
            backward(model, i, scale=scaler.scale(torch.ones(())).item())
            scaler.unscale_(its)
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            if model is theirs:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.get("max_grad_norm", torch.inf))
            scaler.step(its), scaler.update(), its.zero_grad()
        assert optimizer.last_grad_norm == pytest.approx(norm, rel=1e-4)  # torch adds up in fp32
    assert_same(ours, theirs)


def scale_data(tensor):
    tensor.data.mul_(0.5)


def scale_numpy(tensor):
    tensor.detach().numpy()[...] *= 0.5


def scale_address(tensor):
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
    np.ctypeslib.as_array(pointer, (tensor.numel(),))[:] *= 0.5


@pytest.mark.parametrize("scale", [scale_data, scale_numpy, scale_address])
@pytest.mark.parametrize("gradients", ["backward", "step"])
def test_gradients_written_behind_the_back_of_autograd(wide, gradients, scale):
    ours, theirs = wide(), wide()
    optimizer = plimsoll.torch.SGD(ours.parameters(), lr=1.0, max_grad_norm=1e-2, gradients=gradients)
    reference = torch.optim.SGD(theirs.parameters(), lr=1.0)
    optimizer.open()
    for i in range(3):
        for model in (ours, theirs):
            backward(model, i)
            for p in model.parameters():
                scale(p.grad)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e-2)
        if gradients == "backward":
            before = copy.deepcopy(ours)
            with pytest.raises(RuntimeError, match="among them, in a way that autograd does not count.*gradients='step'"):
                optimizer.step()
            assert_same(ours, before, 0, 0)
            return
        optimizer.step(), reference.step()
        assert optimizer.last_grad_norm == pytest.approx(norm.item(), rel=1e-4)
        optimizer.zero_grad(), reference.zero_grad()
    assert_same(ours, theirs)


def test_gradients_that_are_taken_in_the_step_are_taken_again_when_it_is_repeated(wide):
    model = wide()
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=1.0, max_grad_norm=1e9, gradients="step")
    optimizer.open()
    backward(model, 0)
    session = optimizer._shards[0].session
    norm = session.norm
    session.norm = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    session.norm = norm
    for p in model.parameters():
        p.grad.data.mul_(0.5)
    wanted = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_written_behind_the_back_of_autograd(way, dtype):
    """In shared memory the step goes on from them. Where they are copied it would overwrite them, and is refused."""
    ours, theirs = network(dtype), network(dtype)
    optimizers = [plimsoll.torch.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    for model, optimizer in zip((ours, theirs), optimizers):
        train(model, optimizer, 2)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        p.data.mul_(0.5)
        with torch.no_grad():
            q.mul_(0.5)
    if way == "copied":
        backward(ours, 2)
        for use in optimizers[0].step, optimizers[0].state_dict:
            with pytest.raises(RuntimeError, match="4 parameters were written since the last step, group0.parameter0 among them"):
                use()
        for p in ours.parameters():
            torch.autograd.graph.increment_version(p)
        optimizers[0].zero_grad()
    assert train(ours, optimizers[0], 3, 2) == train(theirs, optimizers[1], 3, 2)
    assert bits(ours, optimizers[0]) == bits(theirs, optimizers[1])


def test_gradients_of_any_layout_are_compared(monkeypatch):
    """Expanded, transposed, and of a single element."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((40, 30), (), (1,), (3, 50))]
    optimizer = plimsoll.torch.SGD(parameters, lr=1.0)
    optimizer.open()
    for _ in range(2):
        parameters[0].grad = torch.randn(30, 40).t()
        parameters[1].grad, parameters[2].grad = torch.ones(()), torch.ones(1)
        parameters[3].grad = torch.randn(50).expand(3, 50)
        wanted = [p.detach() - p.grad for p in parameters]
        optimizer.step()
        for p, w in zip(parameters, wanted):
            torch.testing.assert_close(p.detach(), w)


@pytest.mark.parametrize("change", ["other", "order", "removed", "emptied", "moved"])
def test_parameter_groups_that_change_after_opening(change, tmp_path):
    """As schemes do that train some layers at a time."""
    model = network()
    optimizer = plimsoll.torch.SGD([{"params": model[0].parameters()}, {"params": [model[2].weight]}], lr=0.1)
    backward(model, 0)
    optimizer.step()
    before = copy.deepcopy(model)
    groups = optimizer.param_groups
    if change == "other":
        groups[1]["params"] = list(model[2].parameters())
    elif change == "order":
        groups[0]["params"].reverse()
    elif change == "removed":
        groups.pop()
    elif change == "emptied":
        groups[0]["params"].clear()
    else:
        groups[1]["params"].append(groups[0]["params"].pop())
    message = "there are 1 parameter groups; there were 2" if change == "removed" else "has other parameters than when"
    for use in optimizer.step, optimizer.state_dict, lambda: optimizer.save(tmp_path):
        with pytest.raises(RuntimeError, match=message):
            use()
    assert_same(model, before, 0, 0)


@pytest.fixture(params=["private", "no pagemap", "hugetlb"])
def pages(request, monkeypatch):
    """Ways to learn of weights that the program has written in shared memory."""

    def refuse(*_):
        raise PermissionError

    if request.param == "no pagemap":
        monkeypatch.setattr(own_pages.OwnPages, "_are_own", refuse)
    elif request.param == "hugetlb":
        monkeypatch.setattr(own_pages, "_can_be_copied", lambda arena: False)
    return request.param


@pytest.mark.parametrize("options", [{}, {"state": "fp32"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_weights_that_are_set_are_the_weights(pages, dtype, options):
    model = network(dtype)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, **options)
    train(model, optimizer, 3)
    weight = torch.randn(40, 16).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(weight)
        model[2].bias.fill_(1.0)
    masters = [entry["master_weights"] for entry in optimizer.state_dict()["state"].values()]
    assert torch.equal(masters[0], weight.float()) and (masters[3] == 1).all()


def test_weights_that_come_back_keep_their_masters(pages, way):
    """As where averages of weights take their place for an evaluation."""
    if pages == "hugetlb" and way == "shared":
        pytest.skip("what was there before is not known, and weights that were written are their masters")
    ours, theirs = network(torch.bfloat16), network(torch.bfloat16)
    optimizers = [plimsoll.torch.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    for i in range(4):
        assert train(ours, optimizers[0], 1, i) == train(theirs, optimizers[1], 1, i)
        backup = [p.detach().clone() for p in ours.parameters()]
        for evaluated in (True, False):
            for p, b in zip(ours.parameters(), backup):
                with torch.no_grad():
                    p.copy_(b * 0.9 if evaluated else b)
    assert bits(ours, optimizers[0]) == bits(theirs, optimizers[1])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_some_weights_are_set_and_all_others_keep_their_masters(pages, way, share):
    """Over many pages, and also where the same values are written."""
    if pages == "hugetlb" and way == "shared":
        pytest.skip("what was there before is not known, and weights that were written are their masters")
    torch.manual_seed(1)
    w = torch.nn.Parameter(torch.randn(300, 100).bfloat16())
    v = torch.nn.Parameter(torch.randn(70).bfloat16())
    optimizer = plimsoll.torch.AdamW([w, v], lr=1e-2)
    for i in range(4):
        w.grad, v.grad = torch.randn(300, 100).bfloat16(), torch.randn(70).bfloat16()
        optimizer.step()
        before = optimizer.state_dict()["state"][0]["master_weights"]
        rows = torch.rand(300) < share
        new = torch.where(rows[:, None], torch.randn(300, 100).bfloat16(), w.detach())
        with torch.no_grad():
            same = new == w
            w.copy_(new)
        after = optimizer.state_dict()["state"][0]["master_weights"]
        assert torch.equal(after, torch.where(same, before, new.float()))


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("options", [{}, {"state": "fp32"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_model_and_optimizer_are_loaded_in_any_order(first, dtype, options):
    model = network(dtype)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, **options)
    train(model, optimizer, 4)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(7)
    other = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4)).to(dtype)
    again = plimsoll.torch.AdamW(other.parameters(), lr=1e-2, **options)
    train(other, again, 2)
    for what in (first, "optimizer" if first == "model" else "model"):
        other.load_state_dict(saved[0]) if what == "model" else again.load_state_dict(saved[1])
    assert train(model, optimizer, 4, 4) == train(other, again, 4, 4)
    assert bits(model, optimizer) == bits(other, again)


def test_masters_that_were_loaded_are_not_for_weights_of_later(tmp_path):
    model = network(torch.bfloat16)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, 2, 2)
    optimizer.load_state_dict(state)  # the model has other weights
    assert any(slot.loaded is not None for slot in optimizer._shards[0].slots.values())
    train(model, optimizer, 1, 4)
    assert all(slot.loaded is None for slot in optimizer._shards[0].slots.values())
    model.load_state_dict(weights)
    for entry, p in zip(optimizer.state_dict()["state"].values(), model.parameters()):
        changed = entry["master_weights"] == p.float()
        assert changed.float().mean() > 0.9


def test_pages_that_the_program_has_locked_are_refused(way):
    """Locked pages of its own would go on showing the weights of before."""
    if way == "copied":
        pytest.skip("has no pages of its own")
    model = torch.nn.Linear(100, 100).bfloat16()
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=0.1)
    optimizer.open()
    page = model.weight.data_ptr() & -4096
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(page), 4096):
        pytest.skip(f"mlock: {os.strerror(ctypes.get_errno())}")
    model(torch.ones(2, 100).bfloat16()).sum().backward()
    with pytest.raises(PlimsollError, match="memory was locked \\(mlock, mlockall\\)"):
        optimizer.step()
    libc.munlock(ctypes.c_void_p(page), 4096)
    before = model.weight.detach().clone()
    optimizer.step()
    assert (model.weight != before).any()


def test_weights_that_are_written_while_a_step_is_made_are_noticed(way):
    if way == "copied":
        pytest.skip("has no pages of its own")
    model = torch.nn.Linear(100, 100).bfloat16()
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=10.0)
    optimizer.open()
    session = optimizer._shards[0].session
    begin = session.begin

    def write(*arguments, **options):
        model.weight.data.fill_(1.0)
        return begin(*arguments, **options)

    session.begin = write
    model(torch.ones(2, 100).bfloat16()).sum().backward()
    with pytest.raises(PlimsollError, match="do not show the step"):
        optimizer.step()


@pytest.mark.parametrize("own_service", [True, False])
def test_a_closed_optimizer_is_not_begun_anew_by_accident(service, tmp_path, own_service):
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=None if own_service else service.socket)
    train(model, optimizer, 3)
    optimizer.save(tmp_path)
    optimizer.saved()
    state = optimizer.state_dict()
    optimizer.close()
    before = copy.deepcopy(model)
    backward(model, 3)
    uses = (optimizer.step, optimizer.state_dict, lambda: optimizer.save(tmp_path), optimizer.saved, lambda: optimizer.resumed_step)
    for use in uses:
        with pytest.raises(RuntimeError, match="the optimizer is closed: open\\(\\) "):
            use()
    assert_same(model, before, 0, 0)
    optimizer.zero_grad()
    optimizer.close()
    if own_service:
        optimizer.load_state_dict(state)
    else:
        optimizer.open()
    assert optimizer.resumed_step == 3
    train(model, optimizer, 1)
    optimizer.close(give_back=True)
    optimizer.load(tmp_path)
    assert optimizer.resumed_step == 3
    optimizer.close(give_back=True)
    optimizer.open()
    assert optimizer.resumed_step == 0
