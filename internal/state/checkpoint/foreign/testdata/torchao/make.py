"""Trains two layers with torchao's optimizers and saves them: python make.py FOLDER. Made with torchao 0.18 and torch 2.15.

states.txt has the SHA-256 of every moment, as torchao itself dequantizes it.
"""

import hashlib
import sys

import torch

torch.compile = lambda f=None, **_: f or (lambda g: g)  # as it is

from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

with open(sys.argv[1] + "/states.txt", "w") as file:
    for kind in (AdamW8bit, AdamW4bit, AdamWFp8):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if kind is AdamW4bit else torch.float32
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3)).to(dtype)
        optimizer = kind(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(torch.randn(5, 64, dtype=dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        names = [name for name, _ in model.named_parameters()]
        master = {name: p.detach().float() for name, p in model.named_parameters()}
        torch.save({**optimizer.state_dict(), "names": names, "master": master}, f"{sys.argv[1]}/{kind.__name__}.pt")
        for name, p in model.named_parameters():
            for component in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[p][component]
                moment = moment.dequantize() if hasattr(moment, "codes") else moment.float()
                digest = hashlib.sha256(moment.contiguous().numpy().tobytes()).hexdigest()
                print(kind.__name__, component, name, list(moment.shape), digest, file=file)
