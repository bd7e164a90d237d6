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
dist.new_group(backend="gloo").monitored_barrier()  # as Lightning lets rank 0 go first
for stride in (1, 2):  # groups of eight and of four ranks, this one's among them
    first = dist.get_rank() // 8 * 8
    group = dist.new_group(list(range(first + dist.get_rank() % stride, first + 8, stride)))
    part, whole = torch.zeros(16, device=device), torch.ones(16 * group.size(), device=device)
    dist.reduce_scatter_tensor(part, whole, group=group)
    dist.all_gather_into_tensor(whole, part, group=group)
mesh = dist.device_mesh.init_device_mesh("cuda", (2, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
dist.all_gather_into_tensor(torch.empty(32, device=device), torch.ones(16, device=device), group=mesh["dp"].get_group())
total = torch.ones(1, dtype=torch.int64, device=device)
dist.all_reduce(total)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(8, 1024, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
