"""Shards of two ranks, whose gradients and parameters go from device to device."""

import functools

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpt
import plimsoll.torch
from plimsoll.torch import parameter_arena
from plimsoll.torch.transfer import StreamTransfer
from standin import device
from test_distributed import run, weights

# Sharding, the type of parameters, and micro-batches a step.
SCENARIOS = [
    ("zero1", torch.float32, 1),
    ("zero1", torch.bfloat16, 1),
    ("zero2", torch.float32, 2),
    ("zero2", torch.bfloat16, 1),
]


class Work:
    """An operation under way on the stream of collectives."""

    def __init__(self, stream, tensor):
        self._stream, self._tensor = stream, tensor

    def wait(self):
        """As NCCL's: the current stream waits, and the tensor is held no longer."""
        torch.standin.current_stream().wait_stream(self._stream)
        self._tensor = None


def late(collective, stream):
    """A collective of gloo that gives its result as NCCL does: on a stream of its own, late."""

    @functools.wraps(collective)
    def on_stream(tensor, *arguments, async_op=False, **named):
        if tensor.device.type == "cpu":
            return collective(tensor, *arguments, async_op=async_op, **named)
        stream.wait_stream(torch.standin.current_stream())
        with torch.standin.stream(stream), torch.no_grad():
            host = tensor.cpu()
            collective(host, *arguments, **named)
            tensor.copy_(host, non_blocking=True)
        work = Work(stream, tensor)
        return work if async_op else work.wait()

    return on_stream


def use_device():
    """Every stream of this rank is slow in its way."""
    torch.standin.set_delays(seed=dist.get_rank(), most_us=300)
    collectives, init = torch.Stream("standin"), StreamTransfer.__init__
    for name in ("reduce", "broadcast", "all_reduce"):
        setattr(dist, name, late(getattr(dist, name), collectives))

    def slow(self, *arguments):
        init(self, *arguments)
        torch.ops.standin.slow_down(self._to_device.stream_id, 3000)

    StreamTransfer.__init__ = slow
    torch.ops.standin.slow_down(collectives.stream_id, 3000)
    torch.ops.standin.slow_down(torch.accelerator.current_stream().stream_id, 500)


def trained(rank, on):
    """The weights after training in each scenario."""
    found = []
    for sharding, dtype, accumulate in SCENARIOS:
        torch.manual_seed(0)
        model = gpt.GPT().to(dtype).to(on)
        optimizer = plimsoll.torch.AdamW(model.parameters(), sharding=sharding, model=model, lr=1e-2, max_grad_norm=0.5)
        optimizer.open()
        for step in range(2 * accumulate):
            # With zero1 nobody averages the gradients here: the ranks have the same.
            tokens = gpt.batch(gpt.text(), step)[rank if sharding == "zero2" else 0 :: 2].to(on)
            with sdpa_kernel(SDPBackend.MATH):
                model.loss(tokens).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        found.append(weights(model))
        optimizer.close()
    return found


def both(rank):
    """The weights of the CPU and of the device. Parameters go in small blocks."""
    parameter_arena._BLOCK_BYTES = 1 << 14
    device.load()  # autograd counts the devices when it starts
    on_cpu = trained(rank, "cpu")
    use_device()
    return on_cpu, trained(rank, "standin")


def test_training_has_the_bits_of_the_cpu(monkeypatch):
    spawn = mp.get_context("spawn")  # the device's threads do not survive a fork
    monkeypatch.setattr(mp, "get_context", lambda _: spawn)
    for on_cpu, on_device in run(both):
        assert on_cpu == on_device
