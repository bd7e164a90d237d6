"""Trainers with StateOffload are killed: the next one goes on with the same bits, and never with a mixture of steps."""

import os
import pathlib
import subprocess
from contextlib import closing

import pytest
import torch

from plimsoll.torch import StateOffload
from preloaded import python
from test_crash import kill_worker
from wrapping import CHUNK_BYTES, assert_same_training, give_gradients, parameters, steps

KILLS = 200 if os.environ.get("PLIMSOLL_SOAK") else 10


@pytest.mark.nightly
@pytest.mark.parametrize("device, mode", [("cpu", "chunked"), ("standin", "chunked"), ("cpu", "whole")])
def test_killed_at_random_instants(service, device, mode):
    """By PLIMSOLL_SOAK=1 at 200 instants each."""
    program = pathlib.Path(__file__).with_name("killed_trainers.py")
    command = [*python(), str(program), device, mode, service.socket, str(KILLS), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    killed, finished = map(int, done.stdout.split())
    print(f"{device}, {mode}: {killed} kills, and {finished} steps that another trainer finished")
    assert killed > KILLS / 2 and (finished > 0) == (mode == "chunked")


def interrupted(service, commits, **options):
    """Parameters and optimizer of a trainer that has died within its third step, after so many chunks."""
    ps = parameters()
    ours = StateOffload(torch.optim.AdamW(ps, lr=1e-2), chunk_bytes=CHUNK_BYTES, socket=service.socket, job="test", **options)
    steps(ps, ours, 2)
    cycle, commit = ours._state._cycle, ours._state._cycle._commit

    def dies(*arguments):
        if arguments[-1] == commits:
            raise SystemExit
        return commit(*arguments)

    cycle._commit = dies
    with pytest.raises(SystemExit):
        steps(ps, ours, 1, 2)
    ours._state.session.abandon()
    ours._release.detach()
    ours.close()


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_a_step_that_was_begun_is_finished(service, commits):
    interrupted(service, commits)
    ps, qs = parameters(), parameters()
    theirs = torch.optim.AdamW(qs, lr=1e-2)
    with closing(StateOffload(torch.optim.AdamW(ps, lr=7), chunk_bytes=CHUNK_BYTES, socket=service.socket, job="test")) as ours:
        assert ours.resumed_step == (3 if commits else 2)
        ours.param_groups[0]["lr"] = 1e-2
        steps(ps, ours, 2, ours.resumed_step)
        steps(qs, theirs, 2 + ours.resumed_step)
        assert_same_training(ours, theirs, ps, qs)


def test_the_service_dies(service, tmp_path):
    """Steps do not notice, and a save finds its successor."""
    ps, qs = parameters(), parameters()
    theirs = torch.optim.AdamW(qs, lr=1e-2)
    with closing(StateOffload(torch.optim.AdamW(ps, lr=1e-2), chunk_bytes=CHUNK_BYTES, socket=service.socket)) as ours:
        for step in range(4):
            steps(ps, ours, 1, step)
            assert kill_worker(service) or step
        assert ours.save(tmp_path) == ours.saved() == 4
        steps(ps, ours, 2, 4)
        steps(qs, theirs, 6)
        assert_same_training(ours, theirs, ps, qs)


def test_a_state_that_is_torn_says_so(service, tmp_path):
    interrupted(service, 1, recovery=False)
    ps, qs = parameters(), parameters()
    theirs = torch.optim.AdamW(qs, lr=1e-2)
    steps(qs, theirs, 2)
    options = {"chunk_bytes": CHUNK_BYTES, "socket": service.socket, "job": "test", "recovery": False}
    with closing(StateOffload(torch.optim.AdamW(ps, lr=1e-2), **options)) as ours:
        for refused in (lambda: ours.resumed_step, lambda: steps(ps, ours, 1), ours.state_dict, lambda: ours.save(tmp_path)):
            with pytest.raises(RuntimeError, match="died in the middle of step 3, which cannot be finished: load a checkpoint"):
                refused()
        ours.load_state_dict(theirs.state_dict())
        for p, q in zip(ps, qs):
            p.data.copy_(q)
        steps(ps, ours, 2, 2)
        steps(qs, theirs, 2, 2)
        assert_same_training(ours, theirs, ps, qs)


def test_a_state_without_its_parameters_is_not_gone_on_with(service):
    options = {"socket": service.socket, "job": "test", "recovery": False}
    ps = parameters()
    first = StateOffload(torch.optim.AdamW(ps), **options)
    steps(ps, first, 1)
    first.close()
    with closing(StateOffload(torch.optim.AdamW(parameters()), **options)) as ours:
        with pytest.raises(RuntimeError, match="it lacks what has died with its process: the parameters of the model"):
            ours.open()
            ours.resumed_step


def test_a_first_step_does_not_go_on_with_gradients_of_other_parameters(service):
    options = {"socket": service.socket, "job": "test"}
    ps = parameters()
    with closing(StateOffload(torch.optim.AdamW(ps), **options)) as first:
        steps(ps, first, 1)
    qs = parameters()
    with closing(StateOffload(torch.optim.AdamW(qs), **options)) as ours:
        give_gradients(qs, 0)
        with pytest.raises(RuntimeError, match="read optimizer.resumed_step before the first forward pass"):
            ours.step()
