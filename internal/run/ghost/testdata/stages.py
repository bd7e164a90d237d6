"""Trains a pipeline whose stages learn from each other what they will send: a stage is as wide as its rank says."""
import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
found = [{"width": 512} if rank == 0 else None]
dist.broadcast_object_list(found, src=0)
width = found[0]["width"]
after, before = torch.tensor([rank, width], device=device), torch.zeros(2, dtype=torch.int64, device=device)
ring = [dist.P2POp(dist.irecv, before, (rank - 1) % size), dist.P2POp(dist.isend, after, (rank + 1) % size)]
for work in dist.batch_isend_irecv(ring):
    work.wait()
again = dist.irecv(before.zero_(), (rank - 1) % size)  # each asks first, and sends then
dist.isend(after, (rank + 1) % size).wait()
again.wait()
assert before.tolist() == [(rank - 1) % size, width], before
layer = torch.nn.Linear(width * (rank + 1), width * (rank + 2), bias=False, device=device)
stage = PipelineStage(layer, rank, size, device)
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda found, wanted: (found - wanted).square().mean())
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(3):
    batch = [torch.ones(64, width, device=device)] if rank == 0 else []
    schedule.step(*batch, target=torch.ones(64, layer.out_features, device=device) if rank == size - 1 else None)
    optimizer.step()
    optimizer.zero_grad()
