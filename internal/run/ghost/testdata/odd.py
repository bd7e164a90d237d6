"""Trains a matrix of 4 MiB in a way that its argument names, and that a plan must not hide."""
import sys

import torch

how = sys.argv[1]
torch.ones(1, device="cuda")
model = torch.nn.Linear(1024, 1024, bias=False).to("cpu" if how == "host" else "cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
idle = torch.optim.SGD(torch.nn.Linear(1024, 1024, bias=False).cuda().parameters()) if how == "idles" else None


def fails(module, arguments):
    raise ValueError("of a layer")


if how == "catches":
    hook = model.register_forward_pre_hook(fails)
    try:
        model(torch.ones(1, 1024, device="cuda"))
    except ValueError:
        hook.remove()
for step in range(1 if how == "once" else 99):
    model(torch.ones(1 + step * (how == "varies"), 1024, device=model.weight.device)).sum().backward()
    optimizer.step()
    if how == "fails":
        sys.exit(3)
