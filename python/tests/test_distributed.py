"""Several ranks, by torch.distributed with gloo."""

import contextlib
import datetime
import functools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import plimsoll.torch
from gpt import GPT, batch, text
from nightly import nightly, nightly_rows
from plimsoll import PlimsollError, Service
from plimsoll.protocol import Kind
from plimsoll.torch.layout import Mesh
from plimsoll.torch.reducer import Reducer
from transfers import WAYS

RANKS = 2
STEPS = 8
OPTIONS = dict(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def enter(rank, world, store, environment, function, arguments, result):
    """A rank: joins the process group, runs the function, and sends what it returns."""
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300))
        returned = function(rank, *arguments)
        dist.barrier()
        result.send((returned, None))
    except BaseException:
        result.send((None, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()


def run(function, *arguments, service=None, world=RANKS):
    """What each rank returns, as JSON would hold it."""
    environment = {"PLIMSOLL_SOCKET": service.socket} if service else {}
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    results, ranks = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")  # a port that is free now may be another's when it is used
        for r in range(world):
            received, sent = context.Pipe(duplex=False)
            ranks.append(context.Process(target=enter, args=(r, world, store, environment, function, arguments, sent)))
            ranks[-1].start()
            sent.close()  # nobody but the rank holds it: a rank that is killed closes it
            results.append(received)
        found = [returned_by(result) for result in results]
        for r in ranks:
            r.join()
    failed = [f"rank {r}:\n{error}" for r, (_, error) in enumerate(found) if error]
    assert not failed, "\n".join([*failed, f"exit codes: {[r.exitcode for r in ranks]}"])
    return [returned for returned, _ in found]


def returned_by(result):
    """What a rank has returned, and its error."""
    try:
        return result.recv()
    except EOFError:
        return None, "it has ended without a word"


def killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_is_not_waited_for():
    with pytest.raises(AssertionError, match=r"rank 1:\s+it has ended without a word\s+exit codes: .1, -9."):
        run(killed)


def weights(model):
    return {n.replace("module.", ""): p.detach().float().flatten().tolist() for n, p in model.named_parameters()}


def assert_near(found, wanted, **tolerance):
    for name, values in wanted.items():
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(values), **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def own_rows(tokens, rank):
    return tokens[rank::RANKS]


@functools.lru_cache
def one_rank(dtype):
    """The weights and losses of one rank with the global batch."""
    torch.manual_seed(0)
    model = GPT().to(dtype)
    optimizer = plimsoll.torch.AdamW(model.parameters(), **OPTIONS)
    norms = []
    for i in range(STEPS):
        model.loss(batch(text(), i)).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
    return weights(model), norms


def sharded(rank, dtype, sharding, accumulate):
    torch.manual_seed(0)
    model = GPT().to(dtype)
    wrapped = DistributedDataParallel(model) if sharding == "zero1" else model
    optimizer = plimsoll.torch.AdamW(wrapped.parameters(), sharding=sharding, model=wrapped, **OPTIONS)
    optimizer.open()
    norms, held = [], sum(p.session.elements for p in optimizer._shards)
    for i in range(STEPS):
        rows = own_rows(batch(text(), i), rank)
        for part in rows.chunk(accumulate):
            logits = wrapped(part[:, :-1]).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss / accumulate).backward()
        assert (sharding == "zero2") == all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
    return weights(model), norms, held, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("own_service", [False, True])
@pytest.mark.parametrize(
    "dtype, sharding, accumulate",
    [
        (torch.float32, "zero1", 1),
        (torch.float32, "zero2", 1),
        (torch.float32, "zero2", 2),
        (torch.bfloat16, "zero1", 1),
        (torch.bfloat16, "zero2", 1),
    ],
)
def test_sharded_as_one_rank(service, dtype, sharding, accumulate, own_service):
    if own_service and (dtype is torch.bfloat16 or accumulate > 1):
        pytest.skip("one of each is enough")
    wanted, norms = one_rank(dtype)
    ranks = run(sharded, dtype, sharding, accumulate, service=None if own_service else service)
    assert ranks[0][0] == ranks[1][0]  # the ranks agree to the bit
    tolerance = dict(rtol=1e-3, atol=2e-5) if dtype is torch.float32 else dict(rtol=5e-2, atol=5e-3)
    assert_near(ranks[0][0], wanted, **tolerance)
    assert ranks[0][1] == ranks[1][1] == pytest.approx(norms, rel=1e-4 if dtype is torch.float32 else 2e-2)
    assert sum(r[2] for r in ranks) == ranks[0][3] and abs(ranks[0][2] - ranks[1][2]) <= 1


def not_averaged(rank, how):
    torch.manual_seed(0)
    model = GPT()
    wrapped = DistributedDataParallel(model)
    options = {"process_group": dist.group.WORLD} if how == "copies" else {"sharding": "zero1"}
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, **options, **OPTIONS)
    optimizer.open()

    def backward(i, module):
        rows = own_rows(batch(text(), i), rank)
        logits = module(rows[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()

    before = weights(model)
    with wrapped.no_sync() if how == "no_sync" else contextlib.nullcontext():
        backward(0, wrapped if how == "no_sync" else model)
    with pytest.raises(PlimsollError, match="the gradients of the ranks differ, so they were not averaged: wrap the model in"):
        optimizer.step()
    assert weights(model) == before
    optimizer.zero_grad()
    backward(0, wrapped)
    # Clipped on devices that differ in the last bit.
    for p in model.parameters():
        p.grad.mul_(0.5 * (1 + rank * 2.0**-22))
    optimizer.step()
    return weights(model)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("how", ["zero1", "no_sync", "copies"])
def test_gradients_that_nobody_has_averaged_are_refused(service, how, way):
    ranks = run(not_averaged, how, service=service)
    assert_near(ranks[0], ranks[1], rtol=1e-5, atol=1e-6)


def replicated(rank, bucket_view):
    torch.manual_seed(0)
    model = GPT()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    optimizer = plimsoll.torch.AdamW(wrapped.parameters(), **OPTIONS)
    optimizer.open()
    for i in range(STEPS):
        rows = own_rows(batch(text(), i), rank)
        logits = wrapped(rows[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_replicated_as_one_rank(service, bucket_view):
    ranks = run(replicated, bucket_view, service=service)
    assert ranks[0] == ranks[1]
    assert_near(ranks[0], one_rank(torch.float32)[0], rtol=1e-3, atol=2e-5)


def in_copies(rank, directory, kind):
    """Every rank has the whole state, and hears of the others by its group, or by that of the model."""
    torch.manual_seed(0)
    model = GPT()
    wrapped = DistributedDataParallel(model)
    known = {
        "group": {"process_group": dist.group.WORLD, "model": model},
        "model": {"model": wrapped},
        "alone": {"model": model},
    }
    optimizer = plimsoll.torch.AdamW(wrapped.parameters(), **known[kind], **OPTIONS)
    optimizer.open()
    for i in range(2):
        rows = own_rows(batch(text(), i), rank)
        logits = wrapped(rows[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind == "alone":
        with pytest.raises(RuntimeError, match="does not communicate with the others: give the optimizer the ranks"):
            optimizer.save(directory)
        optimizer.close()
        with pytest.raises(PlimsollError, match="found its state at step 2, but cannot ask the other ranks for theirs: "):
            optimizer.open()
        optimizer.load(f"{directory}/checkpoint")
    else:
        optimizer.save(directory)
        optimizer.saved()
        optimizer.close()
        optimizer.open()
    return weights(model), optimizer.resumed_step, optimizer.last_grad_norm


def test_copies_are_saved_and_go_on_together(tmp_path):
    (tmp_path / "alone").mkdir()
    found = []
    for kind, directory in ("group", "group"), ("model", "alone/checkpoint"), ("alone", "alone"):
        service = Service()
        found += run(in_copies, str(tmp_path / directory), kind, service=service)
        service.close()
    assert found == found[:1] * 6 and found[0][1] == 2
    torch.manual_seed(1)
    model = GPT()
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model)
    optimizer.load(tmp_path / "group")
    assert weights(model) == found[0][0]


def fully_sharded(rank, dtype):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = GPT(vocabulary=257).to(dtype)  # does not divide by two
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, **OPTIONS)
    norms = []
    for i in range(STEPS):
        rows = own_rows(batch(text(), i), rank)
        logits = model(rows[:, :-1]).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
    state = optimizer.state_dict()
    moment = state["state"][0]["exp_avg"]
    assert type(moment).__name__ == "DTensor" and moment.shape == (257, 32)
    reference = torch.optim.AdamW(model.parameters())
    reference.load_state_dict(state)
    optimizer.load_state_dict(reference.state_dict())
    full = {n: p.full_tensor().detach().float().flatten().tolist() for n, p in model.named_parameters()}
    return full, norms, moment.full_tensor().flatten().tolist()


def test_fully_sharded_as_one_rank(service):
    pytest.importorskip("torch.distributed.fsdp", reason="no fully_shard in this torch")
    torch.manual_seed(0)
    model = GPT(vocabulary=257)
    optimizer = plimsoll.torch.AdamW(model.parameters(), **OPTIONS)
    norms = []
    for i in range(STEPS):
        model.loss(batch(text(), i)).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
    ranks = run(fully_sharded, torch.float32, service=service)
    assert_near(ranks[0][0], weights(model), rtol=1e-3, atol=2e-5)
    assert ranks[0][1] == ranks[1][1] == pytest.approx(norms, rel=1e-4)
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(torch.tensor(ranks[0][2]), moment.flatten(), rtol=1e-3, atol=1e-6)


def shard(model, *shape):
    """Shards a model on a mesh: replicas and shards, or shards alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full(model):
    return {n: p.full_tensor().detach().float().flatten().tolist() for n, p in model.named_parameters()}


def held(model):
    """The bits that this rank holds."""
    return {n: p.to_local().detach().view(torch.uint8).flatten().tolist() for n, p in model.named_parameters()}


def losses_of(model, optimizer, rank, steps, clip=None):
    """Trains; the global loss of every step."""
    losses, world = [], dist.get_world_size()
    for i in steps:
        rows = batch(text(), i)[rank::world]
        logits = model(rows[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        if clip is not None:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor().item())
        optimizer.step()
        if clip is None:
            losses.append(optimizer.last_grad_norm)
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def hybrid(rank, shape, dtype, options):
    torch.manual_seed(0)
    model = shard(GPT(vocabulary=257).to(dtype), *shape)
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, **OPTIONS, **options)
    losses = losses_of(model, optimizer, rank, range(STEPS))
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert moment.placements == model.tokens.weight.placements and moment.shape == (257, 32)
    return losses, full(model), held(model), moment.full_tensor().flatten().tolist(), optimizer.skipped


def hybrid_of_torch(rank, shape):
    torch.manual_seed(0)
    model = shard(GPT(vocabulary=257), *shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"])
    losses = losses_of(model, optimizer, rank, range(STEPS), clip=OPTIONS["max_grad_norm"])
    return losses, full(model), optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().flatten().tolist()


@pytest.fixture
def fully_shard():
    return pytest.importorskip("torch.distributed.fsdp", reason="no fully_shard in this torch").fully_shard


@functools.lru_cache
def by_torch():
    return run(hybrid_of_torch, (2, 2), world=4)[0]


@pytest.mark.parametrize("shape", [(2, 2), *nightly((4, 1))])
def test_hybrid_as_torch(service, fully_shard, shape):
    losses, weights_, moment = by_torch()
    found = run(hybrid, shape, torch.float32, {}, service=service, world=4)
    for r in range(4):
        assert found[r][0] == pytest.approx(losses, rel=1e-4)  # and norms
        assert found[r][2] == found[r % shape[1]][2]  # replicas are equal to the bit
        assert found[r][4] == 0
    assert_near(found[0][1], weights_, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(torch.tensor(found[0][3]), torch.tensor(moment), rtol=1e-3, atol=1e-6)


def test_hybrid_with_moments_that_are_rounded_at_random(service, fully_shard):
    found = run(hybrid, (2, 2), torch.bfloat16, {"moments": "int8"}, service=service, world=4)
    assert found[0][2:4] == found[2][2:4] and found[1][2:4] == found[3][2:4]
    assert found[0][0] == pytest.approx(by_torch()[0], rel=5e-2)


def not_finite(rank, victim, scaled):
    """One rank alone finds a gradient that is not finite, or has a loss that is too large for its type."""
    torch.manual_seed(0)
    model = shard(GPT(vocabulary=257), 2, 2)
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, **({} if scaled else OPTIONS))
    optimizer.open()
    before = held(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    for spoil in (True, False):
        rows = batch(text(), 0)[rank : rank + 1]
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        scaler.scale(loss * torch.inf if scaled and spoil and rank == victim else loss).backward()
        if spoil and not scaled and rank == victim:
            model.head.weight.grad.to_local()[3, 5] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (held(model) == before) == spoil
    return optimizer.skipped, held(model), scaler.get_scale() if scaled else 1


@pytest.mark.parametrize("victim, scaled", [(0, False), (3, True), *nightly_rows((3, False))])
def test_hybrid_ranks_skip_a_step_together(service, fully_shard, victim, scaled):
    found = run(not_finite, victim, scaled, service=service, world=4)
    assert [f[0] for f in found] == [1] * 4 and {f[2] for f in found} == {4 if scaled else 1}
    assert found[0][1] == found[2][1] and found[1][1] == found[3][1]


def groups_of(model):
    """Parameter groups that alternate, so that every shard has several chunks."""
    few = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": few, "weight_decay": 0.0}, {"params": [p for p in model.parameters() if p.dim() >= 2]}]


def saves(rank, directory, shape):
    torch.manual_seed(0)
    model = shard(GPT(vocabulary=257).bfloat16(), *shape)
    optimizer = plimsoll.torch.AdamW(groups_of(model), model=model, **OPTIONS)
    losses_of(model, optimizer, rank, range(3))
    assert optimizer.save(directory, {"rank": rank}) == 3
    losses_of(model, optimizer, rank, range(3, 4))  # while it is written
    assert optimizer.saved() == 3
    optimizer.load(directory)
    return full(model), moments_of(optimizer)


def loads(rank, directory, shape):
    torch.manual_seed(5)
    model = shard(GPT(vocabulary=257).bfloat16(), *shape)
    optimizer = plimsoll.torch.AdamW(groups_of(model), model=model, **OPTIONS)
    training = optimizer.load(directory)
    assert optimizer.resumed_step == 3
    return full(model), moments_of(optimizer), training


def moments_of(optimizer):
    entries = optimizer.state_dict()["state"]
    whole = {i: {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in e.items()} for i, e in entries.items()}
    return {f"{i} {n}": t.flatten().tolist() for i, e in whole.items() for n, t in e.items()}


def one_process(directory, trains):
    torch.manual_seed(0)
    model = GPT(vocabulary=257).bfloat16()
    optimizer = plimsoll.torch.AdamW(groups_of(model), model=model, **OPTIONS)
    if trains:
        for i in range(3):
            model.loss(batch(text(), i)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.save(directory, {"rank": 0})
        assert optimizer.saved() == 3
    else:
        optimizer.load(directory)
    return weights(model), moments_of(optimizer)


def test_hybrid_checkpoint_is_loaded_anywhere(tmp_path, fully_shard):
    directory = str(tmp_path)
    wanted = run(saves, directory, (2, 2), world=4)
    assert all(w == wanted[0] for w in wanted)
    subprocess.run([os.environ["PLIMSOLL"], "checkpoint", "verify", directory], check=True, stdout=subprocess.DEVNULL)
    saved = [sum(p["count"] for p in json.loads(f.read_text())["pieces"]) for f in tmp_path.glob("step-*/rank-*.json")]
    assert len(saved) == 4 and min(saved) > 0  # each replica its share
    assert sum(saved) == sum(p.numel() for p in GPT(vocabulary=257).parameters())  # and all once
    again = run(loads, directory, (2, 2), world=4)
    assert [a[2] for a in again] == [{"rank": r} for r in range(4)]
    for found in again + run(loads, directory, (4, 1), world=4) + run(loads, directory, (2,), world=2):
        assert found[:2] == wanted[0]
    assert one_process(directory, trains=False) == wanted[0]


def on_a_mesh_in_another_order(rank, directory, order):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 8)
    wanted = weights(model)
    names = ("replicate", "shard")[-torch.tensor(order).dim() :]
    fully_shard(model, mesh=DeviceMesh("cpu", order, mesh_dim_names=names))
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model)
    optimizer.save(directory, {"rank": rank})
    optimizer.saved()
    assert optimizer.load(directory) == {"rank": rank} and full(model) == wanted
    return wanted


@pytest.mark.parametrize("order", [[1, 0], [[3, 2], [1, 0]]], ids=str)
def test_checkpoint_of_ranks_in_another_order(tmp_path, fully_shard, order):
    wanted, *_ = run(on_a_mesh_in_another_order, str(tmp_path), order, world=torch.tensor(order).numel())
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 8)
    plimsoll.torch.AdamW(model.parameters(), model=model).load(tmp_path)
    assert weights(model) == wanted


def test_checkpoint_of_one_process_is_loaded_by_replicas(tmp_path, fully_shard):
    wanted = one_process(tmp_path, trains=True)
    for found in run(loads, str(tmp_path), (2, 2), world=4):
        assert found == (*wanted, {"rank": 0})


def small(directory, shape, loads):
    """A model of two rows."""
    torch.manual_seed(1 if loads else 0)
    model = torch.nn.Linear(5, 2).bfloat16()
    if shape:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, **OPTIONS)
    training = None
    if loads:
        training = optimizer.load(directory)
        assert optimizer.resumed_step == 3
    else:
        for i in range(3):
            model(torch.arange(10, dtype=torch.bfloat16).reshape(2, 5) + i).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.save(directory, {"epoch": 1}) == 3
        assert optimizer.saved() == 3
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().tolist() for n, p in model.named_parameters()}, training


def a_small_one(rank, directory, shape, loads):
    return small(directory, shape, loads)


@pytest.mark.parametrize("shape", [(2, 3), *nightly((4,))], ids=str)
def test_checkpoint_of_a_model_with_fewer_rows_than_ranks(tmp_path, service, fully_shard, shape):
    saved = run(a_small_one, str(tmp_path), shape, False, service=service, world=math.prod(shape))
    assert all(s == saved[0] for s in saved)
    subprocess.run([os.environ["PLIMSOLL"], "checkpoint", "verify", str(tmp_path)], check=True, stdout=subprocess.DEVNULL)
    wanted = (saved[0][0], {"epoch": 1})
    assert small(str(tmp_path), (), True) == wanted
    for found in run(a_small_one, str(tmp_path), (4,), True, world=4):
        assert found == wanted


def tiny(rank, directory, sharding, loads):
    """A model of three elements, of two types."""
    torch.manual_seed(1 if loads else 0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False).bfloat16(), torch.nn.PReLU())
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding=sharding, model=model, **OPTIONS)
    if loads:
        optimizer.load(directory)
        return weights(model), optimizer.resumed_step
    optimizer.open()
    for i in range(3):
        for p in model.parameters():
            (p * (i + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(directory)
    return weights(model), optimizer.saved()


@pytest.mark.parametrize("sharding", ["zero2", *nightly("zero1")])
def test_checkpoint_of_a_model_with_fewer_elements_than_ranks(tmp_path, sharding):
    saved = run(tiny, str(tmp_path), sharding, False, world=4)
    assert saved[0][1] == 3 and saved == saved[:1] * 4
    for other, world in ("zero1", 4), ("zero2", 3), (None, 1):
        assert run(tiny, str(tmp_path), other, True, world=world) == saved[:1] * world


def with_torch_checkpoints(rank, directory, shape):
    """Goes back by means of torch.distributed.checkpoint, and makes the same step again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    def step(i):
        losses_of(model, optimizer, rank, range(i, i + 1))
        return held(model)

    torch.manual_seed(0)
    model = shard(GPT(vocabulary=257).bfloat16(), *shape)
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model, **OPTIONS)
    step(0), step(1)
    weights_, state = get_state_dict(model, optimizer)
    entry = state["state"]["tokens.weight"]
    assert entry["step"] == 2 and entry["exp_avg"].placements == model.tokens.weight.placements
    dcp.save({"model": weights_, "optimizer": state}, checkpoint_id=directory)
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    wanted = step(2)
    weights_, state = get_state_dict(model, optimizer)
    assert state["state"]["tokens.weight"]["step"] == 3  # to ask for it makes no step
    dcp.load({"model": weights_, "optimizer": state}, checkpoint_id=directory)
    set_model_state_dict(model, weights_)
    set_optimizer_state_dict(model, optimizer, state)
    assert step(2) == wanted
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole[0] if rank == 0 else {}, options=options)
    set_optimizer_state_dict(model, optimizer, whole[1] if rank == 0 else {}, options=options)
    assert step(2) == wanted
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(other.state_dict())
    return wanted


@pytest.mark.parametrize("shape", [(2,), *nightly((2, 2))])
def test_torch_distributed_checkpoint(tmp_path, service, fully_shard, shape):
    found = run(with_torch_checkpoints, str(tmp_path), shape, service=service, world=2 * len(shape))
    assert found == found[:2] * len(shape) and found[0] != found[1]


def placed(rank):
    """Whatever else parameters can be placed as: the message, before there is any session."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor

    plane, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    cube = init_device_mesh("cpu", (1, 2, 2))
    messages = []
    for mesh, placements in [
        (plane, (Shard(0), Shard(0))),
        (plane, (Shard(0), Replicate())),
        (plane, (Replicate(), Shard(1))),
        (plane, (Replicate(), Replicate())),
        (cube, (Replicate(), Replicate(), Shard(0))),
        (line, (Shard(1),)),
        (line, (Replicate(),)),
        (line, (Partial(),)),
    ]:
        if placements == (Partial(),):
            tensor = DTensor.from_local(torch.randn(8, 8), mesh, placements)
        else:
            tensor = distribute_tensor(torch.randn(8, 8), mesh, placements)
        parameter = torch.nn.Parameter(tensor)
        optimizer = plimsoll.torch.AdamW([parameter], named_parameters=[("weight", parameter)])
        with pytest.raises(ValueError) as raised:
            optimizer.open()
        assert optimizer._shards is None
        messages.append((str(placements), str(raised.value)))
    return messages


def test_other_placements_are_refused(fully_shard):
    for placements, message in run(placed, world=4)[0]:
        assert message.startswith(
            f"parameter weight is placed as {placements}: expected (Shard(dim=0),) or (Replicate(), Shard(dim=0)), as fully_shard"
        )


OVERFLOW = 3  # the step whose gradients overflow on one rank


def overflowing(rank, way, omitted):
    """fp16 with a GradScaler. Where a step is omitted, it never was."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model = GPT().to(torch.float16)
    if way == "shard":
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        sharding = None
    else:
        model, sharding = DistributedDataParallel(model), "zero1"
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, sharding=sharding, model=model)
    optimizer.open()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for i in range(STEPS):
        if omitted and i == OVERFLOW:
            scaler.scale(torch.ones(()))
            scaler.update(scaler.get_scale() / 2)
            continue
        rows = own_rows(batch(text(), i), rank)
        logits = model(rows[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        overflows = i == OVERFLOW and rank == 1
        # Too much for fp16, and not infinite itself.
        scaler.scale(loss * 2.0**18 if overflows and way == "loss" else loss).backward()
        if overflows and way == "shard":
            next(p for n, p in model.named_parameters() if "up.weight" in n).grad.to_local()[3, 5] = float("inf")
        before = weights(model) if way == "loss" else None
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if i == OVERFLOW and way == "loss":
            assert weights(model) == before
    full = {n: p.full_tensor() if way == "shard" else p for n, p in model.named_parameters()}
    found = {n: p.detach().float().flatten().tolist() for n, p in full.items()}
    steps = [p.session.step for p in optimizer._shards]
    dist.barrier()
    optimizer.close(give_back=True)
    return found, steps, optimizer.skipped, scales


@pytest.mark.parametrize("way", ["loss", "shard"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(service, way):
    """Of the loss of one rank, or in a shard that no other rank sees."""
    if way == "shard":
        pytest.importorskip("torch.distributed.fsdp", reason="no fully_shard in this torch")
    ranks = run(overflowing, way, False, service=service)
    without = run(overflowing, way, True, service=service)
    assert ranks[0] == ranks[1] and without[0] == without[1]
    scales = [2.0**10] * OVERFLOW + [2.0**9] * (STEPS - OVERFLOW)
    assert ranks[0][1:] == ([STEPS - 1], 1, scales)
    assert without[0][0] == ranks[0][0] and without[0][1:3] == ([STEPS - 1], 0)


def disagreeing(rank):
    """Gradients that are infinite on one rank only, which DistributedDataParallel would not leave so."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8).to(torch.float16))
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding="zero1")
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0**5, backoff_factor=0.3)

    def step(infinite):
        scaler.scale(model(torch.ones(2, 8, dtype=torch.float16)).float().mean()).backward()
        if infinite:
            for p in model.parameters():
                p.grad.fill_(float("inf"))
        before = weights(model)
        try:
            scaler.step(optimizer)
            scaler.update()
        except PlimsollError as error:
            scaler.update(3.0**4)
            return str(error), weights(model) == before
        finally:
            optimizer.zero_grad()
        return optimizer.skipped, weights(model) == before

    found = [step(False), step(rank == 1), step(False), step(False)]
    return found, [p.session.step for p in optimizer._shards], weights(model)


def test_scales_that_differ_are_noticed(service):
    ranks = run(disagreeing, service=service)
    for rank, (found, steps, _) in enumerate(ranks):
        (first, same1), (second, same2), (third, same3), last = found
        assert (first, same1) == (0, False) and (second, same2) == (1, True)
        assert same3 and "different scales" in third and ["243 here", "72.9 here"][rank] in third
        assert last == (1, False) and steps == [2]
    assert ranks[0][2] == ranks[1][2]


def saving(rank, directory, sharding, steps, resume):
    torch.manual_seed(0 if not resume else 5)
    model = GPT().bfloat16()
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding=sharding, model=model, **OPTIONS)
    optimizer.open()
    training = optimizer.load(directory) if resume else None
    first = optimizer.resumed_step
    for i in range(first, first + steps):
        model.loss(own_rows(batch(text(), i), rank)).backward()
        if sharding == "zero1":
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
    if not resume:
        optimizer.save(directory, {"epoch": 3})
        assert optimizer.saved() == steps
    with pytest.raises(RuntimeError, match="no rank has the full state"):
        optimizer.state_dict()
    return weights(model), first, training


def test_checkpoint_of_ranks_is_loaded_by_one(tmp_path):
    before = run(saving, str(tmp_path), "zero1", 3, False)
    after = run(saving, str(tmp_path), "zero2", 0, True)
    assert after[0] == after[1] == (before[0][0], 3, {"epoch": 3})
    torch.manual_seed(9)
    model = GPT().bfloat16()
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model)
    assert optimizer.load(tmp_path) == {"epoch": 3}
    assert optimizer.resumed_step == 3 and weights(model) == before[0][0]


def in_groups(rank, directory, resume):
    """Parameter groups as usual: one without weight decay, whose few elements are all of rank 0."""
    torch.manual_seed(0)
    model = GPT().bfloat16()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() < 2][:2], "weight_decay": 0.0, "lr": 1e-2},
        {"params": [p for p in model.parameters() if p.dim() >= 2], "lr": 1e-4},
    ]
    optimizer = plimsoll.torch.AdamW(groups, sharding="zero2", model=model, max_grad_norm=0.5)
    optimizer.open()
    if resume:
        optimizer.load(directory)
    first = optimizer.resumed_step
    for i in range(first, first + 2):
        model.loss(own_rows(batch(text(), i), rank)).backward()
        optimizer.step()
    optimizer.save(directory)
    assert optimizer.saved() == first + 2
    return weights(model)


def test_groups_that_not_all_ranks_have(tmp_path):
    once = run(in_groups, str(tmp_path / "once"), False)
    twice = run(in_groups, str(tmp_path / "once"), True)
    assert once[0] == once[1] and twice[0] == twice[1]
    torch.manual_seed(0)
    model = GPT().bfloat16()
    few = [p for p in model.parameters() if p.dim() < 2][:2]
    many = [p for p in model.parameters() if p.dim() >= 2]
    optimizer = plimsoll.torch.AdamW(
        [{"params": few, "weight_decay": 0.0, "lr": 1e-2}, {"params": many, "lr": 1e-4}], model=model
    )
    optimizer.load(tmp_path / "once")
    assert optimizer.resumed_step == 4 and weights(model) == twice[0]


def apart(rank):
    """One rank makes a step that the other does not know of."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding="zero1", model=model)
    optimizer.open()
    session = optimizer._shards[0].session
    if rank == 0:
        session.begun(session.begin(1.0, optimizer._numbers(), wait=True))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(PlimsollError, match="at different steps: .* load the last checkpoint"):
        optimizer.step()
    with pytest.raises(PlimsollError, match="as prepared: the prepared step is 0"):  # nobody takes these gradients for others
        session.begun(session.begin(1.0, None, wait=True))


def test_ranks_at_different_steps_are_noticed():
    run(apart)


def opened(**options):
    torch.manual_seed(0)
    model = GPT()
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding="zero1", model=model, **options)
    optimizer.open()
    return model, optimizer


def stale(rank, directory):
    """One rank finds that another step was saved than it had begun to save."""
    _, optimizer = opened()
    optimizer.save(directory)
    if rank == 1:
        optimizer._saver._saving = (directory, 77, "")
    with pytest.raises(
        PlimsollError, match="^step 77 was not saved" if rank else "failed on 1 of 2 ranks: rank 1: .*step 77 was not"
    ):
        optimizer.saved()
    return [str(p) for p in pathlib.Path(directory).glob("*")]


def test_a_rank_that_cannot_save_fails_all(tmp_path):
    for left in run(stale, str(tmp_path)):
        assert not any("step-00000000" in p and ".saving" not in p for p in left), json.dumps(left)


def saving_again(rank, directory):
    """A rank that fails keeps no other waiting, and what is saved afterwards is whole."""
    model, optimizer = opened()
    failing = pathlib.Path(directory, "file", "checkpoints") if rank else pathlib.Path(directory, "first")
    pathlib.Path(directory, "file").touch()
    with pytest.raises(
        NotADirectoryError if rank else PlimsollError,
        match="" if rank else "^saving to .* failed on 1 of 2 ranks: rank 1: NotADir",
    ):
        optimizer.save(failing)
    with pytest.raises(RuntimeError, match="no save is in progress"):
        optimizer.saved()
    saved = optimizer._shards[0].session.saved

    def failed():
        """What the service says of the save in vain, should that have failed meanwhile: once."""
        optimizer._shards[0].session.saved = saved
        raise PlimsollError("of the save in vain")

    optimizer._shards[0].session.saved = failed
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.save(directory, {"rank": rank}) == 1 and optimizer.saved() == 1
    return weights(model)


def test_a_save_that_one_rank_cannot_begin(tmp_path):
    wanted, _ = run(saving_again, str(tmp_path))
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001"]
    model = GPT()
    plimsoll.torch.AdamW(model.parameters(), model=model).load(tmp_path)
    assert weights(model) == wanted


def committing(rank, directory):
    """What the first rank finds wrong with the files of all, all hear."""
    _, optimizer = opened()
    optimizer.save(directory)
    optimizer._shards[0].session.saved()
    dist.barrier()
    if rank == 1:
        manifest, *_ = pathlib.Path(directory).glob(".saving-*/rank-00001-*.json")
        manifest.unlink()
    dist.barrier()
    with pytest.raises(PlimsollError, match="failed on 1 of 2 ranks: rank 0: ServiceError: commit: " if rank else "^commit: "):
        optimizer.saved()
    optimizer.save(directory)
    assert optimizer.saved() == 0


def test_a_commit_that_fails(tmp_path):
    run(committing, str(tmp_path))
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000000"]


def two_jobs(rank, directory):
    """One has saved when the other begins to, which fails on a rank: of that rank there is the one's file, of the other the other's."""
    (model, one), (_, other) = opened(), opened()
    one.save(directory)
    one._shards[0].session.saved()
    dist.barrier()
    with torch.no_grad():
        for group in other.param_groups:
            for p in group["params"]:
                p.add_(1)
    if rank == 1:
        other._shards[0].session.save = lambda *_, **__: (_ for _ in ()).throw(OSError("this rank cannot"))
    with pytest.raises(Exception, match="this rank cannot"):
        other.save(directory)
    if rank == 0:
        other._shards[0].session.saved()
    with pytest.raises(PlimsollError, match="rank-00000-of-00002-fp32.json: this is of save .*, but the commit is of save"):
        one.saved()
    assert not list(pathlib.Path(directory).glob("step-*"))
    one.save(directory)
    assert one.saved() == 0
    return weights(model)


def test_two_jobs_that_save_one_step(tmp_path):
    wanted, _ = run(two_jobs, str(tmp_path))
    model = GPT()
    plimsoll.torch.AdamW(model.parameters(), model=model).load(tmp_path)
    assert weights(model) == wanted


def loading(rank, directory):
    """All load, or none goes on: from a folder that one does not see, and from folders of different steps."""
    model, optimizer = opened()
    for step in range(2):
        optimizer.save(f"{directory}/{step}", {"rank": rank})
        optimizer.saved()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    with pytest.raises(
        PlimsollError, match="^load: " if rank else "^loading .* failed on 1 of 2 ranks: rank 1: ServiceError: load: "
    ):
        optimizer.load(f"{directory}/{2 if rank else 1}")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        PlimsollError, match="the fp32 state of a checkpoint was loaded, but the others' was not: load again"
    ):
        optimizer.step()
    with pytest.raises(PlimsollError, match="have loaded different steps from .*: 0, 1; load one"):
        optimizer.load(f"{directory}/{rank}")
    assert optimizer.load(f"{directory}/1") == {"rank": rank} and optimizer.resumed_step == 1
    return weights(model)


def test_a_load_that_fails_on_one_rank(tmp_path):
    first, second = run(loading, str(tmp_path))
    assert first == second


def giving(rank, wrong, is_open):
    """A rank whose state does not fit keeps no other waiting, and none has changed."""
    model, optimizer = opened()
    reference = torch.optim.AdamW(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    reference.step()
    whole, damaged = reference.state_dict(), reference.state_dict()
    if wrong == "shape":
        damaged["state"] = {i: {**entry, "exp_avg": torch.ones(99)} for i, entry in damaged["state"].items()}
    else:
        damaged["param_groups"] = 2 * damaged["param_groups"]
    if not is_open:
        optimizer.close(give_back=True)
    with pytest.raises(ValueError if rank else PlimsollError) as raised:
        optimizer.load_state_dict(damaged if rank else whole)
    assert optimizer.param_groups[0]["lr"] == 1e-3 and optimizer.resumed_step == 0
    optimizer.load_state_dict(whole)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.resumed_step == 1
    optimizer.step()
    return str(raised.value), weights(model)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    "wrong, message", [("shape", "has the shape (99,)"), ("groups", "different number of parameter groups")]
)
def test_a_state_that_does_not_fit_one_rank(wrong, message, is_open):
    (first, *same), (second, *other) = run(giving, wrong, is_open)
    assert message in second
    assert first == f"load_state_dict failed on 1 of 2 ranks: rank 1: ValueError: {second}"
    assert same == other


def not_writing(rank, loads):
    """A rank that cannot write its state, as for want of a service, keeps no other waiting for its parameters."""
    model, optimizer = opened()
    state = torch.optim.AdamW(model.parameters()).state_dict()
    state["state"] = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(256, 32), "exp_avg_sq": torch.ones(256, 32)}}
    if not loads:
        optimizer.close(give_back=True)
    set_step = plimsoll.Session.set_step

    def fail(session, step, **options):
        raise PlimsollError("no service")

    if rank:
        plimsoll.Session.set_step = fail
    with pytest.raises(PlimsollError) as raised:
        optimizer.load_state_dict(state) if loads else optimizer.open()
    plimsoll.Session.set_step = set_step
    optimizer.load_state_dict(state)
    return str(raised.value), optimizer.resumed_step, weights(model)


@pytest.mark.parametrize("loads, what", [(True, "load_state_dict"), (False, "opening the state")])
def test_a_state_that_one_rank_cannot_write(loads, what):
    (first, *same), (second, *other) = run(not_writing, loads)
    assert first == f"{what} failed on 1 of 2 ranks: rank 1: PlimsollError: {second}" and second == "no service"
    assert same == other and same[0] == 1


def reloading(rank, sharded):
    """Weights that are loaded after the first step are those that the next one goes on from."""
    torch.manual_seed(0)
    model = GPT()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=0.5, sharding=None if sharded else "zero1", model=model)

    def step():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.full_like(p, 3.0))
    step()
    return sorted({x for p in model.parameters() for x in (p.to_local() if sharded else p).flatten().tolist()})


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_are_loaded_after_a_step(request, sharded):
    if sharded:
        request.getfixturevalue("fully_shard")
    assert run(reloading, sharded) == [[2.5], [2.5]]


