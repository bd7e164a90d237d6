"""The optimizer service in megatron-core: its own classes train a small GPT among gloo ranks, on the CPU."""

import hashlib

import pytest
import torch

import megatron_cpu
from nightly import nightly_rows
from test_distributed import run

pytest.importorskip("megatron.core")

LAYOUTS = [(2, 1, 1), (4, 2, 2)]  # ranks, tensor parallel, pipeline parallel


class KernelAdamW(torch.optim.Optimizer):
    """An optimizer for HybridDeviceOptimizer on the CPU, with the arithmetic of the service's kernels, on fp32 weights."""

    made = 0

    def __init__(self, groups):
        import plimsoll.torch

        super().__init__(groups, dict(lr=1e-3))
        keys = "lr", "betas", "eps", "weight_decay"
        held = [{"params": [p.clone().requires_grad_() for p in g["params"]], **{k: g[k] for k in keys}} for g in groups]
        KernelAdamW.made += 1
        self.held = plimsoll.torch.AdamW(held, sharding="local", gradients="step", name=f"kernel{KernelAdamW.made}")

    @torch.no_grad()
    def step(self, closure=None):
        pairs = [
            pair for own, held in zip(self.param_groups, self.held.param_groups) for pair in zip(own["params"], held["params"])
        ]
        for group, held in zip(self.param_groups, self.held.param_groups):
            held.update(lr=group["lr"], weight_decay=group["weight_decay"])
        for own, held in pairs:
            held.grad = own.grad.clone()
        self.held.step()
        for own, held in pairs:
            own.copy_(held)


def set_up(whose, tensor=1, pipeline=1, gradients=torch.bfloat16, overlap=False, options=None, **settings):
    """The configuration, the model and its optimizer: "ours", "theirs", or "kernel" for theirs with our arithmetic."""
    megatron_cpu.pretend()
    if whose == "ours":
        import plimsoll.megatron

        plimsoll.megatron.install(**(options or {}))
    elif whose == "kernel":
        import megatron.core.optimizer

        megatron.core.optimizer.CPUAdam = KernelAdamW
    config, model = megatron_cpu.gpt(tensor, pipeline)
    model = megatron_cpu.wrap(config, model, gradients, overlap)
    return config, model, megatron_cpu.optimizer_of(model, gradients, **settings)


def schedule(optimizer, step):
    """What changes in each step, as Megatron-LM's OptimizerParamScheduler changes it."""
    for group in optimizer.param_groups:
        group["lr"] = 2e-3 / (1 + step % 7)
        group["weight_decay"] = group["wd_mult"] * (0.1 + 0.01 * (step % 3))


def losses_of(rank, whose, steps, arguments):
    config, model, optimizer = set_up(whose, **arguments)
    data, losses = megatron_cpu.batches(128, 16), []
    for step in range(steps):
        schedule(optimizer, step)
        losses.append(megatron_cpu.step(config, model, optimizer, data))
    return losses


def train(whose, steps, layout, **arguments):
    world, tensor, pipeline = layout
    return run(losses_of, whose, steps, {"tensor": tensor, "pipeline": pipeline, **arguments}, world=world)


@pytest.mark.parametrize("layout,steps", [(LAYOUTS[0], 40), *nightly_rows((LAYOUTS[1], 200), ((4, 1, 1), 200), (LAYOUTS[0], 200))])
def test_losses_have_the_bits_of_their_optimizer_with_the_same_arithmetic(layout, steps):
    """With a master weight beside each parameter, both round it to bf16 alike."""
    ours = train("ours", steps, layout, options={"state": "fp32"})
    assert ours == train("kernel", steps, layout)
    assert ours[-1][-1] < ours[-1][0] - 0.2


@pytest.mark.parametrize("layout,steps", [(LAYOUTS[1], 20), *nightly_rows((LAYOUTS[0], 200), ((4, 1, 1), 200), (LAYOUTS[1], 200))])
def test_losses_are_those_of_their_optimizer(layout, steps):
    """torch's kernel for the CPU rounds in another order, and bf16 makes more of each last bit."""
    ours, theirs = train("ours", steps, layout), train("theirs", steps, layout)
    for mine, other in zip(ours, theirs):
        assert mine == pytest.approx(other, rel=2e-2)
        assert sum(mine) == pytest.approx(sum(other), rel=1e-3)
