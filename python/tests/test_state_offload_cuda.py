"""StateOffload on a CUDA GPU: the bits of torch's optimizers there, the window, and the rates of the copies."""

import time
from contextlib import closing

import pytest
import torch

from plimsoll.torch import StateOffload
from wrapping import CHUNK_BYTES, OPTIMIZERS, assert_same_training, give_gradients, on_host, parameters, same, steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")

WAYS = [{}, {"chunk_bytes": 1}, {"fraction": 0.3}, {"recovery": False}, {"mode": "whole"}]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", ["foreach", "fused", "sgd", "adafactor", "muon"])
def test_training_has_the_bits_of_the_optimizer(name, way):
    ps, qs = parameters("cuda"), parameters("cuda")
    make = OPTIMIZERS.get(name) or (lambda given: torch.optim.Muon([p for p in given if p.ndim == 2 and p.numel()]))
    theirs = make(qs)
    with closing(StateOffload(make(ps), **{"chunk_bytes": CHUNK_BYTES, **way})) as ours:
        steps(ps, ours, 50)
        steps(qs, theirs, 50)
        assert_same_training(ours, theirs, ps, qs)


def large():
    return [torch.randn(2048, 4096, device="cuda").bfloat16().requires_grad_() for _ in range(24)]


@pytest.mark.parametrize("mode", ["chunked", "whole"])
def test_masters_window_and_rates(mode):
    """The fused update allocates nothing, so the window is all there is."""
    ps = large()
    optimizer = StateOffload(torch.optim.AdamW(ps, lr=1e-2, fused=True), mode=mode, master="split")
    with closing(optimizer):
        give_gradients(ps, 0)
        begun = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - begun == optimizer.first_window_bytes
        optimizer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        first, count = time.perf_counter(), 5
        for _ in range(count):
            optimizer.step()
        optimizer.synchronize()
        seconds = (time.perf_counter() - first) / count
        peak = torch.cuda.max_memory_allocated() - begun
        elements = sum(p.numel() for p in ps)
        print(
            f"\n{mode}: {elements:,} parameters, {seconds * 1e3:.1f} ms a step, {10 * elements / seconds / 1e9:.1f} GB/s to the "
            f"GPU and {14 * elements / seconds / 1e9:.1f} GB/s back at once, high-water mark {peak:,} bytes"
        )
        assert peak == optimizer.window_bytes
        masters = [optimizer.state_dict()["state"][i]["master_weights"] for i in (0, 23)]
        assert all(same(m.view(torch.int32) >> 16, on_host(ps[i]).view(torch.int16).int()) for i, m in zip((0, 23), masters))
