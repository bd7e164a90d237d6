"""Accumulates gradients of three batches in a step that takes the passes as a closure, and updates in two parts."""
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def passes():
    for _ in range(3):
        loss = model(torch.randn(8, 256, device="cuda")).sum()
        loss.backward()
    return loss


for _ in range(9):
    optimizer.step(passes)
    optimizer.step()
    optimizer.zero_grad()
