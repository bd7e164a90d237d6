"""A trainer of tenants is killed at random instants, again and again: each tenant ends with the bits of one that is
trained alone.

Arguments: the path of the service's socket, the folder of tenants, the number of kills, and a seed. It prints how many
kills there were.
"""

import os
import pathlib
import random
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch

import plimsoll.torch
from plimsoll.torch import Tenants
from test_tenants import NAMES, alone, network, train
from test_crash import digest

ROUND = 2  # steps of a tenant until the next one's turn


def go_on(socket, folder, rounds, say):
    """Trains every tenant to the end, from where it is found. Says each step, and in the end the digests."""
    torch.set_num_threads(1)
    model = network()
    tenants = Tenants(model.parameters(), optimizer=plimsoll.torch.AdamW, lr=1e-2, folder=folder, resident=3, socket=socket, job="killed")
    for end in range(ROUND, ROUND * rounds + 1, ROUND):
        for name in NAMES:
            tenant = tenants.switch(name)
            for step in range(tenant.steps, end):
                train(model, tenant, [step])
                say(f"{name} {step}")
    for name in NAMES:
        tenants.switch(name)
        say(f"ended {name} {digest(model)}")
    tenants.close()


def child(*arguments):
    """Starts a trainer. Its process, and what it says."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reads)
            go_on(*arguments, lambda text: os.write(writes, text.encode() + b"\n"))
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    return pid, open(reads)


def main(socket, folder, kills, seed):
    chance, killed, rounds = random.Random(int(seed)), 0, int(kills) + 3
    expected = [f"ended {name} {alone(name, ROUND * rounds)}" for name in NAMES]
    while True:
        pid, said = child(socket, folder, rounds)
        if killed < int(kills):
            for _ in range(chance.randrange(1, ROUND * len(NAMES))):
                said.readline()
            time.sleep(chance.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
        rest = said.read().splitlines()
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert status == 0 and rest[-len(NAMES) :] == expected, (killed, rest, expected)
        break
    print(killed)


if __name__ == "__main__":
    main(*sys.argv[1:])
