"""Many optimizers in a process: one for each parameter, which steps in the backward pass, and others."""

import gc
import os
import resource
import subprocess
import textwrap
import threading

import pytest
import torch

import plimsoll.torch
from plimsoll import PlimsollError, Session
from plimsoll.descriptors import in_use, make_room
from plimsoll.torch.transfer import HostTransfer
from preloaded import python
from test_optimizer import assert_same, backward, network, train


def in_backward(model, module, **options):
    """As in PyTorch's tutorial on fusing the optimizer step into the backward pass."""
    optimizers = {p: module.AdamW([p], lr=1e-2, **options) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return optimizers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("open_first", [False, True])
def test_steps_in_the_backward_pass(open_first, dtype):
    ours, theirs = network(dtype), network(dtype)
    optimizers = in_backward(ours, plimsoll.torch)
    # bf16 has fp32 master weights here, so the optimizer that they are held against has the whole model.
    reference = (torch.optim if dtype is torch.float32 else plimsoll.torch).AdamW(theirs.parameters(), lr=1e-2)
    if open_first:
        for optimizer in optimizers.values():
            optimizer.open()
    losses = [backward(ours, i) for i in range(6)]
    assert losses == pytest.approx(train(theirs, reference, 6), rel=1e-5)
    assert_same(ours, theirs)
    assert all(p.grad is None for p in ours.parameters())
    states = [o.state_dict()["state"][0] for o in optimizers.values()]
    wanted = reference.state_dict()["state"]
    for i, state in enumerate(states):
        assert state["step"] == 6
        torch.testing.assert_close(state["exp_avg"], wanted[i]["exp_avg"].float(), rtol=1e-4, atol=1e-7)


def test_steps_in_the_backward_pass_with_copied_gradients(monkeypatch):
    monkeypatch.setattr(HostTransfer, "shares", False)  # as on a device
    ours, theirs = network(), network()
    optimizers = in_backward(ours, plimsoll.torch, max_grad_norm=0.01)
    references = {p: torch.optim.AdamW([p], lr=1e-2) for p in theirs.parameters()}
    for i in range(4):
        backward(ours, i)
        backward(theirs, i)
        for p, optimizer in references.items():
            torch.nn.utils.clip_grad_norm_([p], 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, theirs)
    assert all(o.last_grad_norm > 0 for o in optimizers.values())


def test_one_service_for_all():
    models = [network() for _ in range(5)]
    optimizers = [plimsoll.torch.AdamW(m.parameters(), lr=1e-2, job="one") for m in models]
    losses = [train(m, o, 3) for m, o in zip(models, optimizers)]
    assert losses == losses[:1] * 5
    assert len({o._shards.service for o in optimizers}) == 1
    process = optimizers[0]._shards.service.process

    # Each is closed, or dropped, alone, and its state is given back.
    [dropped] = [shard.session for shard in optimizers[1]._shards]
    path, document = dropped.path, dropped.document
    del optimizers[1], dropped
    gc.collect()
    optimizers[0].close()
    anew = Session(path, document)
    assert not anew.attached
    anew.close(give_back=True)
    assert train(models[4], optimizers[3], 1) and train(models[2], optimizers[1], 1)
    successor = plimsoll.torch.AdamW(models[0].parameters(), lr=1e-2, job="one")
    assert successor.resumed_step == 0 and successor._shards.service.process is process

    # The last takes the service along.
    for optimizer in [*optimizers[1:], successor]:
        assert process.poll() is None
        optimizer.close()
    assert process.wait(120) == 0


def test_optimizers_of_other_jobs_and_names():
    models = [network() for _ in range(4)]
    options = [{}, {"job": "second"}, {"name": "third"}, {"name": "third"}]
    optimizers = [plimsoll.torch.AdamW(m.parameters(), **o) for m, o in zip(models, options)]
    losses = [train(m, o, 2) for m, o in zip(models, optimizers)]
    assert losses == losses[:1] * 4
    assert optimizers[0]._shards.service is optimizers[2]._shards.service is optimizers[3]._shards.service is not optimizers[1]._shards.service


def test_a_service_that_was_killed_is_not_shared_any_more():
    first = plimsoll.torch.AdamW(network().parameters())
    first.open()
    process = first._shards.service.process
    process.kill()
    process.wait()
    model = network()
    second = plimsoll.torch.AdamW(model.parameters())
    assert train(model, second, 2) and second._shards.service.process is not process
    del first  # and does not wait for it


def test_threads_that_open_at_once():
    models = [network() for _ in range(6)]
    optimizers = [plimsoll.torch.AdamW(m.parameters()) for m in models]
    threads = [threading.Thread(target=train, args=(m, o, 2)) for m, o in zip(models, optimizers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({o._shards.service for o in optimizers}) == 1
    for model in models[1:]:
        assert_same(model, models[0], 0, 0)


def test_a_forked_child_has_a_service_of_its_own():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters())
    train(model, optimizer, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = network()
            train(own, plimsoll.torch.AdamW(own.parameters()), 2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert train(model, optimizer, 1, 1)


def test_names_are_asked_for_where_the_service_is_not_ones_own(service):
    ours = [plimsoll.torch.AdamW([torch.nn.Parameter(torch.zeros(4))], socket=service.socket) for _ in range(2)]
    ours[0].open()
    with pytest.raises(PlimsollError, match="give each optimizer of a program a name of its own"):
        ours[1].open()


def test_room_for_descriptors():
    program = """
        import resource, sys, torch
        import plimsoll.torch
        from plimsoll.descriptors import in_use
        parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(40)]
        optimizers = [plimsoll.torch.AdamW([p]) for p in parameters]
        optimizers[0].open()  # the service has the limits of before
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1]) or hard))
        before = len(list(in_use()))
        for optimizer in optimizers:
            optimizer.open()
        print(len(list(in_use())) - before, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """
    command = [*python(), "-c", textwrap.dedent(program)]
    enough, few = [subprocess.run([*command, limit], capture_output=True, text=True) for limit in ("0", "100")]
    assert enough.returncode == 0, enough.stderr
    more, limit = map(int, enough.stdout.split())
    assert more == 3 * 39 and 64 < limit <= 256  # two arenas and a connection each
    assert "file descriptors open, but may have only 100 (ulimit -Hn): a session needs up to" in few.stderr


def test_room_is_not_made_where_there_is_some():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    make_room(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before and {0, 1, 2} <= {descriptor for descriptor, _ in in_use()}
