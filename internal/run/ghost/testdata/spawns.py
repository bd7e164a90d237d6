"""Starts ranks itself, each of which trains a part of a matrix."""
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, size):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:23456", world_size=size, rank=rank)
    torch.cuda.set_device(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024).cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(9):
        model(torch.randn(64 * (1 + rank), 1024, device="cuda")).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.spawn(train, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
