#!/usr/bin/env python3
"""Measures what a training of every architecture holds, as in architectures.golden.

    architectures.py config.json... > architectures.golden

Each model trains two steps with scripts/measure/train.py, on tensors without
memory: bf16, two sequences of 256 tokens, scaled dot product attention (eager
attention where transformers has no other), AdamW. A line holds the name of the
config file, and for each forward and backward pass the bytes at its peak and at
its end.
"""

import contextlib
import io
import json
import os
import pathlib
import sys

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts" / "measure"))
import train  # noqa: E402


def measure(path):
    """Runs the script in a process of its own: it changes torch."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with open(path) as file:
            model = getattr(transformers, json.load(file)["architectures"][0])
        attention = "sdpa" if model._supports_sdpa else "eager"
        sys.argv = ["train.py", "--config", path, "--batch", "2", "--seq-len", "256", "--steps", "2", "--json",
                    "--attention", attention]
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            train.main()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(text.getvalue())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{path}: the training failed")
    return json.loads(text)


def main():
    print("# torch", torch.__version__, "transformers", transformers.__version__, flush=True)
    for path in sys.argv[1:]:
        phases = [p for p in measure(path)["phases"] if p["phase"] in ("forward", "backward")]
        print(pathlib.Path(path).stem, *(f"{p['peak']} {p['end']}" for p in phases), flush=True)


if __name__ == "__main__":
    main()
