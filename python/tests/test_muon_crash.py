"""A trainer of plimsoll.torch.Muon is killed: training goes on with the same bits."""

import os
import pathlib
import subprocess

import pytest
import torch

import plimsoll.torch
from gpt import GPT, batch, text
from preloaded import python
from test_crash import digest, kill_trainer, start_trainer

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")


def train_on(steps, **options):
    """What a program that may be restarted does: it goes on from where the state is."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, data = GPT().bfloat16(), text()
    groups = plimsoll.torch.muon_groups(model)
    optimizer = plimsoll.torch.Muon(groups, lr=0.02, max_grad_norm=1.0, chunk_bytes=4096, model=model, **options)
    optimizer.open()
    begin = optimizer.resumed_step
    for i in range(begin, steps):
        print("step", i, flush=True)
        model.loss(batch(data, i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), begin


def test_trainer_is_killed(service):
    wanted, _ = train_on(30)
    kill_trainer(start_trainer(service, "test_muon_crash.train_on(30)"), "step 19")
    process = start_trainer(service, "test_muon_crash.train_on(30)")
    found, begin = process.stdout.read().splitlines()[-1].split()
    assert process.wait() == 0
    assert int(begin) >= 19 and found == wanted


RANK = """
import os, pathlib, signal, sys
import torch.distributed as dist
from leaving import leave
from plimsoll.torch import StateOffload
from test_muon_crash import train_on

dist.init_process_group("gloo")
rank, make = os.environ["RANK"], StateOffload.make

made = os.open(pathlib.Path(sys.argv[1]) / "made", os.O_RDWR)  # a byte comes when the other rank has made step 8

def make_or_die(self):
    if rank == "1" and self.resumed_step == 0 and self.steps == 7:
        signal.alarm(120)  # ends a test that would hang
        os.read(made, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    make(self)
    if self.steps == 8:
        os.write(made, b"!")

StateOffload.make = make_or_die
found, begin = train_on(12, sharding="zero2")
(pathlib.Path(sys.argv[1]) / rank).write_text(f"{begin} {found}")
dist.destroy_process_group()
leave()
"""


def test_a_rank_is_killed_when_the_other_has_made_the_step(tmp_path):
    """Every rank has the gradients of the step by then: started again, it makes the step, too."""
    here = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    program = [*python(), "-c", RANK, tmp_path]
    os.mkfifo(tmp_path / "made")
    command = [os.environ["PLIMSOLL"], "run", "--nproc", 2, "--restarts", 1, "--", *program]
    done = subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first == second
    assert first == f"8 {train_on(12)[0]}"