def opening(rank, directory):
    """A rank that finds no service keeps no other waiting for it."""
    failure = "nowhere" if rank else "^opening the state failed on 1 of 2 ranks: rank 1: .*nowhere"
    with pytest.raises(Exception, match=failure):
        opened(socket=f"{directory}/nowhere" if rank else None)
    model, optimizer = opened()
    return weights(model), optimizer.resumed_step


def test_a_rank_that_cannot_open(tmp_path, service):
    first, second = run(opening, str(tmp_path), service=service)
    assert first == second and first[1] == 0


def failing(rank, having):
    """A rank whose gradients cannot be used keeps no other waiting, and the next step is one of all."""
    model, optimizer = opened(max_grad_norm=0.5, missing_gradients="refuse")
    parameters = list(model.parameters())

    def give(parameters):
        for p in parameters:
            p.grad = torch.full_like(p, 0.25)

    give(parameters[:having] if rank else parameters)
    before = weights(model)
    with pytest.raises(RuntimeError if rank and having else PlimsollError) as raised:
        optimizer.step()
    assert weights(model) == before and optimizer._shards[0].session.step == 0
    if rank:
        give(parameters[having:])
    optimizer.step()  # with gradients of which some are those of before
    return str(raised.value), weights(model), optimizer._shards[0].session.step, optimizer.last_grad_norm


