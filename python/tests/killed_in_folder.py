"""A trainer whose service is its own child is killed at random instants, again and again: the next one of the job finds the
state in the folder, and training ends with the bits of one without kills.

Arguments: the number of kills, and a seed. It prints how many there were, and the step from which the last trainer went on.
"""

import os
import random
import signal
import sys
import time
import warnings

import torch

import sandboxed
from plimsoll.torch import AdamW
from test_crash import digest
from test_tenants import give_gradients, network

warnings.simplefilter("ignore")


def go_on(job, until, say):
    """Trains to a step, from that of the state."""
    torch.set_num_threads(1)
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2, job=job)
    began = optimizer.resumed_step
    for step in range(began, until):
        say(str(step))
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.resumed_step == began
    say("ended " + digest(model))
    optimizer.close()


def child(job, until):
    """Starts a trainer. Its process, and what it says."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reads)
            go_on(job, until, lambda text: os.write(writes, text.encode() + b"\n"))
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    return pid, open(reads)


def main(kills, seed):
    sandboxed.deny(("socket", "socketpair", "memfd_create"))
    job, chance, killed = f"killed-{os.getpid()}", random.Random(int(seed)), 0
    until = 6 * int(kills) + 10
    pid, said = child(job + "-whole", until)
    expected = said.read().splitlines()[-1]
    assert os.waitpid(pid, 0)[1] == 0
    while True:
        pid, said = child(job, until)
        if killed < int(kills):
            for _ in range(chance.randrange(0, 6)):
                said.readline()
            time.sleep(chance.random() * 0.004)
            os.kill(pid, signal.SIGKILL)
        rest = said.read().splitlines()
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert status == 0 and rest[-1] == expected, (killed, rest, expected)
        break
    print(killed, rest[0])


main(*sys.argv[1:])
