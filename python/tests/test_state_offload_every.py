"""StateOffload of every optimizer of torch.optim and pytorch_optimizer: the bits of the optimizer, or a refusal that names it."""

import copy
import inspect
import re
from contextlib import closing

import numpy as np
import pytest
import torch

from nightly import nightly
from plimsoll.torch import StateOffload
from plimsoll.torch.tree import is_same

collection = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed: make python")

STEPS = 11  # before and after a save: some optimizers do more in every tenth
TORCH = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SparseAdam",
]  # fmt: skip
#: Optimizers that are refused, and why.
REFUSED = {
    "LBFGS": "calls the closure itself",
    "SparseAdam": "whose gradients are sparse",
    "adahessian": "does not require grad",
    "adalomo": "it has no step",
    "adashift": "'grad_queue' of 0.weight is a deque, which grows",
    "alig": "AliG requires closure",
    "bsam": "bSAM requires closure",
    "demo": "which is in the state that it makes before its first step",
    "lbfgs": "calls the closure itself",
    "lomo": "it has no step",
    "lorarite": "another state for a parameter that it updates beside others",
    "magma": "shows the parameter groups or the state of another optimizer",
    "nero": "'scale' is a number of type float for a parameter of zeros: expected a number of type torch.float32",
    "sara": "'mask', which is in the state that it makes before its first step",
    "sophiah": "does not require grad",
    "spam": "has a SGD in its attribute 'warmup'.sgd",
}
#: Optimizers whose parameters depend on each other.
TOGETHER = {
    "adagc", "adai", "adams", "asgd", "avagrad", "dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd",
    "lorarite", "prodigy", "ranger21",
}  # fmt: skip
#: Optimizers that draw random numbers.
DRAWING = {"dash", "gravity", "kron"}
WITHOUT_STATE = {"SGD", "sgd"}
#: What every change waits for: each mechanism once.
FIRST = {
    "AdamW": "tensors and a count by parameter",
    "adabelief": "a count in the groups",
    "asgd": "tensors and a rate in the groups",
    "madgrad": "state under a name",
    "emofact": "a dict under a name",
    "stablespam": "a count in an attribute",
    "aggmo": "tensors in a dict",
    "soap": "tensors in lists",
    "conda": "an object",
    "scalableshampoo": "an object with lists",
    "dadaptsgd": "a number that is there only after the first step",
    "amos": "numbers alone",
    "adashift": "a deque",
    "nero": "a number of two types",
    "magma": "another optimizer",
    "spam": "another optimizer in an object",
    "sara": "a state before the first step",
}
NAMES = [*TORCH, *(name for name in collection.get_supported_optimizers() if name not in TORCH)]


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
        state = copy.deepcopy(ours.state_dict())
        assert same_states(state["state"], theirs.state_dict()["state"]), "the states differ"
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


    if recovery:
        check_state_dict(name, state, at_save, **options)


def same_states(one, other):
    one, other = ({key: entry for key, entry in state.items() if entry != {}} for state in (one, other))
    return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)


def check_state_dict(name, state, at_save, **options):
    """A state_dict goes on with StateOffload as with the optimizer itself, which leaves out its attributes."""
    model, bare = made(), made()
    with closing(wrapped(name, model, **options)) as ours:
        theirs = optimizer_of(name, bare)
        for optimizer, of in ((ours, model), (theirs, bare)):
            optimizer.load_state_dict(copy.deepcopy(state))
            of.load_state_dict(at_save)
            train(name, of, optimizer, STEPS, 1)
        assert same(weights(model), weights(bare)), "steps after a state_dict differ"


def go_on(name, model, ours, folder, recovery, step, at_save, expected):
    if not recovery:
        model.load_state_dict(at_save)
    assert ours.load(folder) == {"epoch": 1} and ours.resumed_step == step
    assert same(weights(model), at_save), "the weights of the checkpoint differ"
    train(name, model, ours, STEPS)
    assert same(weights(model), expected), "steps after a load differ"


@pytest.mark.parametrize("mode", ["chunked", "whole"])
@pytest.mark.parametrize("name", [*FIRST, *nightly(*(name for name in NAMES if name not in FIRST))])
def test_every_optimizer(name, mode, tmp_path):
    kind = type(optimizer_of(name, made())).__name__
    if name in (*TOGETHER, *DRAWING) and mode == "chunked":
        reason = "updates a parameter by what it finds in others" if name in TOGETHER else "draws random numbers"
        with pytest.raises(ValueError, match=f"^{kind} {reason}.*use mode='whole'$"):
            wrapped(name, made(), mode=mode)
    elif name in REFUSED:
        with pytest.raises(TypeError, match=re.escape(REFUSED[name])) as refused:
            wrapped(name, made(), mode=mode)
        assert kind in str(refused.value) and re.search("[Ll]eave (it|these parameters) to the optimizer itself$", str(refused.value))
    elif name in WITHOUT_STATE:
        check(name, tmp_path, recovery=True, mode=mode)
        with pytest.raises(RuntimeError, match="there is nothing to save, as the optimizer has no state.*give StateOffload recovery=True"):
            check(name, tmp_path, recovery=False, mode=mode)
    else:
        for recovery in (True, False):
            check(name, tmp_path / str(recovery), recovery=recovery, mode=mode)