def test_a_step_that_one_rank_cannot_make():
    (first, *same), (second, *other) = run(failing, 3)
    assert "parameters have no gradient, " in second
    assert first == f"step 1 failed on 1 of 2 ranks: rank 1: RuntimeError: {second}"
    assert same == other and same[1] == 1
    assert same[2] == pytest.approx(0.25 * math.sqrt(sum(len(x) for x in same[0].values())))


def test_gradients_on_one_rank_only():
    (first, *same), (second, *other) = run(failing, 0)
    assert first.startswith("1 of 2 ranks have gradients, and this one: ")
    assert second.startswith("1 of 2 ranks have gradients, and not this one: ")
    assert same == other and same[1] == 1


def interrupted(rank, interrupts):
    """What was under way at an interrupt is sent again when the next gradients are there already."""
    plimsoll.torch.gradient_arena._REDUCING_BYTES = 0
    torch.manual_seed(0)
    model = GPT()
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding="zero2", model=model, missing_gradients="refuse")
    optimizer.open()
    session = optimizer._shards[0].session
    receive, take = session._receive, plimsoll.connection._receive

    def interrupt(connection):
        raise KeyboardInterrupt

    def receive_or_not():
        if session._outstanding[0].kind in (Kind.READY, Kind.CLEAR):
            plimsoll.connection._receive = interrupt
        receive()

    if interrupts:
        next(model.parameters()).sum().backward()
        session._receive = receive_or_not
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        session._receive, plimsoll.connection._receive = receive, take
        optimizer.zero_grad()
    model.loss(own_rows(batch(text(), 0), rank)).backward()
    optimizer.step()
    return weights(model)


