"""Trains two parameters with bitsandbytes' optimizers on the CPU, and prints states.txt: python make.py > states.txt. Made
with bitsandbytes 0.50 and torch 2.15.

A line is a tensor: optimizer, parameter, key, dtype, shape and its bytes. Lines with SHA-256 are of moments as
bitsandbytes itself dequantizes them, in fp32.
"""

import hashlib

import bitsandbytes as bnb
import torch

SHAPES = {"large": (65, 67), "small": (3, 5)}  # the last block of the large one is not full; the small one stays in fp32


def show(*words):
    print(*(str(w).replace(" ", "") for w in words))


for kind in ("AdamW8bit", "Lion8bit"):
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    optimizer = getattr(bnb.optim, kind)(list(parameters.values()), lr=1e-2)
    for _ in range(3):
        for p in parameters.values():
            p.grad = torch.randn_like(p) * torch.rand(len(p), 1) ** 4
        optimizer.step()
    for name, p in parameters.items():
        state = optimizer.state[p]
        for key, t in state.items():
            if torch.is_tensor(t):
                show(kind, name, key, t.dtype, list(t.shape), t.numpy().tobytes().hex())
        for number, component in ((1, "exp_avg"), (2, "exp_avg_sq")):
            if f"state{number}" in state:
                moment = state[f"state{number}"]
                if moment.dtype == torch.uint8:
                    moment = bnb.functional.dequantize_blockwise(
                        moment, absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=256
                    )
                show(kind, name, component, "SHA-256", list(moment.shape), hashlib.sha256(moment.numpy().tobytes()).hexdigest())
