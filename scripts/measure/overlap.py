#!/usr/bin/env python3
"""Steps of a real PyTorch training on the CPU, with each way to make the optimizer's step, in turns.

    plimsoll run --trainer-cores 1 -- python scripts/measure/overlap.py

The trainer has one core and the optimizer service another. Each way trains a model of its own. In each round every way
makes a few steps, so that all ways see the same machine. It prints the median step time of each, and its ratio to the
first, round by round.
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]

from gpt import GPT  # noqa: E402
from plimsoll.torch import AdamW  # noqa: E402

NORM = 100.0  # that gradients are clipped to: rarely


def make(way: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if way == "torch":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    overlap = {"none": None, "unclipped": "backward"}.get(way, way)
    norm = None if way == "unclipped" else NORM
    return AdamW(model.parameters(), lr=1e-4, model=model, max_grad_norm=norm, overlap=overlap, name=way)


def step(way: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model.loss(tokens).backward()
    if way == "torch":
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ways", default="none,forward,torch", help="also backward, and unclipped: backward without clipping")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of a way in a round; the first is not timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways = arguments.ways.split(",")
    jobs = {}
    for way in ways:
        torch.manual_seed(0)
        model = GPT(256, arguments.width, arguments.layers, 8, arguments.tokens).to(torch.bfloat16)
        jobs[way] = (way, model, make(way, model))
    parameters = sum(p.numel() for p in model.parameters())
    tokens = torch.randint(256, (1, arguments.tokens + 1))
    for job in jobs.values():
        for _ in range(3):
            step(*job, tokens)
    times = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, job in jobs.items():
            step(*job, tokens)  # the step before may have left an update behind
            begin = time.perf_counter()
            for _ in range(arguments.steps - 1):
                step(*job, tokens)
            times[way].append((time.perf_counter() - begin) / (arguments.steps - 1))
            if way not in ("none", "torch"):
                job[2].synchronize()
    print(f"{parameters:,} parameters, {arguments.tokens} tokens a step, {arguments.rounds} rounds")
    for way in ways:
        ratio = statistics.median(t / first for t, first in zip(times[way], times[ways[0]]))
        print(f"{way:10} {1e3 * statistics.median(times[way]):7.1f} ms   {ratio:.3f} of {ways[0]}")


if __name__ == "__main__":
    main()
