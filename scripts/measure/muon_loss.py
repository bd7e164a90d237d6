#!/usr/bin/env python3
"""Trains the small GPT of the tests by torch.optim.Muon and AdamW, and by plimsoll.torch.Muon, and prints the losses.

    PYTHONPATH=python python scripts/measure/muon_loss.py [--steps 1000] [--seeds 3]

It needs torch 2.9 and bin/plimsoll. Losses are of held-out batches after training.
"""

import argparse
import os
import pathlib
import statistics
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]
os.environ.setdefault("PLIMSOLL", str(ROOT / "bin" / "plimsoll"))

import plimsoll.torch  # noqa: E402
from gpt import GPT, batch, text  # noqa: E402

RATE, ADAMW = 0.02, dict(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
WARM_UP = 20  # steps of the learning rates


def torchs(model):
    """torch.optim.Muon and torch.optim.AdamW."""
    groups = plimsoll.torch.muon_groups(model)
    by_muon, by_adamw = ([p for g in groups if g["use_muon"] is use for p in g["params"]] for use in (True, False))
    return [torch.optim.Muon(by_muon, lr=RATE), torch.optim.AdamW(by_adamw, **ADAMW)]


def ours(**options):
    return lambda model: [
        plimsoll.torch.Muon(plimsoll.torch.muon_groups(model), lr=RATE, adamw=ADAMW, model=model, **options)
    ]


# The type of the parameters, and what makes the optimizers.
KINDS = {
    "torch, fp32": (torch.float32, torchs),
    "torch, bf16": (torch.bfloat16, torchs),
    "plimsoll, bf16": (torch.bfloat16, ours()),
    "plimsoll, bf16, bf16 moments": (torch.bfloat16, ours(moments="bf16")),
}


def train(kind, seed, data, steps, width=32):
    """The loss of held-out batches after training."""
    held_out, data = data[-len(data) // 10 :], data[: -len(data) // 10]
    torch.manual_seed(seed)
    dtype, make = KINDS[kind]
    model = GPT(width=width).to(dtype)
    optimizers = make(model)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda i: min(1.0, (i + 1) / WARM_UP) * (1 - 0.9 * i / steps)) for o in optimizers
    ]
    for i in range(steps):
        model.loss(batch(data, 1_000_000 * seed + i, size=8)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    with torch.no_grad():
        found = statistics.mean(model.loss(batch(held_out, i, size=8)).item() for i in range(50))
    for optimizer in optimizers:
        if isinstance(optimizer, plimsoll.torch.Muon):
            optimizer.close()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    print(f"{given.steps} steps, loss of held-out batches by seed")
    for kind in KINDS:
        found = [train(kind, seed, data, given.steps, width=64) for seed in range(given.seeds)]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        by_seed = ", ".join(f"{f:.4f}" for f in found)
        print(f"{kind:30} {by_seed}: mean {statistics.mean(found):.4f}, standard deviation {spread:.4f}", flush=True)


if __name__ == "__main__":
    main()
