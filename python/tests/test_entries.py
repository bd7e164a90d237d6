"""optimizer.state shows the state that the service holds, and is no place to write."""

import copy
import gc
import io

import pytest
import torch

import plimsoll.torch
from plimsoll.torch.entries import Entry
from test_optimizer import assert_same, network, train

ENTRIES = {
    "AdamW": ["step", "exp_avg", "exp_avg_sq"],
    "Adagrad": ["step", "sum"],
    "SGD": ["momentum_buffer"],
}


def trained(dtype=torch.float32, name="AdamW", steps=3, **options):
    model = network(dtype)
    optimizer = getattr(plimsoll.torch, name)(model.parameters(), lr=1e-2, **options)
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_as_torch(name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    ours, optimizer = trained(name=name, **options)
    theirs = network()
    reference = getattr(torch.optim, name)(theirs.parameters(), lr=1e-2, **options)
    train(theirs, reference, 3)
    assert len(optimizer.state) == len(reference.state) == 4 and optimizer.state
    assert [p is q for p, q in zip(optimizer.state, ours.parameters())] == [True] * 4
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert p in optimizer.state and q not in optimizer.state
        entry, wanted = optimizer.state[p], reference.state[q]
        assert sorted(entry) == sorted(ENTRIES[name]) and set(entry) <= set(wanted)
        for key in entry:
            torch.testing.assert_close(entry[key].clone(), wanted[key], rtol=1e-4, atol=1e-6)
            assert entry[key].shape == wanted[key].shape and entry[key].device == wanted[key].device
    assert [sorted(e) for e in optimizer.state.values()] == [sorted(ENTRIES[name])] * 4
    assert all(optimizer.state[p].keys() == e.keys() for p, e in optimizer.state.items())


def test_there_is_none_before_the_first_step():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    for _ in range(2):
        assert not optimizer.state and len(optimizer.state) == 0 and list(optimizer.state.items()) == []
        assert model[0].weight not in optimizer.state and optimizer.state.get(model[0].weight) is None
        assert len(optimizer.state[model[0].weight]) == 0
        optimizer.open()
    train(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["step"] == 1
    optimizer.close()
    assert not optimizer.state and optimizer.state[model[0].weight] == {}


def test_nothing_is_fetched_before_it_is_asked_for(monkeypatch):
    model, optimizer = trained()
    fetched = []
    session = optimizer._shards[0].session
    read = type(session).read
    monkeypatch.setattr(type(session), "read", lambda s, *where: fetched.append(where) or read(s, *where))
    assert len(optimizer.state) == 4 and model[0].weight in optimizer.state and optimizer.state and list(optimizer.state)
    assert not fetched
    optimizer.state[model[2].bias]
    assert len(fetched) == 2 and {count for _, _, count in fetched} == {4}


def test_writing_is_refused():
    model, optimizer = trained()
    parameter = model[0].weight
    before = optimizer.state_dict()["state"][0]
    writes = [
        lambda: optimizer.state[parameter]["exp_avg"].zero_(),
        lambda: optimizer.state[parameter]["exp_avg"].mul_(0.5),
        lambda: torch.nn.init.normal_(optimizer.state[parameter]["exp_avg"]),
        lambda: optimizer.state[parameter]["exp_avg"].__setitem__(0, 0),
        lambda: optimizer.state[parameter]["exp_avg"].__iadd__(1),
        lambda: torch.add(before["exp_avg"], 1, out=optimizer.state[parameter]["exp_avg"]),
        lambda: torch._foreach_mul_([optimizer.state[parameter]["exp_avg"]], 0.5),
        lambda: setattr(optimizer.state[parameter]["exp_avg"], "data", before["exp_avg"]),
        lambda: optimizer.state[parameter].__setitem__("exp_avg", torch.zeros(40, 16)),
        lambda: optimizer.state[parameter].__setitem__("step", torch.tensor(0.0)),
        lambda: optimizer.state[parameter].update(exp_avg=torch.zeros(40, 16)),
        lambda: optimizer.state[parameter].setdefault("ema", torch.zeros(40, 16)),
        lambda: optimizer.state[parameter].pop("exp_avg"),
        lambda: optimizer.state[parameter].popitem(),
        lambda: optimizer.state[parameter].clear(),
        lambda: optimizer.state[parameter].__delitem__("exp_avg"),
        lambda: optimizer.state.__setitem__(parameter, {}),
        lambda: optimizer.state.__delitem__(parameter),
        lambda: optimizer.state.pop(parameter),
        lambda: optimizer.state.update({parameter: {}}),
        lambda: optimizer.state.setdefault(torch.zeros(1), {}),
        lambda: optimizer.state.clear(),
        lambda: setattr(optimizer, "state", {}),
    ]
    for i, write in enumerate(writes):
        with pytest.raises(RuntimeError, match="load_state_dict"):
            write()
            pytest.fail(f"number {i} was not refused")
    with pytest.raises(TypeError):
        entry = optimizer.state[parameter]
        entry |= {"exp_avg": 0}
    after = optimizer.state_dict()["state"][0]
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_reading_is_as_of_any_tensor():
    model, optimizer = trained()
    entry = optimizer.state[model[0].weight]
    moments = entry["exp_avg"]
    for made in (moments + 1, moments.clone(), moments.float().sqrt(), moments[0], moments.detach() * 2, moments.to(torch.bfloat16)):
        assert type(made) is torch.Tensor
        made.zero_()
    assert torch.zeros(40, 16).copy_(moments).lerp_(moments, 0.5).equal(moments.clone())
    assert moments.numpy().shape == (40, 16) and moments.norm().item() > 0 and moments.tolist()
    # Part of a loss, as to keep weights that matter.
    (moments * (model[0].weight - 1) ** 2).sum().backward()
    file = io.BytesIO()
    torch.save({"entry": entry}, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=True)["entry"], copy.deepcopy(entry)):
        assert isinstance(again, dict) and not isinstance(again, Entry) and type(again["exp_avg"]) is torch.Tensor and again["exp_avg"].equal(moments.clone())
        again["exp_avg"].zero_()


def test_state_that_is_moved_to_where_it_is():
    """As Lightning does to the state of optimizers when it begins and ends."""
    model, optimizer = trained()
    for entry in optimizer.state.values():
        for key, value in entry.items():
            entry[key] = value.to("cpu")
            entry[key] = value.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_is_of_ordinary_tensors(dtype):
    model, optimizer = trained(dtype)
    state = optimizer.state_dict()
    assert all(type(e) is dict and all(type(t) is torch.Tensor for t in e.values()) for e in state["state"].values())
    other = network(dtype)
    other.load_state_dict(model.state_dict())
    successor = plimsoll.torch.AdamW(other.parameters(), lr=1e-2)
    successor.load_state_dict(copy.deepcopy(state))
    assert train(model, optimizer, 3, 3) == train(other, successor, 3, 3)
    assert_same(model, other, 0, 0)
    assert len(optimizer.state) == 4 and optimizer.state[model[0].weight]["step"] == 6


def test_the_state_of_an_optimizer_that_is_gone():
    model, optimizer = trained()
    state = optimizer.state
    del optimizer
    gc.collect()
    assert not state and len(state) == 0
