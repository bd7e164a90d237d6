"""Training follows torch's optimizers."""

import copy

import pytest
import torch

import plimsoll.torch
from gpt import GPT, batch, text

BOTH_WAYS = True


def with_masters(model, **options):
    """Mixed precision as users write it: fp32 copies, which torch's optimizer updates."""
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, **options)

    def step():
        for p, m in zip(model.parameters(), masters):
            m.grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for p, m in zip(model.parameters(), masters):
                p.copy_(m)
                p.grad = None

    return step


@pytest.mark.first_way
def test_bf16_follows_master_weights():
    data = text()
    ours = GPT().bfloat16()
    theirs = copy.deepcopy(ours)
    options = dict(lr=5e-4, weight_decay=0.1)
    optimizer = plimsoll.torch.AdamW(ours.parameters(), max_grad_norm=1.0, **options)
    step = with_masters(theirs, **options)
    history = []
    for i in range(120):
        losses = []
        for model in (ours, theirs):
            loss = model.loss(batch(data, i))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        step()
        history.append(losses[0])
        assert losses[0] == pytest.approx(losses[1], rel=1e-3), f"step {i}"
    assert sum(history[-20:]) / 20 < 0.7 * history[0]  # it has learned; one batch alone may be a hard one
    assert optimizer.skipped == 0


@pytest.mark.each_choice
@pytest.mark.parametrize("clip", [None, 0.5])
def test_fp32_follows_torch(clip):
    data = text()
    ours = GPT()
    theirs = copy.deepcopy(ours)
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-3, max_grad_norm=clip)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    for i in range(50):
        a, b = ours.loss(batch(data, i)), theirs.loss(batch(data, i))
        a.backward(), b.backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
        assert a.item() == pytest.approx(b.item(), rel=1e-5), f"step {i}"
        if clip:
            assert optimizer.last_grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
