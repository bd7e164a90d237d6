"""accelerate prepares the optimizer, clips and accumulates as with torch's."""

import pytest
import torch

import plimsoll.torch

accelerate = pytest.importorskip("accelerate")


def trained(optimizers, clips):
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    net, optimizer = accelerator.prepare(net, optimizers.AdamW(net.parameters(), lr=1e-2))
    losses, norms = [], []
    for i in range(12):
        rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        with accelerator.accumulate(net):
            loss = (net(rows) - rows).square().mean() * 100
            accelerator.backward(loss)
            if clips and accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("clips", [False, True])
def test_as_with_torch(clips):
    found, wanted = trained(plimsoll.torch, clips), trained(torch.optim, clips)
    assert found[0] == pytest.approx(wanted[0], rel=1e-3) and found[1] == pytest.approx(wanted[1], rel=1e-3)
    assert len(found[1]) == (6 if clips else 0)
