"""Every byte of the state is there once, and none of model size is anywhere else."""

import ctypes
import json
import os
import pathlib
import re
import subprocess
from collections import defaultdict

import pytest
import torch

import plimsoll.torch
from nightly import nightly_rows
from plimsoll.torch import Async, ZenFlow
from preloaded import python
from test_crash import workers

LAYERS, WIDTH = 8, 2048
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
OVERLAPS = {"async": Async(1), "zenflow": ZenFlow(0.1, "step", 4, update_interval=2)}


def shared_by_component(pids):
    """The proportional set size of arenas, by the last part of their names."""
    found, component = defaultdict(int), None
    for pid in pids:
        for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                name = re.search(r"/memfd:plimsoll/(\S+)", line)
                component = name and name[1].rsplit("/", 1)[-1]
            elif component and line.startswith("Pss:"):
                found[component] += int(line.split()[1]) * 1024
    return dict(found)


def anonymous():
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return with_holes()


def with_holes():
    """Private memory, with what was freed and the C library keeps."""
    return int(re.search(r"RssAnon:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024


def measure(state, overlap):
    """What a program of its own measures."""
    overlap = OVERLAPS.get(overlap)
    torch.set_num_threads(1)
    x = torch.randn(4, WIDTH).bfloat16()
    # What products of this size and an optimizer of torch load and keep.
    for _ in range(3):
        small = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))).bfloat16()
        small(x).square().mean().backward()
    torch.optim.SGD(small.parameters()).step()
    del small
    before = anonymous()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
    moments = "int8" if state == "split24" else "fp32"
    optimizer = plimsoll.torch.AdamW(
        model.parameters(), max_grad_norm=1.0, state=state, moments=moments, model=model, overlap=overlap
    )
    optimizer.open()
    opened = with_holes() - before
    for _ in range(6 if overlap else 3):
        model(x).square().mean().backward()
        with_gradients = anonymous() - before
        optimizer.step()
        after = anonymous() - before
        optimizer.zero_grad()
    service = optimizer._shards.service
    pids = [os.getpid(), *workers(service)]
    command = [os.environ["PLIMSOLL"], "stat", "--socket", service.socket, "--json"]
    said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return shared_by_component(pids), opened, with_gradients, after, said


def measured(state, overlap=None):
    program = f"import json, test_memory; print(json.dumps(test_memory.measure({state!r}, {overlap!r})))"
    here = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    return json.loads(subprocess.run([*python(), "-c", program], stdout=subprocess.PIPE, check=True, env=environment).stdout)


@pytest.mark.parametrize("state, bytes_each", [("split", 14), ("split24", 7), *nightly_rows(("fp32", 16))])
def test_bytes_a_parameter(state, bytes_each):
    shared, opened, with_gradients, after, _ = measured(state)
    # The journal has one size for each worker, whatever the model's.
    assert shared.pop("step_journal") < 64 << 20
    assert sum(shared.values()) == pytest.approx(bytes_each * PARAMETERS, rel=0.005), shared
    assert shared["parameters"] == pytest.approx(2 * PARAMETERS, rel=0.001)
    assert shared["gradients"] == pytest.approx(2 * PARAMETERS, rel=0.001)
    # The parameters' former memory has gone back to the kernel.
    assert opened < 12 << 20, opened
    # Parameters alone are 64 MiB; activations are some KiB, and one gradient at a time 8 MiB.
    assert with_gradients < 12 << 20 and after < 12 << 20, (with_gradients, after)


# Important columns and biases have a state beside that of all columns.
_IMPORTANT = LAYERS * (WIDTH * int(0.1 * WIDTH) + WIDTH)


@pytest.mark.parametrize(
    "overlap, planned", [("async", 16 * PARAMETERS), *nightly_rows(("zenflow", 16 * PARAMETERS + 14 * _IMPORTANT))]
)
def test_bytes_of_overlaps(overlap, planned):
    """As internal/plan/plan/stateformats.go plans them: the model on the CPU has parameters of its own."""
    shared, _, _, after, said = measured("split", overlap)
    shared.pop("step_journal")
    total = sum(shared.values()) + after
    assert total == pytest.approx(planned, rel=0.005), (shared, after)
    assert total < 18 * PARAMETERS
    for component in ("parameters", "gradients", "exp_avg", "exp_avg_sq"):
        arenas = [row for row in said["ledger"] if row.get("component") == component]
        for column in ("planned_bytes", "measured_bytes"):
            assert sum(row[column] for row in arenas) == pytest.approx(shared[component], rel=0.005)
