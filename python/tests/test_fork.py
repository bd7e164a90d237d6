"""A forked child keeps the weights of the fork, or is told that they are gone."""

import copy
import os
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import plimsoll.torch
from test_optimizer import assert_same, backward, network, train

BOTH_WAYS = True


def in_child(function):
    """Runs a function in a forked child, when the returned function is called. What that returns is what it has returned."""
    go, goes = os.pipe()
    said, says = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.read(go, 1)
            os.write(says, (function() or "done").encode())
            code = 0
        except BaseException:
            os.write(says, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(code)
    os.close(says)

    def finish():
        os.write(goes, b"!")
        told = b"".join(iter(lambda: os.read(said, 4096), b"")).decode()
        for descriptor in (go, goes, said):
            os.close(descriptor)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, told
        return told

    return finish


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_child_uses_its_parameters_at_once(dtype):
    model = network(dtype)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    wanted = copy.deepcopy(model)

    def evaluate():
        assert_same(model, wanted, 0, 0)
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())
        backward(model, 0)
        return str(model(torch.ones(2, 16).to(dtype)).tolist())

    finish = in_child(evaluate)
    assert finish() == str(wanted(torch.ones(2, 16).to(dtype)).tolist())
    train(model, optimizer, 2)


@pytest.mark.parametrize("change", ["step", "load", "load_state_dict", "write"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_child_is_told_that_its_parameters_have_gone(tmp_path, way, dtype, change):
    model = network(dtype)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    optimizer.save(tmp_path)
    optimizer.saved()
    state = optimizer.state_dict()
    wanted = copy.deepcopy(model)

    def evaluate():
        if way == "copied" or (change == "write" and dtype is not torch.float32):
            assert_same(model, wanted, 0, 0)  # has had its own parameters all the time
            return
        for use in (lambda: model(torch.ones(2, 16).to(dtype)), lambda: model[2].bias.sum(), lambda: model.state_dict()):
            with pytest.raises(RuntimeError, match="this process was forked, .* has changed the parameters since"):
                use()

    finish = in_child(evaluate)
    if change == "step":
        train(model, optimizer, 1)
    elif change == "load":
        optimizer.load(tmp_path)
    elif change == "load_state_dict":
        optimizer.load_state_dict(state)
    else:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    finish()


def test_a_child_that_has_used_a_parameter_keeps_all():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    wanted = copy.deepcopy(model)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert model[0].weight.shape
            os.write(ready[1], b"!")
            os.read(go[0], 1)
            assert_same(model, wanted, 0, 0)
            code = 0
        finally:
            os._exit(code)
    os.read(ready[0], 1)
    train(model, optimizer, 2)
    os.write(go[1], b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_of_a_parent_with_threads():
    """The threads of the parent's OpenMP are not in the child."""
    torch.set_num_threads(2)
    model = torch.nn.Linear(512, 512)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(64, 512)).sum().backward()
    optimizer.step()
    wanted = model.weight.detach().numpy().astype("float64").sum()
    finish = in_child(lambda: str(model.weight.detach().numpy().astype("float64").sum()))
    assert finish() == str(wanted)


def test_workers_of_a_data_loader():
    ours, theirs = network(), network()
    losses = []
    for model, module in ((ours, plimsoll.torch), (theirs, torch.optim)):
        optimizer = module.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(3)
        train(model, optimizer, 1)
        rows = TensorDataset(torch.randn(32, 16))
        for (x,) in DataLoader(rows, batch_size=8, num_workers=2, multiprocessing_context="fork"):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-5)


def test_a_child_uses_the_model_of_an_optimizer_that_has_made_no_step():
    """Whatever another optimizer of the parent does meanwhile."""
    generator, critic = network(), network()
    optimizers = [plimsoll.torch.AdamW(model.parameters(), lr=1e-2) for model in (generator, critic)]
    train(generator, optimizers[0], 1), train(critic, optimizers[1], 1)
    wanted = copy.deepcopy(generator)
    finish = in_child(lambda: assert_same(generator, wanted, 0, 0))
    train(critic, optimizers[1], 1)
    finish()


def test_a_child_of_a_child():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    wanted = copy.deepcopy(model)
    in_child(lambda: in_child(lambda: assert_same(model, wanted, 0, 0))())()
