"""A program for ``plimsoll plan``: megatron-core as it is, on CUDA, with the optimizer service in its place."""

import tempfile

import torch
import torch.distributed as dist

import megatron_cpu
import plimsoll.megatron


def main():
    dist.init_process_group("nccl", f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    from megatron.core.optimizer import optimizer_config

    optimizer_config.is_te_min_version = lambda version: True  # it is not installed
    plimsoll.megatron.install()
    config, model = megatron_cpu.gpt(hidden=256, vocabulary=1024, length=64)
    model = megatron_cpu.wrap(config, model.cuda(), overlap_grad_reduce=True, overlap_param_gather=True)
    optimizer = megatron_cpu.optimizer_of(model, overlap_param_gather=True, clip_grad=0.0)  # no norm is computed
    tokens = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device="cuda")
        model(tokens, torch.arange(64, device="cuda").expand_as(tokens), mask, labels=tokens).float().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
    held = optimizer.chained_optimizers[0].optimizer
    print("shards on", {shard.device.type for shard in held.state}, "at step", held.current_step())


if __name__ == "__main__":
    main()
