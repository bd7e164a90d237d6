"""A small GPT, and text to train it on: the licence and the documents of this repository."""

import functools
import pathlib

import torch
from torch import nn
from torch.nn import functional as F

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 32, layers: int = 2, heads: int = 2, length: int = 32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens):
        logits = self(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def text() -> torch.Tensor:
    """A text that never changes: what a model learns of it is the same tomorrow."""
    return torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8).long()


def batch(data: torch.Tensor, step: int, size: int = 4, length: int = 32) -> torch.Tensor:
    """The batch of a step, the same whoever asks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - length - 1, (size,), generator=generator)
    return torch.stack([data[s : s + length + 1] for s in starts])
