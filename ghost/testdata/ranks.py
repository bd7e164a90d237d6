"""Averages gradients among ranks, of which one alone is here."""
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cuda", (8, 2), mesh_dim_names=("dp", "tp"))  # which begins the process group
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).to(device), device_ids=[device])
pair = [torch.ones(4, device=device) for _ in range(2)]
dist.scatter(torch.empty(4, device=device), pair, src=dist.get_rank(), group=mesh["tp"].get_group())
found = [None] * dist.get_world_size()
dist.all_gather_object(found, "here")
assert found == ["here"] * dist.get_world_size()
dist.barrier()
total = torch.ones(1, dtype=torch.int64, device=device)
dist.all_reduce(total)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(8, 1024, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
