"""Trains a small transformer on random tokens: a program that `plimsoll plan -- python examples/python/train.py` plans."""

import argparse

import torch
from torch.nn import functional as F

VOCABULARY, WIDTH, LAYERS, LENGTH = 32_000, 2048, 12, 1024


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = dict(d_model=WIDTH, nhead=16, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(**layer) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
batch = parser.parse_args().batch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(100):
    tokens = torch.randint(VOCABULARY, (batch, LENGTH), device=device)
    with torch.autocast(device, torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