def test_gradients_after_an_interrupt_while_others_were_discarded():
    assert run(interrupted, True) == run(interrupted, False)


def out_of_touch(rank):
    """A rank that does not hear whether the others make the step keeps what it has prepared, to make it later."""
    model, optimizer = opened()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if rank == 1:
        reduce = optimizer._shards.ranks.reduce

        def unheard(total):
            reduce(total)
            raise RuntimeError("connection reset by peer")

        optimizer._shards.ranks.reduce = unheard
        with pytest.raises(RuntimeError, match="connection reset by peer"):
            optimizer.step()
        session = optimizer._shards[0].session
        session.begun(session.begin(1.0, None, wait=True))
    else:
        optimizer._shards[0].parameters.pull = lambda **_: None  # which the other takes no part in
        optimizer.step()
    return optimizer._shards[0].session.step


def test_what_was_prepared_outlives_the_process_group():
    assert run(out_of_touch) == [1, 1]


def without_service(rank):
    """Of a service that has ended on one rank's host, all hear."""
    model, optimizer = opened()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if rank == 1:
        optimizer._shards[0].session.patience = 0.1
        optimizer._shards.service.close()
    with pytest.raises(PlimsollError) as raised:
        optimizer.step()
    assert rank or optimizer._shards[0].session.step == 0
    return str(raised.value)


