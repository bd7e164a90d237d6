"""Trains four matrices of 4 MiB with AdamW, on a batch of 256 vectors or of as many as the first argument says."""
import sys

import torch

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 256
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(9):
    model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
