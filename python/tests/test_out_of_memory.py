"""What plimsoll.torch.watch leaves when PyTorch finds no memory on a GPU. The GPU is one that is not there: PyTorch is the
stock one for CUDA, and its own error raises.
"""

import json
import os
import subprocess
import sys

from gpt import ROOT
from gpu_not_there import gpu  # noqa: F401

_PROGRAM = """
import sys
import torch
import plimsoll.torch

def hoard():
    kept = []
    while True:
        kept.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))

class Greedy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1024, 1024))

    def forward(self, batch):
        out = batch @ self.weight
        hoard()
        return out

model = Greedy().cuda()
with plimsoll.torch.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)):
    for _ in range(2):
        try:
            model(torch.zeros(4, 1024, device="cuda"))
        except torch.OutOfMemoryError:
            if sys.argv[1:] != ["survives"]:
                raise
"""


def recorded(folder, gpu, *arguments):
    """Runs the program with a recording, and returns what it printed."""
    (folder / "train.py").write_text(_PROGRAM)
    trainer = [sys.executable, "train.py", *arguments]
    trainer = ["env", *(f"{k}={v}" for k, v in gpu.items()), *trainer]
    command = [os.environ["PLIMSOLL"], "run", "--record", "run.jsonl", "--nproc", "1", "--", *trainer]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def explained(folder):
    command = [os.environ["PLIMSOLL"], "explain", "--json", "run.jsonl"]
    return json.loads(subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True).stdout)


def test_who_held_the_gpu_when_it_ran_out(tmp_path, gpu):
    done = recorded(tmp_path, gpu)
    assert done.returncode == 1, done.stdout
    assert "plimsoll: GPU 0 is out of memory: " + str(tmp_path / "run.jsonl.rank0.pickle") in done.stdout, done.stdout
    assert (tmp_path / "run.jsonl.rank0.pickle").stat().st_mode & 0o777 == 0o600
    e = explained(tmp_path)
    assert (e["cause"]["resource"], e["cause"]["rank"], e["cause"]["phase"]) == ("gpu", 0, "forward")
    (note,) = (n for n in e["notes"] if "lines of the program" in n)
    assert "_dump_snapshot" not in done.stdout + str(e["collect"])
    held = {h["component"]: (h["bytes"], h["text"]) for h in e["holders"]}
    assert held["parameters"][0] == 4 << 20 and held["pytorch_allocated"][0] > 800 << 20, held
    assert "hoard" in held["pytorch_allocated"][1] and 1022 << 20 < sum(b for b, _ in held.values()) + (6 << 20) <= 1 << 30, held
    assert "MiB by " in note and "train.py:9 hoard" in note, note
    os.utime(tmp_path / "run.jsonl.rank0.pickle", (0, 0))  # of a job that was recorded here before
    assert not any("lines of the program" in n for n in explained(tmp_path)["notes"])


def test_an_error_that_the_program_survives_stays_one(tmp_path, gpu):
    done = recorded(tmp_path, gpu, "survives")
    assert done.returncode == 0 and done.stdout.count("is out of memory") == 2, done.stdout


def test_without_a_recording_nothing_is_kept(tmp_path, gpu):
    (tmp_path / "train.py").write_text(_PROGRAM)
    environment = {**os.environ, **gpu, "PYTHONPATH": str(ROOT / "python")}
    for name in ("PLIMSOLL_MARKS", "PLIMSOLL_SNAPSHOTS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert "OutOfMemoryError" in done.stdout and "plimsoll:" not in done.stdout, done.stdout
    assert os.listdir(tmp_path) == ["train.py"]
