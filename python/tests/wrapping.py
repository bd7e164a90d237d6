"""Small parameters and optimizers to wrap, for tests of StateOffload."""

import os

import torch

STEPS = 50 if os.environ.get("PLIMSOLL_SOAK") else 5  # of each combination
SHAPES = [(24, 16), (16,), (0, 4), (64, 24), (7, 3), (24, 24)]
CHUNK_BYTES = 8000

OPTIMIZERS = {
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "plain-sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor([p for p in ps if p.numel()], lr=1e-2),  # which divides by their sizes
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.5),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
}


def parameters(device="cpu", dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).to(device).requires_grad_() for s in shapes]


def give_gradients(ps, step, without=()):
    """The gradients of a step, the same whoever asks."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(ps):
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)
        p.grad = None if i in without else gradient


def steps(ps, optimizer, count, first=0):
    """Steps of which one leaves out the gradient of a parameter that had some, and the first one of another."""
    for step in range(first, first + count):
        give_gradients(ps, step, without={0: (3,), 2: (1,)}.get(step, ()))
        optimizer.step()


def on_host(value):
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def same(one, other):
    one, other = on_host(one), on_host(other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def assert_same_training(ours, theirs, ps, qs):
    """Optimizers have the same state, and their parameters are the same."""
    assert all(map(same, ps, qs))
    a, b = ours.state_dict(), theirs.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert {i: set(e) - {"master_weights"} for i, e in a["state"].items()} == {i: set(e) for i, e in b["state"].items()}
    assert all(same(a["state"][i][k], v) for i, e in b["state"].items() for k, v in e.items())
