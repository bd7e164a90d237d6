"""Trainers that are killed at random instants, one after the other: each goes on where the one before has died.

Arguments: the device, the mode, the path of the service's socket, the number of kills, and a seed. It prints how often
a step was finished that another trainer had begun, and fails where training has other bits than without kills.
"""

import hashlib
import os
import pathlib
import random
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch

from plimsoll.torch import StateOffload
from wrapping import give_gradients, parameters

SHAPES = [(100, 90), (90,), (0, 4), (300, 90), (70, 30), (128, 128), (64, 200)]


def train(device, mode, socket, until, name, report):
    """Trains until a step, from the one that the state is at."""
    torch.set_num_threads(1)
    if device == "standin":
        from standin import device as standin

        standin.load()
        torch.standin.set_delays(os.getpid(), 300)
    ps = parameters(device, torch.bfloat16, SHAPES)
    inner = torch.optim.AdamW(ps, lr=1e-2)
    optimizer = StateOffload(inner, mode=mode, chunk_bytes=100_000, master="split", job="killed", name=name, socket=socket)
    scheduled = optimizer.resumed_step
    report(optimizer._state.session.found)
    for step in range(scheduled, until):
        give_gradients(ps, step, without=(step % 5,) if step % 3 == 2 else ())
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step % 7)
        optimizer.step()
    digest = hashlib.sha256()
    for p in ps:
        digest.update(p.detach().cpu().view(torch.int16).numpy().tobytes())
    for entry in optimizer.state_dict()["state"].values():
        for value in entry.values():
            digest.update(value.numpy().tobytes())
    optimizer.close()
    return digest.hexdigest()


def child(*arguments):
    """Starts a trainer. Its process, and what it says."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reads)
            say = lambda text: os.write(writes, text.encode() + b"\n")
            say(train(*arguments, say))
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    return pid, open(reads)


def main(device, mode, socket, kills, seed):
    StateOffload(torch.optim.AdamW(parameters())).close()  # imports all that the children need
    chance, until, finished, killed = random.Random(int(seed)), 2 * int(kills) + 10, 0, 0
    pid, said = child(device, mode, socket, until, "whole")
    assert said.readline().strip() == "new"
    began = time.monotonic()
    expected = said.read().splitlines()[-1]
    step = (time.monotonic() - began) / until  # so that a fast host does not end before all kills
    assert os.waitpid(pid, 0)[1] == 0
    while True:
        pid, said = child(device, mode, socket, until, "killed")
        found = said.readline().strip()
        assert found in ("new", "whole", "redo"), found or "the trainer has failed"
        finished += found == "redo"
        if killed < int(kills):
            time.sleep(chance.random() * 2.5 * step)
            os.kill(pid, signal.SIGKILL)
        rest = said.read().splitlines()
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert status == 0 and rest == [expected], (killed, rest, expected)
        break
    print(killed, finished)


main(*sys.argv[1:])
