"""Trains a compiled model that is tuned as much as it can be: each of its kernels is compiled once."""
import torch
import torch._inductor.config as inductor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner as Kernel

inductor.max_autotune = inductor.coordinate_descent_tuning = True
kernels, compiled, make, compile_one = [], [], Kernel.__init__, Kernel._precompile_config


def made(self, *arguments, **options):
    kernels.append(self)
    make(self, *arguments, **options)


def compiles(self, *arguments, **options):
    compiled.append(self)
    return compile_one(self, *arguments, **options)


Kernel.__init__, Kernel._precompile_config = made, compiles
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256)).cuda()
optimizer = torch.optim.SGD(model.parameters())
train = torch.compile(model)
for _ in range(2):
    train(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
assert 0 < len(compiled) <= len(kernels), f"{len(compiled)} compilations of {len(kernels)} kernels"
