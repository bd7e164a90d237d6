"""What Megatron-LM's HybridDeviceOptimizer holds on the GPU and on the host after its first step.

The class is that of megatron-core from PyPI. Tensors are torch's fake ones, so there is neither a GPU nor memory: streams
stand still, and Adam makes its states without computing. Prints one JSON document with bytes for each fraction, for
parameters in bf16 of --sizes elements.
"""

import argparse
import contextlib
import gc
import json

import torch
from torch.optim import adam as adam_module
from torch._subclasses import FakeTensorMode


class Stream:
    """A stream on which nothing runs."""

    def __getattr__(self, name):
        return lambda *arguments: self


def without_gpu():
    torch.cuda.current_stream = torch.cuda.Stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.pin_memory = lambda tensor: tensor.clone()
    empty = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)
    adam_module.adam = lambda *arguments, **options: None


def held(without):
    """Bytes of tensors that live, by device, but for the storages named and for counts of steps."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.numel() > 1:
            storages[found.untyped_storage()._cdata] = found
    result = {"cuda": 0, "cpu": 0}
    for key, tensor in storages.items():
        if key not in without:
            result[tensor.device.type] += tensor.untyped_storage().nbytes()
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--fractions", type=float, nargs="+", required=True)
    a = parser.parse_args()
    without_gpu()
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    with FakeTensorMode():
        print(json.dumps([step(HybridDeviceOptimizer, a.sizes, fraction) for fraction in a.fractions]))


def step(optimizer_class, sizes, fraction):
    gc.collect()
    before = {t.untyped_storage()._cdata for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    parameters = [torch.nn.Parameter(torch.empty(n, dtype=torch.bfloat16, device="cuda")) for n in sizes]
    for parameter in parameters:
        parameter.decoupled_grad = torch.empty(parameter.shape, dtype=torch.float32, device="cuda")
    made = {t.untyped_storage()._cdata for p in parameters for t in (p, p.decoupled_grad)}
    optimizer = optimizer_class(
        [{"params": parameters, "lr": 1e-3}],
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=True,
    )
    optimizer.step()
    gc.collect()
    return held(before | made)


if __name__ == "__main__":
    main()
