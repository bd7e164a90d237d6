"""A trainer that may be killed: python -m gpu_proof.mortal adamw|offload SOCKET NAME. It prints steps and a digest."""

import hashlib
import sys
from typing import Any, Iterator

import torch

import plimsoll.torch
from gpu_proof import device
from gpu_proof.given import Model, values

STEPS = 8


def optimizer_of(which: str, model: Model, **service: str) -> Any:
    if which == "adamw":
        return plimsoll.torch.AdamW(model.parameters(), lr=1e-2, job="proof", **service)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return plimsoll.torch.StateOffload(inner, chunk_bytes=200_000, master="split", job="proof", **service)


def train(which: str, socket: str, name: str) -> Iterator[str]:
    """What it says: the step from which it goes on, each step, and at the end a digest of all numbers."""
    model = Model(device.NAME, torch.bfloat16)
    optimizer = optimizer_of(which, model, socket=socket, name=name)
    yield f"from step {optimizer.resumed_step}"
    for step in range(optimizer.resumed_step, STEPS):
        model(model.gradients(step)).backward()
        yield f"step {step}"
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for _, value in sorted(values(model, optimizer).items()):
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    optimizer.close()
    yield digest.hexdigest()


if __name__ == "__main__":
    for text in train(*sys.argv[1:]):
        print(text, flush=True)
