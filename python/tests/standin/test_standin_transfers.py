"""The copies of the optimizers, on a device that punishes mistakes."""

import pytest
import torch

import gpt
import plimsoll.torch
from plimsoll import PlimsollError
from plimsoll.torch.transfer import StreamTransfer
from transfers import use_copies

STEPS = 4


def train(device, make, dtype=torch.bfloat16, steps=STEPS, **options):
    """The parameters after training, and the state of the optimizer."""
    torch.manual_seed(0)
    model = gpt.GPT().to(dtype).to(device)
    optimizer = make(model.parameters(), lr=1e-2, **options)
    data = gpt.text()
    for step in range(steps):
        model.loss(gpt.batch(data, step).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    optimizer.close()
    return [p.detach().cpu() for p in model.parameters()] + [
        v.cpu() for values in state.values() for v in values.values() if isinstance(v, torch.Tensor)
    ]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


OPTIMIZERS = [
    (plimsoll.torch.AdamW, {}),
    (plimsoll.torch.AdamW, {"moments": "bf16"}),
    (plimsoll.torch.AdamW, {"moments": "int8"}),
    (plimsoll.torch.AdamW, {"state": "fp32", "max_grad_norm": 0.5}),
    (plimsoll.torch.AdamW, {"gradients": "step"}),
    (plimsoll.torch.AdamW, {"sharding": "zero2"}),
    (plimsoll.torch.Adam, {"moments": "bf16"}),
    (plimsoll.torch.Lion, {}),
    (plimsoll.torch.Lion, {"moments": "bf16"}),
    (plimsoll.torch.Adagrad, {}),
    (plimsoll.torch.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize("make, options", OPTIMIZERS, ids=lambda v: v if isinstance(v, dict) and str(v) else getattr(v, "__name__", str(v)))
def test_training_has_the_bits_of_the_cpu(monkeypatch, make, options):
    ours = train("standin", make, **options)
    use_copies(monkeypatch, block_bytes=4096)
    assert same(ours, train("cpu", make, **options))
