#!/usr/bin/env python3
"""Measures the states of an optimizer, and what its step holds beside them at most.

    optimizer.py pytorch_optimizer.SOAP --shapes 768x512,512 --steps 12 --set precondition_frequency=2

The parameters are on the CPU. Every storage that an operation makes counts
while it lives, but not what happens inside of an operation. The result is
JSON: bytes of states, and the peak of each step beside states and parameters.
"""

import argparse
import importlib
import json
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that operations have made and that live."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage):
        key = storage._cdata
        if key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key):
        self.now -= self.live.pop(key)


def stored(optimizer):
    """Bytes of the tensors with elements in the states, by storage."""
    tensors = [t for state in optimizer.state.values() for t in tree_leaves(list(state.values()))
               if isinstance(t, torch.Tensor) and t.dim() > 0]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("optimizer", help="its class, with its module")
    parser.add_argument("--shapes", required=True, help="of the parameters, such as 768x512,512")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="of the optimizer, such as foreach=True")
    options = parser.parse_args()
    module, name = options.optimizer.rsplit(".", 1)
    settings = {key: json.loads(value.lower()) for key, value in (s.split("=") for s in options.settings)}
    shapes = [[int(n) for n in shape.split("x")] for shape in options.shapes.split(",")]
    parameters = [torch.nn.Parameter(torch.randn(s, dtype=getattr(torch, options.dtype))) for s in shapes]
    optimizer = getattr(importlib.import_module(module), name)(parameters, lr=1e-3, **settings)
    for p in parameters:
        p.grad = torch.randn_like(p)
    peaks, held = [], 0
    with Storages() as storages:
        for _ in range(options.steps):
            storages.peak = storages.now
            optimizer.step()
            held = stored(optimizer)
            peaks.append(storages.peak - held)
    json.dump({"states": held, "steps": peaks}, sys.stdout)


if __name__ == "__main__":
    main()
