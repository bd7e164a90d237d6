"""Writes what PyTorch's optimizers do with random gradients, step by step.

    python trajectories.py FOLDER < cases.json

A case names a file to write in the folder, an optimizer as one writes it in
Python but without its parameters, the names of its state, the implementations
of it that are to run in fp32, the shapes of the parameters, the learning rate of
each step, and the steps (from 1) after which results are wanted:

    {"file": "adamw", "optimizer": "AdamW(lr=0.001)", "seed": 1,
     "state": ["exp_avg", "exp_avg_sq"], "implementations": ["single", "fused"],
     "shapes": [[7], [3, 5, 7]], "rates": [0.001, 0.0009], "checkpoints": [1, 2]}

The file holds arrays without padding, little-endian, all parameters one after
the other as one flat vector:

    parameters   float32, before the first step
    gradients    float32, one vector a step
    results      float64, of the implementation "single" in float64
    results      float32, of each of the implementations

where results are, after each of the checkpoints, the parameters and then each
vector of the state.
"""

import functools
import json
import pathlib
import sys

import torch


class Lion(torch.optim.Optimizer):
    """Lion of Chen et al., "Symbolic discovery of optimization algorithms"
    (arXiv 2302.06675), algorithm 2. torch.optim has none."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, foreach=False):
        super().__init__(parameters, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (m * beta1 + p.grad * (1 - beta1)).sign()
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(update, alpha=-rate)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
    "Lion": Lion,
}
IMPLEMENTATIONS = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def make_parameters(shape, generator):
    """Parameters of many sizes."""
    magnitude = 10 ** (2 * torch.rand(shape, generator=generator) - 2)
    return magnitude * torch.randn(shape, generator=generator).sign()


def make_gradients(shape, steps, generator):
    """Gradients of which some are tiny, some are zero, and whole rows stay
    zero in every step."""
    touched = (torch.rand(shape[:1], generator=generator) > 0.2).reshape([-1] + [1] * (len(shape) - 1))
    for _ in range(steps):
        gradient = 0.01 * torch.randn(shape, generator=generator)
        kind = torch.rand(shape, generator=generator)
        tiny = 10 ** (-28 * torch.rand(shape, generator=generator))
        gradient = torch.where(kind < 0.2, gradient * tiny, gradient)
        yield torch.where((kind > 0.9) | ~touched, torch.zeros(()), gradient)


def results(case, initial, gradients, dtype, options):
    """Runs an optimizer and yields the vectors that a file holds of it."""
    parameters = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in initial]
    make = {name: functools.partial(c, parameters, **options) for name, c in OPTIMIZERS.items()}
    optimizer = eval(case["optimizer"], {"__builtins__": {}}, make)
    for step, (rate, gradient) in enumerate(zip(case["rates"], gradients), start=1):
        for p, g in zip(parameters, gradient):
            p.grad = g.to(dtype)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        if step in case["checkpoints"]:
            yield from (p.detach().clone() for p in parameters)
            for name in case["state"]:
                yield from (optimizer.state[p][name].clone() for p in parameters)


def write(case, file):
    generator = torch.Generator().manual_seed(case["seed"])
    shapes, steps = case["shapes"], len(case["rates"])
    initial = [make_parameters(shape, generator) for shape in shapes]
    gradients = list(zip(*[make_gradients(shape, steps, generator) for shape in shapes]))

    def put(tensors):
        for tensor in tensors:
            file.write(tensor.numpy().tobytes())

    put(initial)
    for gradient in gradients:
        put(gradient)
    put(results(case, initial, gradients, torch.float64, IMPLEMENTATIONS["single"]))
    for name in case["implementations"]:
        put(results(case, initial, gradients, torch.float32, IMPLEMENTATIONS[name]))


def main():
    torch.set_num_threads(1)
    for case in json.load(sys.stdin):
        with open(pathlib.Path(sys.argv[1]) / case["file"], "wb") as file:
            write(case, file)


if __name__ == "__main__":
    main()
