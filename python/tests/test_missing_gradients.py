"""Parameters without a gradient: a step leaves them alone, as torch does. They keep weight, state and number of steps."""

import copy
import random

import pytest
import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard

import plimsoll.torch
from plimsoll import PlimsollError
from test_crash import kill_worker
from test_distributed import run, weights
from test_optimizer import assert_same

BOTH_WAYS = True
LAYERS = 4


class Stack(torch.nn.Module):
    """Layers of which each forward pass uses some, as LayerDrop and unused experts do."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(LAYERS))

    def forward(self, x, used):
        for i in used:
            x = x + torch.tanh(self.layers[i](x))
        return x.float().square().mean()


def stack(dtype=torch.float32):
    torch.manual_seed(0)
    return Stack().to(dtype)


def uses(steps, seed=0):
    """The layers that each step uses: the last is not used before the third step, and none is used in all."""
    chance = random.Random(seed)
    return [sorted({chance.randrange(LAYERS - (i < 3)), chance.randrange(LAYERS - (i < 3))}) for i in range(steps)]


def train(model, optimizer, used, first=0):
    for i, layers in enumerate(used, first):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(6, 12, generator=generator).to(next(model.parameters()).dtype)
        model(x, layers).backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "AdamW": dict(lr=1e-2, weight_decay=0.1),
    "Adam": dict(lr=1e-2, weight_decay=0.1),
    "Adagrad": dict(lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "SGD": dict(lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
}


def steps_of(optimizer):
    """How many steps each parameter has had, by its place."""
    state = optimizer.state_dict()["state"]
    return {i: int(entry["step"]) for i, entry in state.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_torch(service, name):
    ours, theirs = stack(), stack()
    optimizer = getattr(plimsoll.torch, name)(ours.parameters(), **OPTIMIZERS[name])
    reference = getattr(torch.optim, name)(theirs.parameters(), **OPTIMIZERS[name])
    used = uses(12)
    train(ours, optimizer, used), train(theirs, reference, used)
    assert_same(ours, theirs)
    if name != "SGD":
        assert steps_of(optimizer) == steps_of(reference) and len(set(steps_of(optimizer).values())) > 2
        for i, entry in reference.state_dict()["state"].items():
            parameter = optimizer.param_groups[0]["params"][i]
            assert optimizer.state[parameter]["step"] == entry["step"]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_state_dicts_go_both_ways(service, name):
    """Steps that differ come from torch and go to torch, and a parameter without a state begins with its first step."""
    used = uses(9)
    models = [stack() for _ in range(3)]
    ours, reference, theirs = [
        getattr(library, name)(model.parameters(), **OPTIMIZERS[name])
        for library, model in zip((plimsoll.torch, torch.optim, torch.optim), models)
    ]
    for model, optimizer in zip(models, (ours, reference, theirs)):
        train(model, optimizer, used[:2])  # in which no step uses the last layer
    saved = copy.deepcopy(theirs.state_dict())
    assert 2 * (LAYERS - 1) not in saved["state"]
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(saved)
    for model, optimizer in zip(models, (ours, reference, theirs)):
        train(model, optimizer, used[2:], first=2)
    assert_same(models[0], models[1])
    assert_same(models[2], models[1])


FORMATS = {
    "split": dict(state="split"),
    "fp32": dict(state="fp32"),
    "split24 bf16": dict(state="split24", moments="bf16"),
    "int8": dict(moments="int8"),
}


@pytest.mark.each_choice
@pytest.mark.parametrize("overlap", [None, "forward", "backward", "async"])
@pytest.mark.parametrize("form", FORMATS)
def test_formats_and_overlaps(service, form, overlap):
    """A parameter that a step leaves alone keeps all bits. Overlap changes none of what the others get."""

    def trained(overlap, used):
        model = stack(torch.bfloat16)
        optimizer = plimsoll.torch.AdamW(
            model.parameters(), lr=1e-2, model=model, overlap=overlap, name=str(overlap or "None"), **FORMATS[form]
        )
        for i, layers in enumerate(used):
            train(model, optimizer, [layers], first=i)
            optimizer.synchronize()
            yield model, optimizer
        optimizer.close(give_back=True)

    used = uses(6)
    for (model, optimizer), (other, _), layers in zip(trained(overlap, used), trained(None, used), used):
        before = {} if layers is used[0] else after
        after = {n: (p.detach().clone(), copy.copy(optimizer.state[p])) for n, p in model.named_parameters()}
        for n, (weight, entry) in after.items():
            is_used = int(n.split(".")[1]) in layers
            if n in before and not is_used:
                assert torch.equal(weight, before[n][0])
                assert all(torch.equal(entry[key], before[n][1][key]) for key in entry)
            elif n in before:
                assert entry["step"] == before[n][1]["step"] + 1
            if overlap != "async":
                assert torch.equal(weight, other.get_parameter(n))


def test_frozen_and_thawed(service):
    ours, theirs = stack(), stack()
    pairs = [(plimsoll.torch.AdamW(ours.parameters(), lr=1e-2), ours), (torch.optim.AdamW(theirs.parameters(), lr=1e-2), theirs)]
    for optimizer, model in pairs:
        if optimizer is pairs[0][0]:
            optimizer.open()
        for i in range(9):
            for layer in range(LAYERS):  # one layer is trained at a time, as by LISA
                model.layers[layer].requires_grad_(layer == i // 3 or layer == 3)
            train(model, optimizer, [range(LAYERS)], first=i)
    assert_same(ours, theirs)
    assert steps_of(pairs[0][0]) == steps_of(pairs[1][0])


def test_saved_and_loaded(service, tmp_path):
    used = uses(10)
    model, reference = stack(), stack()
    whole = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    train(reference, whole, used)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, used[:5])
    optimizer.save(tmp_path)
    optimizer.saved()
    had = steps_of(optimizer)
    optimizer.close(give_back=True)
    again = stack()
    resumed = plimsoll.torch.AdamW(again.parameters(), lr=1e-2)
    resumed.load(tmp_path)
    assert steps_of(resumed) == had
    with torch.no_grad():
        again.layers[0].weight.copy_(again.layers[0].weight)  # weights that are taken leave the steps alone
    train(again, resumed, used[5:], first=5)
    assert_same(again, reference)
    assert steps_of(resumed) == steps_of(whole)


def test_other_ways(service):
    used = uses(4)
    for missing in ("zero", "refuse"):
        model = stack()
        optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, missing_gradients=missing, name=missing)
        if missing == "refuse":
            with pytest.raises(RuntimeError, match=r"have no gradient.*missing_gradients='keep'"):
                train(model, optimizer, used)
        else:
            train(model, optimizer, used)
            assert set(steps_of(optimizer).values()) == {4}


def test_service_dies(service):
    """Each step is made by another service, which finds what is left alone."""
    used = uses(6)
    models, steps = [stack(torch.bfloat16) for _ in range(2)], []
    for model, dies in zip(models, (False, True)):
        optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, name=f"dies {dies}".replace(" ", "-"), model=model)
        for i, layers in enumerate(used):
            train(model, optimizer, [layers], first=i)
            if dies:
                kill_worker(service)
        steps.append(steps_of(optimizer))
    assert_same(*models, 0, 0)
    assert steps[0] == steps[1]


def of_ranks(rank, sharding, used):
    model = stack()
    options = dict(lr=1e-2)
    if sharding == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    elif sharding == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, **options)
    else:
        optimizer = plimsoll.torch.AdamW(model.parameters(), sharding=sharding, model=model, max_grad_norm=100.0, **options)
        optimizer.open()
    for i, layers in enumerate(used):
        generator = torch.Generator().manual_seed(10 * i + (rank if sharding in ("zero2", "fsdp") else 0))
        batches = [torch.randn(6, 12, generator=generator)]
        if sharding in ("torch", "zero1"):  # the mean of the ranks' gradients
            batches = [torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * i + r)) for r in range(2)]
        for x in batches:
            (model(x, layers) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if sharding == "fsdp":
        return {n: p.full_tensor().tolist() for n, p in model.named_parameters()}
    return {n: p.tolist() for n, p in model.named_parameters()}


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "fsdp"])
@pytest.mark.first_way
def test_shardings(sharding):
    used = uses(6)
    wanted, _ = run(of_ranks, "torch", used)
    first, second = run(of_ranks, sharding, used)
    for name, values in wanted.items():
        for found in (first, second):
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=1e-4, atol=1e-6)


def of_different_ranks(rank):
    model = stack()
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding="zero1", model=model)
    optimizer.open()
    before = weights(model)
    model(torch.ones(2, 12), [0, 1 + rank]).backward()
    with pytest.raises(PlimsollError, match="have no gradients of different parameters"):
        optimizer.step()
    return weights(model) == before


@pytest.mark.first_way
def test_ranks_that_leave_different_parameters_alone():
    assert run(of_different_ranks) == [True, True]
