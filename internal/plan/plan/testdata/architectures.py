#!/usr/bin/env python3
"""Measures what a training of every architecture holds, as in architectures.golden.

    architectures.py config.json... > architectures.golden

Each model trains two steps with scripts/measure/train.py, on tensors without
memory: bf16, two sequences of 256 tokens, scaled dot product attention (eager
attention where transformers has no other), AdamW. A line holds the name of the
config file, and for each forward and backward pass the bytes at its peak and at
its end.
"""

import json
import pathlib
import sys

import torch
import transformers

from isolated import measure


def arguments_of(path):
    """Returns the arguments of a training of the model in a config.json."""
    with open(path) as file:
        model = getattr(transformers, json.load(file)["architectures"][0])
    attention = "sdpa" if model._supports_sdpa else "eager"
    return ["--config", path, "--batch", "2", "--seq-len", "256", "--steps", "2", "--json", "--attention", attention]


def main():
    print("# torch", torch.__version__, "transformers", transformers.__version__, flush=True)
    for path in sys.argv[1:]:
        phases = [p for p in measure(arguments_of(path))["phases"] if p["phase"] in ("forward", "backward")]
        print(pathlib.Path(path).stem, *(f"{p['peak']} {p['end']}" for p in phases), flush=True)


if __name__ == "__main__":
    main()
