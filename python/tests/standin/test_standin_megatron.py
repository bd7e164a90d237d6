"""The optimizer in megatron-core's place, with shards on a device: as ranges of one buffer, and gradients of another."""

import types

import pytest
import torch

pytest.importorskip("megatron.core")

import plimsoll.megatron  # noqa: E402

RANGES = [(0, 700), (700, 701), (701, 4000)]


def on(device, dtype, name, **options):
    """An optimizer of ranges of a buffer, with that buffer and the one of gradients."""
    weights = torch.randn(4100, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    shards = [weights[first:last] for first, last in RANGES]
    parameter = types.SimpleNamespace(main_grad=torch.zeros(1, dtype=dtype))
    optimizer = plimsoll.megatron.ServiceOptimizer([{"params": shards}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer.serve({shard: (f"p{i}", parameter) for i, shard in enumerate(shards)}, {"name": name, **options})
    return optimizer, weights, torch.empty(4100, dtype=dtype, device=device)


def steps(optimizer, buffer, count, seed=0):
    """Steps of gradients that the next backward pass overwrites at once."""
    for step in range(count):
        buffer.copy_(torch.randn(4100, generator=torch.Generator().manual_seed(seed + step)).to(buffer.dtype))
        for shard, (first, last) in zip(optimizer.param_groups[0]["params"], RANGES):
            shard.decoupled_grad = buffer[first:last]
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        buffer.fill_(torch.nan)
        optimizer.zero_grad()


def state(optimizer):
    return [entry[name].clone() for entry in optimizer.state.values() for name in ("step", *entry)]


@pytest.mark.parametrize("gradients,options", [(torch.bfloat16, {}), (torch.float32, {}), (torch.float32, {"gradients": "bf16"})])
def test_training_has_the_bits_of_the_cpu(gradients, options):
    found = []
    for device in "standin", "cpu":
        optimizer, weights, buffer = on(device, gradients, f"bits.{device}", **options)
        steps(optimizer, buffer, 4)
        found.append([weights.cpu(), *state(optimizer)])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert found[0][1] == 4 and not torch.equal(found[0][0][:4000], on("cpu", gradients, "new")[1][:4000])
    assert torch.equal(found[0][0][4000:], on("cpu", gradients, "new")[1][4000:])  # which are padding


def test_a_state_that_is_written_gives_the_device_its_weights():
    one, weights, buffer = on("standin", torch.bfloat16, "one")
    steps(one, buffer, 3)
    other, others, its_buffer = on("standin", torch.bfloat16, "other")
    for mine, its in zip(one.param_groups[0]["params"], other.param_groups[0]["params"]):
        for name in "exp_avg", "exp_avg_sq", "master_param":
            other.state[its][name] = one.state[mine][name]
    other.load_state_dict(one.state_dict())
    other._sync_hdo_state_to_sub_optimizers()
    assert torch.equal(weights.cpu()[:4000], others.cpu()[:4000])
    for optimizer, gradients in (one, buffer), (other, its_buffer):
        steps(optimizer, gradients, 2, seed=9)
    assert torch.equal(weights.cpu()[:4000], others.cpu()[:4000])
    assert all(torch.equal(a, b) for a, b in zip(state(one), state(other)))
    one.close()
    other.close()


def test_weights_that_a_model_loads_are_the_master_weights():
    optimizer, weights, buffer = on("standin", torch.bfloat16, "loads")
    steps(optimizer, buffer, 2)
    weights.copy_(torch.linspace(-1, 1, 4100).bfloat16())
    optimizer.update_fp32_param_by_new_param()
    masters = torch.cat([optimizer.state[shard]["master_param"] for shard in optimizer.param_groups[0]["params"]])
    assert torch.equal(masters, torch.linspace(-1, 1, 4100).bfloat16().float()[:4000])
    optimizer.close()
