"""Updates one step behind: overlap="async"."""

import contextlib
import copy
import pickle
import signal

import pytest
import torch

import plimsoll.torch
from gpt import GPT, batch, text
from plimsoll.client import Session
from plimsoll.torch import Async, parameter_arena
from test_crash import digest, kill_trainer, killed_again_and_again, start_trainer
from test_optimizer import assert_same

BOTH_WAYS = True
OPTIONS = dict(lr=2e-3, weight_decay=0.1)
DATA = text()


def backward(model, i):
    loss = model.loss(batch(DATA, i))
    loss.backward()
    return loss.item()


def delayed(model, warm_up=0, **options):
    return plimsoll.torch.AdamW(model.parameters(), model=model, overlap=Async(warm_up), **{**OPTIONS, **options})


def put(model, values):
    with torch.no_grad():
        for p, value in zip(model.parameters(), values):
            p.copy_(value)


def simulate(model, optimizer, steps, warm_up, clip=None, synchronized=()):
    """Delayed updates by their definition, with any exact optimizer: the gradient of the parameters before the last
    update, applied to those after it.
    """
    seen = newest = [p.detach().clone() for p in model.parameters()]
    for i in range(steps):
        put(model, seen)
        backward(model, i)
        put(model, newest)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        before, newest = newest, [p.detach().clone() for p in model.parameters()]
        seen = newest if i < warm_up or i in synchronized else before


@pytest.mark.each_choice
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("warm_up", [0, 5])
def test_is_delayed_to_the_bit(dtype, warm_up):
    ours = GPT().to(dtype)
    theirs = copy.deepcopy(ours)
    simulate(theirs, plimsoll.torch.AdamW(theirs.parameters(), max_grad_norm=0.8, **OPTIONS), 25, warm_up)
    optimizer = delayed(ours, warm_up, max_grad_norm=0.8)
    clipped = 0
    for i in range(25):
        backward(ours, i)
        optimizer.step()
        optimizer.zero_grad()
        clipped += optimizer.last_grad_norm > 0.8
    assert 0 < clipped
    optimizer.synchronize()
    assert digest(ours) == digest(theirs)


def test_is_delayed_as_with_torch():
    ours = GPT()
    theirs = copy.deepcopy(ours)
    simulate(theirs, torch.optim.AdamW(theirs.parameters(), **OPTIONS), 20, 2, clip=0.8)
    optimizer = delayed(ours, 2, max_grad_norm=0.8)
    for i in range(20):
        backward(ours, i)
        optimizer.step()
        optimizer.zero_grad()
    before = [p.detach().clone() for p in ours.parameters()]
    optimizer.synchronize()
    assert any(not torch.equal(p, q) for p, q in zip(ours.parameters(), before))
    assert_same(ours, theirs, 1e-4, 1e-5)


def test_gradients_accumulate():
    ours = GPT().bfloat16()
    theirs = copy.deepcopy(ours)
    exact = plimsoll.torch.AdamW(theirs.parameters(), max_grad_norm=0.8, **OPTIONS)
    optimizer = delayed(ours, 30, max_grad_norm=0.8)
    for i in range(8):
        for model, o in ((ours, optimizer), (theirs, exact)):
            backward(model, 2 * i)
            backward(model, 2 * i + 1)
            o.step()
            o.zero_grad(set_to_none=bool(i % 2))
    assert digest(ours) == digest(theirs)


def test_steps_that_overflow_are_left_out():
    model = torch.nn.Linear(64, 64).half()
    optimizer = delayed(model, 0, lr=1e-3, max_grad_norm=1.0)
    reference = copy.deepcopy(model)
    exact = plimsoll.torch.AdamW(reference.parameters(), max_grad_norm=1.0, **{**OPTIONS, "lr": 1e-3})
    scaler, theirs = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) for _ in range(2))
    seen = newest = [p.detach().clone() for p in reference.parameters()]
    for i in range(8):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)).half() * (1e6 if i == 3 else 1)
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        put(reference, seen)
        theirs.scale(reference(x).float().square().mean()).backward()
        put(reference, newest)
        theirs.step(exact)
        theirs.update()
        exact.zero_grad()
        # A forward pass sees all updates but the one that the last call of step() has begun.
        before, newest = newest, [p.detach().clone() for p in reference.parameters()]
        seen = before
    optimizer.synchronize()
    assert optimizer.skipped == exact.skipped == 1
    assert digest(model) == digest(reference)


def test_everything_is_of_one_step(tmp_path):
    model = GPT().bfloat16()
    optimizer = delayed(model, 0)
    for i in range(6):
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()
        if i == 2:
            weights = model.state_dict()  # waits
            masters = optimizer.state_dict()["state"]
            for i, weight in enumerate(weights.values()):
                nearest = masters[i]["master_weights"].bfloat16()
                assert (weight != nearest).float().mean() < 0.01  # some are halfway between two
    optimizer.save(tmp_path)
    assert optimizer.saved() == 6
    other = GPT().bfloat16()
    loaded = plimsoll.torch.AdamW(other.parameters(), model=other, name="other", **OPTIONS)
    loaded.load(tmp_path)
    assert digest(other) == digest(model)
    backward(model, 6)
    optimizer.step()  # it is under way
    optimizer.zero_grad()
    optimizer.load(tmp_path)
    assert digest(other) == digest(model)
    backward(model, 6)
    optimizer.step()
    optimizer.close()
    backward(other, 6)
    loaded.step()
    assert digest(other) == digest(model)


