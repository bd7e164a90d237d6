"""overlap="forward" of several ranks: the bits of steps that are awaited, and no rank that waits for one that failed."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import plimsoll.torch
from gpt import GPT, batch, text
from plimsoll.client import Session
from plimsoll.errors import PlimsollError
from plimsoll.torch import parameter_arena
from test_crash import digest, kill_worker
from test_distributed import fully_shard, run, shard  # noqa: F401, a fixture


class Experts(torch.nn.Module):
    """Layers of two types. Each rank uses other experts in each step, in its own order, and the ranks communicate."""

    def __init__(self, width=48):
        torch.manual_seed(0)
        super().__init__()
        self.tokens = torch.nn.Embedding(300, width)
        self.norm = torch.nn.LayerNorm(width)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width).bfloat16() for _ in range(6))
        self.head = torch.nn.Linear(width, 300, bias=False)
        self.odd = torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, tokens, used):
        x = self.norm(self.tokens(tokens))
        for i in used:
            x = x + torch.tanh(self.experts[i](x.bfloat16())).float()
            total = x.detach().square().sum()
            dist.all_reduce(total)  # as experts do in the middle of a forward pass
        x = x + self.odd(x[:, :16, :16].reshape(len(x), 4, 8, 8)).sum() * 1e-3
        return self.head(x)


def experts_of(rank, step):
    return torch.randperm(6, generator=torch.Generator().manual_seed(100 * step + rank))[: 2 + step % 3].tolist()


def rows_of(rank, step):
    return torch.randint(300, (2, 25), generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, optimizer, rank, steps, losses):
    for i in steps:
        tokens = rows_of(rank, i)
        logits = model(tokens[:, :-1], experts_of(rank, i))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.max_grad_norm = 0.05 if i % 10 == 5 else 1e6
        optimizer.step()
        optimizer.zero_grad()
        losses.append(optimizer.last_grad_norm)


def same_bits(rank, kind, steps):
    parameter_arena._BLOCK_BYTES = 3000
    found = []
    for overlap in (None, "forward"):
        model = Experts()
        wrapped, options = model, {"sharding": kind, "process_group": dist.new_group()}
        if kind != "zero2":
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        if kind in ("model", "group"):
            options = {"process_group": dist.group.WORLD} if kind == "group" else {}
        optimizer = plimsoll.torch.AdamW(
            model.parameters(), lr=1e-2, model=wrapped, missing_gradients="zero", overlap=overlap, name=str(overlap),
            max_grad_norm=1e6, **options,
        )
        optimizer.open()
        losses = []
        train(wrapped, optimizer, rank, range(steps), losses)
        assert overlap is None or optimizer._overlap._arrivals.are_underway
        if rank == 0:  # one rank alone
            with torch.no_grad():
                losses.append(model.head(model.norm(model.tokens(torch.arange(9)))).sum().item())
            model.state_dict()
        train(wrapped, optimizer, rank, range(steps, steps + 2), losses)
        optimizer.synchronize()
        found.append((losses, digest(model)))
        optimizer.close()
    assert found[0] == found[1]
    return found[1][1]


@pytest.mark.parametrize("world, kind", [(2, "model"), (4, "group"), (4, "zero1"), (2, "zero2"), (4, "zero2")])
@pytest.mark.parametrize("checked", ["", "1"])
def test_same_bits(world, kind, checked, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_CHECK_OVERLAP", checked)
    found = run(same_bits, kind, 12, world=world)
    assert found == found[:1] * world
