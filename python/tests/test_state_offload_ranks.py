"""StateOffload with several ranks: DistributedDataParallel, and the rows of fully_shard."""

import pytest
import torch

from gpt import GPT
from nightly import nightly
from plimsoll.torch import StateOffload
from test_distributed import RANKS, fully_shard, run, shard  # noqa: F401, a fixture


def wrapped(optimizer, wraps, **options):
    if not wraps:
        return optimizer
    return StateOffload(optimizer, chunk_bytes=20_000, **options)


def trained(rank, wraps, dtype, options):
    torch.manual_seed(0)
    model = shard(GPT().to(dtype), RANKS)
    optimizer = wrapped(torch.optim.AdamW(model.parameters(), lr=1e-2), wraps, **options)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        model(torch.randint(0, 200, (2, 8), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
    return [p.full_tensor().detach().float().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("options", [{"mode": "whole", "fraction": 0.5}, *nightly({})], ids=str)
def test_rows_of_fully_shard(fully_shard, options):  # noqa: F811
    assert run(trained, True, torch.float32, options) == run(trained, False, torch.float32, {})


def saved(rank, folder):
    """Bits before and after a load, with master weights."""
    torch.manual_seed(0)
    model = shard(GPT().bfloat16(), RANKS)
    optimizer = wrapped(torch.optim.AdamW(model.parameters(), lr=1e-2), True, master="split")
    optimizer.open()
    found = []
    for first in (0, 2):
        for step in range(2):
            generator = torch.Generator().manual_seed(2 * rank + first + step if first else step)
            model(torch.randint(0, 200, (2, 8), generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not first:
            optimizer.save(folder)
            optimizer.saved()
            found.append([p.full_tensor().detach().float().flatten().tolist() for p in model.parameters()])
    optimizer.load(folder)
    found.append([p.full_tensor().detach().float().flatten().tolist() for p in model.parameters()])
    return optimizer.resumed_step, found[0] == found[1]


def test_all_ranks_save_and_load(fully_shard, tmp_path):  # noqa: F811
    assert run(saved, str(tmp_path)) == [(2, True)] * RANKS


def orthogonalized(rank, wraps, options):
    """Rows that do not divide by the ranks, whose chunks the ranks must cut alike: all of them orthogonalize a matrix."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shards

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(*sizes, bias=False) for sizes in [(64, 3), (3, 64)] * 3))
    shards(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
    if wraps:
        optimizer = StateOffload(optimizer, **options)
        assert not optimizer._demands.recovers  # ranks that die at different chunks could not finish the step together
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("options", [{"chunk_bytes": 1024, "fraction": 0.5}, *nightly({"chunk_bytes": 1024})], ids=str)
def test_muon_orthogonalizes_whole_matrices(fully_shard, options):  # noqa: F811
    assert run(orthogonalized, True, options) == run(orthogonalized, False, {})


class Counting(torch.optim.AdamW):
    """Counts its steps in its groups, too, and goes slower by that."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


def averaged(rank, steps, folder, saves):
    """Weights after steps of DistributedDataParallel, with the same data on every rank."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)))
    optimizer = StateOffload(Counting(model.parameters()), chunk_bytes=256, model=model)
    if steps[0]:
        assert optimizer.load(folder) == {"epoch": 1} and optimizer.resumed_step == steps[0]
    for step in range(*steps):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if saves:
        optimizer.save(folder, {"epoch": 1})
        optimizer.saved()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def test_replicas_go_on_as_another_number_of_ranks(tmp_path):
    whole, *_ = run(averaged, (0, 5), str(tmp_path), False)
    run(averaged, (0, 3), str(tmp_path), True)
    for world in (1, 4):
        assert run(averaged, (3, 5), str(tmp_path), False, world=world) == [whole] * world
