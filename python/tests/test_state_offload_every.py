"""StateOffload of every optimizer of torch.optim and pytorch_optimizer: the bits of the optimizer, or a refusal that names it."""

import inspect
import re
import warnings
from contextlib import closing

import numpy as np
import pytest
import torch

from nightly import nightly
from plimsoll.torch import StateOffload

collection = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed: make python")

STEPS = 4  # before and after a save
TORCH = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"]


def made(dtype=torch.float32):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(24, 40), torch.nn.LayerNorm(40), torch.nn.GELU(), torch.nn.Linear(40, 24, bias=False)]
    return torch.nn.Sequential(*layers).to(dtype)


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


def with_muon(model):
    others = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": matrices(model), "use_muon": True}, {"params": others, "use_muon": False}]


def optimizer_of(name, model):
    if hasattr(torch.optim, name):
        return getattr(torch.optim, name)(matrices(model) if name == "Muon" else model.parameters())
    kind = collection.load_optimizer(name)
    wanted = inspect.signature(kind.__init__).parameters
    if "params" not in wanted and "model" in wanted:
        return kind(model)
    if "muon" in name or name == "adago":
        return kind(with_muon(model))
    own = {"num_iterations": 100, "num_data": 100}
    given = matrices(model) if name in ("spectralsphere",) else model.parameters()
    return kind(given, **{key: value for key, value in own.items() if key in wanted})


@pytest.fixture(scope="module", autouse=True)
def group():
    """Some optimizers ask for a process group when they are made."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def step(name, model, optimizer, number):
    torch.manual_seed(1000 + number)  # some optimizers draw numbers
    np.random.seed(number)
    optimizer.zero_grad()
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)
    (model(x) - x).float().square().mean().backward()
    optimizer.step()


def train(name, model, optimizer, first=0, count=STEPS):
    for number in range(first, first + count):
        step(name, model, optimizer, number)


def weights(model):
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def wrapped(name, model, **options):
    return StateOffload(optimizer_of(name, model), model=model, chunk_bytes=4096, **options)


def check(name, folder, recovery, **options):
    """Steps, a save, and a load in a new process's place have the bits of the optimizer itself."""
    model, bare = made(), made()
    with closing(wrapped(name, model, recovery=recovery, **options)) as ours:
        theirs = optimizer_of(name, bare)
        train(name, model, ours)
        train(name, bare, theirs)
        assert same(weights(model), weights(bare)), "the first steps differ"
        step = ours.save(folder, {"epoch": 1})
        assert ours.saved() == step
        at_save = weights(model)
        train(name, model, ours, STEPS)
        train(name, bare, theirs, STEPS)
        expected = weights(bare)
        assert same(weights(model), expected), "steps after a save differ"
        saved = step, at_save, expected
        go_on(name, model, ours, folder, recovery, *saved)  # back in the same process
    model = made()
    with closing(wrapped(name, model, recovery=recovery, **options)) as ours:
        go_on(name, model, ours, folder, recovery, *saved)


def go_on(name, model, ours, folder, recovery, step, at_save, expected):
    if not recovery:
        model.load_state_dict(at_save)
    assert ours.load(folder) == {"epoch": 1} and ours.resumed_step == step
    assert same(weights(model), at_save), "the weights of the checkpoint differ"
    train(name, model, ours, STEPS)
    assert same(weights(model), expected), "steps after a load differ"
