"""overlap="forward" of several ranks: the bits of steps that are awaited, and no rank that waits for one that failed."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import plimsoll.torch
from gpt import GPT, batch, text
from nightly import nightly_rows
from plimsoll.client import Session
from plimsoll.errors import PlimsollError
from plimsoll.torch import parameter_arena
from test_crash import digest, kill_worker, workers
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


def slow(seconds=0.004):
    """The service of this process's sessions is slow."""
    waited = Session.waited
    Session.waited = lambda session, request: time.sleep(seconds) or waited(session, request)


def same_bits(rank, kind, steps):
    parameter_arena._BLOCK_BYTES = 3000
    if rank % 2:
        slow()
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
        assert overlap is None or not {model.tokens.weight, model.head.weight} & optimizer._overlap._uses.at_step
        train(wrapped, optimizer, rank, range(steps, steps + 2), losses)
        optimizer.synchronize()
        found.append((losses, digest(model)))
        optimizer.close()
    assert found[0] == found[1]
    return found[1][1]


@pytest.mark.parametrize(
    "world, kind, checked",
    [(2, "model", ""), (4, "zero1", ""), (2, "zero2", "1"), *nightly_rows((4, "group", "1"), (4, "zero2", ""))],
)
def test_same_bits(world, kind, checked, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_CHECK_OVERLAP", checked)
    found = run(same_bits, kind, 8, world=world)
    assert found == found[:1] * world


def of_fsdp(rank, shape, how):
    found = []
    if rank % 2:
        slow()
    for overlap in (None, "forward"):
        torch.manual_seed(0)
        model = shard(GPT(vocabulary=257).to(torch.bfloat16), *shape)
        optimizer = plimsoll.torch.AdamW(
            model.parameters(), lr=1e-2, model=model, overlap=overlap, name=str(overlap), max_grad_norm=1e6
        )
        if how == "prefetched":
            model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
        losses = []
        for i in range(7):
            if how == "unsharded":
                handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
                [handle.wait() for handle in handles]
            rows = batch(text(), i)[rank :: dist.get_world_size()]
            for part in rows.chunk(2) if i % 3 == 0 else [rows]:
                loss = F.cross_entropy(model(part[:, :-1]).float().flatten(0, 1), part[:, 1:].flatten())
                loss.backward()
            optimizer.max_grad_norm = 0.05 if i % 10 == 5 else 1e6
            optimizer.step()
            optimizer.zero_grad()
            assert overlap is None or optimizer._overlap._arrivals.are_underway
            if i % 4 == 1:
                with torch.no_grad():
                    losses.append(model(rows[:, :-1]).float().sum().item())
            losses += [loss.item(), optimizer.last_grad_norm]
        assert overlap is None or not optimizer._overlap._uses.at_step
        optimizer.synchronize()
        found.append((losses, digest(model)))
        optimizer.close()
    assert found[0] == found[1]
    return found[1][1]


@pytest.mark.parametrize(
    "shape, how, checked", [((2,), "unsharded", "1"), *nightly_rows(((2, 2), "prefetched", ""), ((2,), "", ""))]
)
def test_same_bits_with_fully_shard(shape, how, checked, fully_shard, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PLIMSOLL_CHECK_OVERLAP", checked)
    world = torch.Size(shape).numel()
    found = run(of_fsdp, shape, how, world=world)
    assert found == found[:1] * world


# Failures


def make(kind, **options):
    """A model and its optimizer, whose gradients the program makes."""
    torch.manual_seed(0)
    model, known = GPT().to(torch.bfloat16), {"sharding": kind}
    if kind == "fsdp":
        model, known = shard(model, dist.get_world_size()), {}
    elif kind == "copies":
        known = {"process_group": dist.group.WORLD}
    optimizer = plimsoll.torch.AdamW(
        model.parameters(), lr=1e-2, model=model, overlap="forward", max_grad_norm=1e6, **known, **options
    )
    optimizer.open()
    return model, optimizer


def backward(model, i):
    model.loss(batch(text(), i)).backward()


def killed_and_interrupted(rank, kind):
    """Rank 1 kills its service in two steps, and then is interrupted while modules wait."""
    parameter_arena._BLOCK_BYTES = 3000
    model, optimizer = make(kind)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for i in range(6):
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and i in (1, 2):
            kill_worker(optimizer._shards.service)
        if rank == 1 and i == 3:
            waited = Session.waited
            slow(0.01)
        if rank == 1 and i > 3 and kind != "fsdp":  # the others would wait in its all-gather
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                with torch.no_grad():
                    model.loss(batch(text(), i))
                time.sleep(60)
            torch.set_grad_enabled(True)  # an interrupt may come between the two halves of no_grad
    optimizer.synchronize()
    if rank == 1:
        Session.waited = waited
    return digest(model), undisturbed(rank, kind, name="other")


def undisturbed(rank, kind, **options):
    model, optimizer = make(kind, **options)
    for i in range(6):
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return digest(model)


@pytest.mark.parametrize("kind", ["copies", "zero2", "fsdp"])
def test_a_service_that_is_killed_and_a_rank_that_is_interrupted(kind, fully_shard):  # noqa: F811
    found = sum(run(killed_and_interrupted, kind), ())
    assert found == found[:1] * 4


def end(optimizer):
    """Ends the service of an optimizer for good."""
    optimizer._shards[0].session.patience = 0.1
    keeper = optimizer._shards.service.process
    pids = workers(optimizer._shards.service)
    keeper.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    keeper.wait()


def lost(rank, kind, when):
    """The service of rank 1 ends for good as the update begins: all ranks raise, and none waits."""
    model, optimizer = make(kind)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    begin, begun = Session.begin, Session.begun
    if rank == 1 and when == "before":
        Session.begin = lambda *arguments, **options: end(optimizer) or begin(*arguments, **options)
    elif rank == 1:
        Session.begun = lambda *arguments: (begun(*arguments), end(optimizer))[0]
    said = []
    for act in (
        optimizer.step,
        lambda: model.head(model.norm(torch.ones(1, 32).bfloat16())),
        optimizer.synchronize,
        optimizer.step,
        lambda: optimizer.save("/nowhere"),
    ):
        try:
            act()
            said.append("")
        except (PlimsollError, RuntimeError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind, when", [("copies", "after"), ("zero1", "before"), ("zero2", "after")])
def test_a_service_that_ends_for_good(kind, when):
    first, second = run(lost, kind, when)
    assert all(second[1:]) and bool(second[0]) == (when == "before")
    step, forward, synchronize, again, save = first
    assert step == ""
    if kind == "copies":
        assert (forward, synchronize) == ("", "") and "rank 1: PlimsollError" in save
        assert again.startswith("step 3 failed on 1 of 2 ranks: rank 1: PlimsollError")
    else:
        assert "have not arrived from the ranks that hold them: rank 1 did not have them" in forward
        assert forward == synchronize == again == save


def test_a_rank_that_is_killed_while_others_wait_for_it(tmp_path):
    def train_and_die(rank, results):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=rank, world_size=2)
        model, optimizer = make("zero2")
        backward(model, 0)
        slow(10 if rank else 0)
        optimizer.step()
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model.loss(batch(text(), 1))
            results.put("it went on")
        except PlimsollError as error:
            results.put(str(error))
        optimizer.close()

    context = mp.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=train_and_die, args=(rank, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    assert ranks[0].exitcode == 0
    assert "have not arrived from the ranks that hold them: " in results.get()


def written(rank, kind, directory):
    """Rank 1 writes a weight while the update is under way. All load a checkpoint, and go on."""
    model, optimizer = make(kind)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.save(directory)
    optimizer.saved()
    waited = Session.waited
    slow(0.05)
    backward(model, 1)
    optimizer.step()
    if rank == 1:
        with torch.no_grad():
            model.head.weight.mul_(2)
    said = []
    for _ in range(2):
        with pytest.raises((PlimsollError, RuntimeError)) as raised:
            optimizer.step()
        said.append(str(raised.value))
    Session.waited = waited
    optimizer.load(directory)
    optimizer.zero_grad()
    for i in range(1, 6):
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return said, digest(model), undisturbed(rank, kind, name="other")


@pytest.mark.parametrize("kind", ["copies", "zero2", "fsdp"])
def test_weights_that_one_rank_writes_while_an_update_runs(kind, fully_shard, tmp_path):  # noqa: F811
    (first, *bits), (second, *same) = run(written, kind, str(tmp_path))
    assert all("parameter head.weight was written while the service updated it" in s for s in second)
    assert all(s.startswith("step 3 failed on 1 of 2 ranks: rank 1: RuntimeError: parameter head.weight") for s in first)
    assert bits == same == [bits[0]] * 2


def read_by_hand(rank, kind):
    """Rank 1 reads a parameter that nothing has waited for: all refuse the step, and then wait for it in steps."""
    model, optimizer = make(kind, missing_gradients="zero")
    said = []
    for i in range(4):
        backward(model, i)
        if rank == 1 and i == 2:
            optimizer.step()
            optimizer.zero_grad()
            model.norm.weight.square().sum().backward()
        elif i == 2:
            optimizer.step()
            optimizer.zero_grad()
            model.norm(torch.ones(32).bfloat16()).sum().backward()
        try:
            optimizer.step()
        except (PlimsollError, RuntimeError) as error:
            said.append(str(error))
        optimizer.zero_grad()
    return said, model.norm.weight in optimizer._overlap._uses.at_step


def test_a_parameter_that_one_rank_reads_by_hand():
    found = run(read_by_hand, "zero2")
    text = "parameter norm.weight got a gradient, but no forward pass of a module that owns it has waited"
    assert text in found[1][0][0] and found[0][0][0].startswith(f"step 4 failed on 1 of 2 ranks: rank 1: RuntimeError: {text}")
    assert [(len(said), waits) for said, waits in found] == [(1, False), (1, True)]


def read_past_modules(rank, kind):
    """The check mode finds reads of parameters that have not arrived from another rank."""
    model, optimizer = make(kind)
    for i in range(2):
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()
    said = []
    for read in (lambda p: p.detach().sum(), lambda p: (p.to_local() if kind == "fsdp" else p).norm()):
        with pytest.raises(RuntimeError) as raised:
            read(model.head.weight)
        said.append(str(raised.value))
    optimizer.synchronize()
    model.head.weight.detach().sum()
    return said


@pytest.mark.parametrize("kind", ["zero2", "fsdp"])
def test_reads_past_modules_are_found(kind, fully_shard, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PLIMSOLL_CHECK_OVERLAP", "1")
    for said in run(read_past_modules, kind):
        assert all("uses parameter head.weight, whose update is under way" in s for s in said)
