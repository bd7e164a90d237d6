"""What fully_shard and FullyShardedDataParallel (FSDP1) do to parameters and gradients."""

import pytest
import torch
import torch.distributed as dist

import plimsoll.torch
from gpt import GPT
from test_distributed import RANKS, fully_shard, losses_of, run, shard  # noqa: F401, a fixture


def sharded_by_fsdp1(rank, original):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = FullyShardedDataParallel(GPT(), use_orig_params=original, device_id=torch.device("cpu"))
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-3, model=model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"belongs to FullyShardedDataParallel \(FSDP1\): .*fully_shard \(FSDP2\)"):
        optimizer.open()
    assert optimizer._shards is None and all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [False, True])
def test_fsdp1_is_refused_by_name(original):
    assert run(sharded_by_fsdp1, original) == [True, True]


def gradients_come_as_they_are_reduced(rank):
    torch.manual_seed(0)
    model = shard(GPT(), RANKS)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-3, model=model)
    optimizer.open()
    optimizer.zero_grad()
    losses_of(model, optimizer, rank, range(1))
    slots = [s for shard in optimizer._shards for s in shard.slots.values()]
    model(torch.randint(0, 200, (2, 8))).sum().backward()
    # The last gradients may come after the hooks of the root module, and none waits for the step.
    brought = [s.seen is not None and s.seen.is_still(s.piece.parameter.grad) for s in slots]
    equal = [torch.equal(s.gradient, s.piece.parameter.grad.to_local().flatten()) for s in slots]
    return all(brought), all(equal), len(slots)


def calls_hooks_of_shards():
    """Whether this version of torch runs hooks on the shards: since 2.5."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)


@pytest.mark.skipif(not calls_hooks_of_shards(), reason="fully_shard of this torch runs no hooks on shards")
def test_gradients_are_copied_as_they_are_reduced(fully_shard):  # noqa: F811
    for brought, equal, slots in run(gradients_come_as_they_are_reduced):
        assert slots > 0 and brought and equal


def accumulated(rank, module, synchronizes):
    """Gradients of two backward passes, of which the first may stay on its rank."""
    torch.manual_seed(0)
    model = shard(GPT(), RANKS)
    clipped = {"max_grad_norm": 0.1} if module is plimsoll.torch else {}
    optimizer = module.AdamW(model.parameters(), lr=1e-2, **clipped)
    if clipped:
        optimizer.open()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        for last in (False, True):
            model.set_requires_gradient_sync(last or synchronizes)
            model(torch.randint(0, 200, (2, 8), generator=generator)).square().mean().backward()
        if not clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("synchronizes", [False, True])
def test_gradients_that_accumulate(fully_shard, synchronizes):  # noqa: F811
    ours = run(accumulated, plimsoll.torch, synchronizes)
    theirs = run(accumulated, torch.optim, synchronizes)
    assert ours[0] == ours[1]
    for found, wanted in zip(ours[0], theirs[0]):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=2e-5)


def offloaded(rank):
    """Parameters whose gradients a device may still be writing when hooks run."""
    torch.manual_seed(0)
    model = shard(GPT(), RANKS)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-3, model=model)
    from plimsoll.torch import layout

    layout.is_offloaded = lambda parameter: True
    optimizer.open()
    losses = losses_of(model, optimizer, rank, range(2))
    hooked = [bool(getattr(p, "_post_accumulate_grad_hooks", None)) for p in model.parameters()]
    return any(hooked), dist.get_world_size() == RANKS and all(map(torch.isfinite, map(torch.tensor, losses[1:2])))


def test_gradients_that_a_device_still_copies_are_taken_in_the_step(fully_shard):  # noqa: F811
    assert run(offloaded) == [(False, True)] * RANKS


def changed_shards(rank, module):
    """The program changes its own rows of a weight between steps, and of a gradient before one."""
    torch.manual_seed(0)
    model = shard(GPT(), RANKS)
    optimizer = module.AdamW(model.parameters(), lr=1e-2)
    if module is plimsoll.torch:
        optimizer.open()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randint(0, 200, (2, 8), generator=generator)).square().mean().backward()
        with torch.no_grad():
            model.head.weight.grad.to_local()[3, 5] = 7
            model.head.weight.to_local()[2] = 0.25
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach().flatten().tolist() for p in model.parameters()]


def test_shards_that_the_program_changes(fully_shard):  # noqa: F811
    ours, theirs = run(changed_shards, plimsoll.torch), run(changed_shards, torch.optim)
    for found, wanted in zip(ours[0], theirs[0]):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=2e-5)
