"""What a trainer and its optimizer service hold on the CPU, byte by byte, while a GPT-2 of 253 million parameters trains.

    PLIMSOLL=bin/plimsoll PYTHONPATH=python python scripts/measure/resident.py

The proportional set size (PSS) of both processes: arenas by component, and private memory. It subtracts what the
trainer held before there was a model, without holes of its heap. Programs and libraries are left out, as their share
depends on which other processes have loaded them.
"""

import collections
import os
import pathlib
import re
import statistics
import sys
import time
from typing import Dict

import torch
import transformers

import plimsoll.torch
from plimsoll import resident

LAYERS, WIDTH, LENGTH, STEPS = 16, 1024, 64, 6


def held(pid: int) -> Dict[str, int]:
    """The proportional set size of a process, by what holds it."""
    found: Dict[str, int] = collections.defaultdict(int)
    what = ""
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        mapping = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)", line)
        if mapping:
            arena = re.match(r"/memfd:plimsoll/(\S+)", mapping[1])
            what = arena[1].rsplit("/", 1)[-1] if arena else "" if mapping[1].startswith("/") else "private"
        elif what and line.startswith("Pss:"):
            found[what] += 1024 * int(line.split()[1])
    return found


def service_of(pid: int) -> list:
    """The processes of the service, whose parent is the trainer, and theirs."""
    children = [int(p) for task in pathlib.Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    return children + [p for child in children for p in service_of(child)]


def both() -> Dict[str, int]:
    """What trainer and service hold together. Private memory of each by itself."""
    sums: Dict[str, int] = collections.Counter()
    for pid in [os.getpid(), *service_of(os.getpid())]:
        who = "trainer" if pid == os.getpid() else "service"
        for what, size in held(pid).items():
            sums[f"{who}: {what}" if what == "private" else what] += size
    return sums


def batch_loss(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, model.config.vocab_size, (1, LENGTH))
    return model(input_ids=tokens, labels=tokens).loss


def warm_up() -> None:
    """Loads what a training loads whatever its model's size, and what it keeps."""
    small = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2)).bfloat16()
    batch_loss(small).backward()


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    warm_up()
    resident.trim_heap()
    before = both()
    config = transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=16)
    torch.set_default_dtype(torch.bfloat16)  # no copy in fp32
    model = transformers.GPT2LMHeadModel(config)
    count = sum(p.numel() for p in model.parameters())
    optimizer = plimsoll.torch.AdamW(model.parameters(), max_grad_norm=1.0, model=model)
    optimizer.open()
    columns, times = {"open": both()}, []
    for step in range(1, STEPS + 1):
        begin = time.monotonic()
        batch_loss(model).backward()
        times.append(time.monotonic() - begin)
        columns[f"backward {step}"] = both()
        optimizer.step()
        optimizer.zero_grad()
        columns[f"step {step}"] = both()
    print(f"{count:,} parameters, bytes each" + "".join(f"{name:>12}" for name in columns))
    for what in sorted(set().union(*columns.values())):
        print(f"{what:38}" + "".join(f"{(c[what] - before[what]) / count:12.3f}" for c in columns.values()))
    print(f"{'all':38}" + "".join(f"{(sum(c.values()) - sum(before.values())) / count:12.3f}" for c in columns.values()))
    print(f"before the model: {sum(before.values()) >> 20} MiB; forward and backward: {statistics.median(times):.2f} s")
    optimizer.close()


if __name__ == "__main__":
    sys.exit(main())