def test_a_service_that_ends_on_one_rank():
    first, second = run(without_service)
    assert second.startswith("the optimizer service at ")
    assert first == f"step 1 failed on 1 of 2 ranks: rank 1: PlimsollError: {second}"


class Branches(torch.nn.Module):
    """Layers of one size, of which each rank uses others."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, used):
        for i in used:
            x = self.layers[i](x).tanh()
        return x.square().sum()


def branching(rank, way, used):
    torch.manual_seed(0)
    model = Branches()
    if way == "torch":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        wrapped = model
        optimizer = plimsoll.torch.SGD(
            model.parameters(), lr=0.5, sharding="zero2", model=model, process_group=dist.new_group()
        )
        optimizer.open()
    losses = []
    for step in range(3):
        for i, of_ranks in enumerate(used):
            with wrapped.no_sync() if way == "torch" and i + 1 < len(used) else contextlib.nullcontext():
                loss = wrapped(torch.full((2, 8), 0.1 * (rank + 1) + step), of_ranks[rank])
                loss.backward()
            losses.append(loss.detach())
            dist.all_reduce(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), torch.stack(losses).tolist()


@pytest.mark.parametrize(
    "used",
    [
        [((0, 1, 2, 3), (0, 3))],  # one lacks what the other has
        [((0, 1, 3), (0, 2, 3))],  # each has what the other lacks, of the same size
        [((3, 2, 1, 0), (0, 1, 2, 3))],  # in another order
        [((0, 1), (2, 3)), ((1, 2, 3), (0, 1))],  # of two passes
    ],
    ids=str,
)
def test_ranks_that_use_other_parameters(used):
    (wanted, losses), _ = run(branching, "torch", used)
    first, second = run(branching, "ours", used)
    assert first == second and first[1] == pytest.approx(losses, rel=1e-4)
    assert_near(first[0], wanted, rtol=1e-5, atol=1e-6)


def not_alike(rank, way):
    """Ranks that do not do the same: the step fails on all, and the next is one of all."""
    torch.manual_seed(0)
    model = Branches()
    missing = "zero" if way == "decays" else "refuse"
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=0.5, sharding="zero2", model=model, missing_gradients=missing)
    optimizer.open()

    def backward(used=(0, 1, 2, 3), scale=1.0):
        model(torch.full((2, 8), 0.1 * scale), used).backward()

    message = ""
    if way == "discards":
        if rank:
            backward((1, 2), 7.0)
            optimizer.zero_grad()
        backward(scale=3.0)
    elif way == "idle":
        backward() if rank == 0 else None
    elif way == "unused":
        backward((0, rank + 1))
    if way != "decays":
        before = weights(model)
        with pytest.raises((RuntimeError, PlimsollError)) as raised:
            optimizer.step()
        message = str(raised.value)
        assert weights(model) == before
        optimizer.zero_grad()
    for _ in range(2):
        backward((0, 1, 2, 3) if way != "decays" else (0, 1, 2))
        optimizer.step()
    return message, weights(model)


_NOT_ALIKE = {
    "discards": ["some ranks have discarded gradients that others have kept"] * 2,
    "idle": ["1 of 2 ranks have gradients, and this one", "1 of 2 ranks have gradients, and not this one"],
    "unused": ["2 parameters have no gradient, layers.3.bias among them"] * 2,
    "decays": [""] * 2,
}


@pytest.mark.parametrize("way", _NOT_ALIKE)
def test_ranks_that_do_not_do_the_same(way):
    found = run(not_alike, way)
    for (message, same), wanted in zip(found, _NOT_ALIKE[way]):
        assert message.startswith(wanted) and same == weights_after(2, (0, 1, 2) if way == "decays" else (0, 1, 2, 3))


def weights_after(steps, used):
    """By torch, of one process."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        model(torch.full((2, 8), 0.1), used).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def wrapped_in_vain(rank):
    """DistributedDataParallel has averaged gradients already, and puts back those that were sent."""
    torch.manual_seed(0)
    model = Branches()
    wrapped = DistributedDataParallel(model)
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=0.5, sharding="zero2", model=model)
    optimizer.open()
    for _ in range(2):
        wrapped(torch.full((2, 8), 0.1), (0, 1, 2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_gradients_that_are_averaged_twice():
    for found in run(wrapped_in_vain):
        assert_near(found, weights_after(2, (0, 1, 2, 3)))


def of_other_ranks(rank, sharding):
    """A rank that is not in the process group that the optimizer is given."""
    model, group = Branches(), dist.new_group([0])
    optimizer = plimsoll.torch.SGD(model.parameters(), sharding=sharding, process_group=group)
    if rank == 0:
        optimizer.open()
    else:
        with pytest.raises(ValueError, match="process_group does not have this rank, 1: "):
            optimizer.open()


@pytest.mark.parametrize("sharding", [None, "zero1", "zero2"])
def test_process_group_of_other_ranks(sharding):
    run(of_other_ranks, sharding)


def waiting(rank):
    """A model whose parameters are registered in the order in which they get gradients."""
    model = Branches()
    optimizer = plimsoll.torch.SGD(model.parameters(), sharding="zero2", model=model)
    optimizer.open()
    kept = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: kept.append(sum(p.grad is not None for p in model.parameters())))
    for _ in range(2):
        model(torch.ones(2, 8), (3, 2, 1, 0)).backward()
        optimizer.step()
    return kept


def test_gradients_wait_for_each_other_in_the_first_step_only():
    for kept in run(waiting):
        assert max(kept[:8]) > 4 and max(kept[8:]) == 0


def signalled(rank, where):
    """A handler of a signal raises while ranks wait for each other: when they are through."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
    model, optimizer = opened(max_grad_norm=0.5)
    ranks = optimizer._shards.ranks
    other = ranks if hasattr(ranks, where) else optimizer._shards[0].parameters
    act = getattr(other, where)

    def interrupt(*arguments, **options):
        setattr(other, where, act)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass  # handlers run between two operations
        return act(*arguments, **options)

    def step():
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.25)
        optimizer.step()

    def load():
        optimizer.load_state_dict(state)

    state = torch.optim.AdamW(model.parameters()).state_dict()
    state["state"] = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(256, 32), "exp_avg_sq": torch.ones(256, 32)}}
    if rank:
        setattr(other, where, interrupt)
    with pytest.raises(KeyboardInterrupt) if rank else contextlib.nullcontext():
        (load if where == "gather" else step)()
    after = weights(model)
    step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return after, weights(model), optimizer._shards[0].session.step


@pytest.mark.parametrize("where", ["reduce", "pull", "_place", "gather"])
def test_an_interrupt_while_ranks_wait_for_each_other(where):
    first, second = run(signalled, where)
    assert first == second and first[2] == 2


def broken_off(rank):
    """A rank on which parameters of a step did not come makes no other step with those of the one before."""
    model, optimizer = opened()
    parameters = optimizer._shards[0].parameters
    place = parameters._place

    def fail(*_):
        parameters._place = place
        raise RuntimeError("connection reset by peer")

    if rank:
        parameters._place = fail
    for step in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if rank + step == 0:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError) as raised:
                optimizer.step()
    optimizer.close()
    optimizer.open()
    return str(raised.value), weights(model)


def test_parameters_that_have_not_come(service):
    (first, *same), (second, *other) = run(broken_off, service=service)
    assert second.startswith("the model has parameters of two steps: some of the last step have not arrived")
    assert first == f"step 2 failed on 1 of 2 ranks: rank 1: PlimsollError: {second}" and same == other


def test_a_rank_that_was_interrupted_while_it_sent_gradients(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]

    def interrupt(*_):
        raise KeyboardInterrupt

    reducer = Reducer(parameters, Mesh(world=2, groups=(None,)), torch.device("cpu"), interrupt)
    with pytest.raises(KeyboardInterrupt):
        reducer.came(parameters[1])
    for act in (lambda: reducer.came(parameters[0]), reducer.finish, reducer.discard):
        with pytest.raises(PlimsollError, match="was interrupted while it sent gradients to the others"):
            act()


# Parameters of each rank's own


def own_parameters(rank, missing, lacks):
    torch.manual_seed(rank)
    parameters = [torch.nn.Parameter(torch.randn(300 + 50 * rank).bfloat16()) for _ in range(2)]
    optimizer = plimsoll.torch.AdamW(parameters, lr=1e-2, max_grad_norm=1.0, sharding="local", missing_gradients=missing)
    norms, failure = [], None
    for step in range(4):
        for p in parameters:
            p.grad = torch.full_like(p, 1.0 + step + rank)
        if lacks and rank == 1 and step == 2:
            parameters[0].grad = None
        try:
            optimizer.step()
        except Exception as error:
            failure = str(error)
            break
        norms.append(optimizer.last_grad_norm)
    steps = [int(entry["step"]) for entry in optimizer.state.values()]
    return norms, failure, steps, [p.detach().float().sum().item() for p in parameters]


def test_ranks_with_parameters_of_their_own_step_together():
    """Nothing is gathered or averaged, and the norm is that of all gradients."""
    ranks = run(own_parameters, "refuse", False)
    squares = [sum(2 * (300 + 50 * r) * (1.0 + step + r) ** 2 for r in range(2)) for step in range(4)]
    for norms, failure, steps, sums in ranks:
        assert norms == pytest.approx([math.sqrt(s) for s in squares], rel=1e-6)
        assert failure is None and steps == [4, 4]
    assert ranks[0][3] != ranks[1][3]


def test_a_step_that_a_rank_refuses_is_made_by_none_of_those_with_their_own_parameters():
    ranks = run(own_parameters, "refuse", True)
    assert [steps for _, _, steps, _ in ranks] == [[2, 2], [2, 2]]
    assert all("1 parameters have no gradient, group0.parameter0 among them" in failure for _, failure, _, _ in ranks)


def test_a_rank_leaves_parameters_of_its_own_alone():
    ranks = run(own_parameters, "keep", True)
    assert [(failure, steps) for _, failure, steps, _ in ranks] == [(None, [4, 4]), (None, [3, 4])]


def saving_own(rank, directory):
    optimizer = plimsoll.torch.AdamW([torch.nn.Parameter(torch.ones(4))], sharding="local")
    optimizer.open()
    return [str(pytest.raises(RuntimeError, call, directory).value) for call in (optimizer.save, optimizer.load)]


def test_parameters_of_ranks_of_their_own_have_no_checkpoint(tmp_path):
    said = run(saving_own, str(tmp_path))
    assert all("sharding is 'local', so nobody knows which parameters" in text for texts in said for text in texts)
    assert os.listdir(tmp_path) == []


def test_parameters_of_ranks_of_their_own_have_no_overlap():
    with pytest.raises(ValueError, match="overlap is 'forward', but sharding is 'local': expected no sharding with it"):
        plimsoll.torch.AdamW([torch.nn.Parameter(torch.ones(4))], sharding="local", overlap="forward", model=torch.nn.Linear(1, 1))