@pytest.mark.parametrize("change", [lambda p: p.mul_(2), lambda p: p.data.mul_(2)], ids=["counted", "uncounted"])
def test_weights_are_changed_too_early(change):
    model = GPT().bfloat16()
    optimizer = delayed(model, 0)
    backward(model, 0)
    optimizer.step()
    with torch.no_grad():
        change(model.head.weight)
    with pytest.raises(RuntimeError, match="head.weight among them.*synchronize"):
        backward(model, 1)
        optimizer.step()


def test_synchronize_then_change():
    model = GPT().bfloat16()
    other = copy.deepcopy(model)
    optimizer, exact = delayed(model, 0), plimsoll.torch.AdamW(other.parameters(), **OPTIONS)
    for m, o in ((model, optimizer), (other, exact)):
        backward(m, 0)
        o.step()
        o.zero_grad()
        optimizer.synchronize()
        with torch.no_grad():
            m.head.weight.clamp_(-0.05, 0.05)
        backward(m, 1)
        o.step()
    model.load_state_dict(model.state_dict())
    assert digest(model) == digest(other)


def test_copies_of_the_model_wait_for_nothing():
    model = torch.nn.Linear(8, 8)
    optimizer = delayed(model)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = digest(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.state_dict()
        assert digest(model) == before
    model.state_dict()
    assert digest(model) != before


def test_an_interrupt_while_a_step_begins(monkeypatch):
    model = GPT().bfloat16()
    undisturbed = copy.deepcopy(model)
    optimizer, theirs = delayed(model), delayed(undisturbed, name="theirs")
    for i in range(5):
        with monkeypatch.context() as patch:
            if i == 2:
                begin = Session.begin

                def interrupted(*arguments, **options):
                    patch.setattr(Session, "begin", begin)
                    signal.raise_signal(signal.SIGINT)
                    return begin(*arguments, **options)

                patch.setattr(Session, "begin", interrupted)
            backward(model, i)
            with pytest.raises(KeyboardInterrupt) if i == 2 else contextlib.nullcontext():
                optimizer.step()
        optimizer.zero_grad()
        backward(undisturbed, i)
        theirs.step()
        theirs.zero_grad()
        if i == 2:
            model.state_dict(), undisturbed.state_dict()
            assert digest(model) == digest(undisturbed)
    optimizer.synchronize(), theirs.synchronize()
    assert digest(model) == digest(undisturbed)


@pytest.mark.parametrize("options, message", [
    (dict(overlap="async"), "model is None"),
    (dict(overlap="late"), "expected one of None, 'forward', 'backward', 'async'"),
    (dict(overlap=Async(-1)), "warm_up_steps is -1"),
])
def test_refuses(options, message):
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=message):
        plimsoll.torch.AdamW(model.parameters(), **options)


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_refuses_shards(sharding):
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=f"sharding is '{sharding}': expected no sharding"):
        plimsoll.torch.AdamW(model.parameters(), model=model, overlap="async", sharding=sharding)


def big_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.Linear(2000, 1000)).bfloat16()


def big_train(model, optimizer, steps, begun=lambda: None):
    for i in steps:
        x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(i)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        begun()
    optimizer.synchronize()


@pytest.mark.first_way
def test_service_is_killed(service, monkeypatch):
    monkeypatch.setattr(parameter_arena, "_BLOCK_BYTES", 1 << 18)  # the blocks of tests are small, and this network is not
    undisturbed, model = big_network(), big_network()
    optimizer = delayed(model, 3, max_grad_norm=0.5, socket=service.socket)
    optimizer.open()
    with killed_again_and_again(service, 1, within=0.05) as killer:
        big_train(model, optimizer, killer.steps(), killer.begun)
    big_train(undisturbed, delayed(undisturbed, 3, max_grad_norm=0.5, name="undisturbed"), range(killer.made))
    assert digest(model) == digest(undisturbed)


def train_on(steps):
    """What a program that may be restarted does: it makes so many steps from where the state is."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = GPT().bfloat16()
    optimizer = delayed(model, 0, max_grad_norm=1.0)
    begin = optimizer.resumed_step
    for i in range(begin, begin + steps):
        print("step", i, flush=True)
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return digest(model), begin


@pytest.mark.first_way
def test_trainer_is_killed(service, way):
    """The next trainer has all updates: its first gradient is that of the parameters after the last one."""
    if way == "copied":
        pytest.skip("the trainers are processes of their own, which share")
    kill_trainer(start_trainer(service, "test_delayed.train_on(10**9)"), "step 9")
    process = start_trainer(service, "test_delayed.train_on(10)")
    found, text = process.communicate()[0].split()[-2:]
    begin = int(text)
    assert begin >= 9
    torch.manual_seed(1)
    theirs = GPT().bfloat16()
    exact = plimsoll.torch.AdamW(theirs.parameters(), max_grad_norm=1.0, name="theirs", **OPTIONS)
    simulate(theirs, exact, begin + 10, 0, synchronized=[begin - 1])
    assert found == digest(theirs)
