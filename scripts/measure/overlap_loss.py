#!/usr/bin/env python3
"""Trains the small GPT of the tests with exact steps, one step late, and with ZenFlow, and prints the losses.

    PYTHONPATH=python python scripts/measure/overlap_loss.py [--only training|tuning] [--steps 1000] [--seeds 3]

Once from random weights, and once in fine-tuning a model that was trained exactly on other text. It needs torch and
bin/plimsoll. Losses are of held-out batches after training, and the mean of the last 100 steps.
"""

import argparse
import copy
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
from plimsoll.torch import Async, ZenFlow  # noqa: E402

MODES = {
    "exact": None,
    "async": Async(warm_up_steps=40),
    "ZenFlow": ZenFlow(0.1, "step", 100, update_interval=4, full_warm_up_rounds=40),
    "unscaled": ZenFlow(0.1, "step", 100, update_interval=4, full_warm_up_rounds=40, scale_lr=False),
}
WARM_UP = 50  # steps of the learning rate


def train(model, mode, seed, data, steps, rate):
    """The loss of held-out batches after training, and the mean of the last steps."""
    held_out, data = data[-len(data) // 10 :], data[: -len(data) // 10]
    optimizer = plimsoll.torch.AdamW(
        model.parameters(), lr=rate, weight_decay=0.1, max_grad_norm=1.0, model=model, overlap=mode
    )
    losses = []
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (i + 1) / WARM_UP) * (1 - 0.9 * i / steps)
        loss = model.loss(batch(data, 1_000_000 * seed + i, size=8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    with torch.no_grad():
        found = [model.loss(batch(held_out, i, size=8)).item() for i in range(100)]
    return statistics.mean(found), statistics.mean(losses[-100:])


def new_model(seed):
    torch.manual_seed(seed)
    return GPT(width=64).bfloat16()


def trained_model(seed, data, steps):
    model = new_model(seed)
    train(model, None, seed, data, steps, 1e-3)
    return model


def compare(title, modes, begins, seed_data, steps, rate):
    print(f"{title}: {steps} steps, loss of held-out batches (of the last 100 steps), by seed")
    for name in modes:
        found = [train(copy.deepcopy(model), MODES[name], seed, seed_data, steps, rate) for seed, model in enumerate(begins)]
        held_out = [f[0] for f in found]
        spread = statistics.stdev(held_out) if len(held_out) > 1 else 0.0
        by_seed = ", ".join(f"{h:.3f} ({last:.3f})" for h, last in found)
        print(f"{name:8} {by_seed}: mean {statistics.mean(held_out):.3f}, standard deviation {spread:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tuning-steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["training", "tuning"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    half = len(data) // 2
    if given.only != "tuning":
        compare("training", MODES, [new_model(seed) for seed in range(given.seeds)], data, given.steps, 1e-3)
    if given.only != "training":
        begins = [trained_model(seed, data[:half], given.steps) for seed in range(given.seeds)]
        compare("fine-tuning on other text", MODES, begins, data[half:], given.tuning_steps, 2e-4)


if __name__ == "__main__":
    main()
