"""Checks the values that programs take decisions by, and what a device is like."""
import ctypes

import torch

cuda = torch.device("cuda", torch.cuda.device_count() - 1)
assert torch.cuda.device_count() == 3 and torch.cuda.get_device_capability(cuda) == (8, 0), torch.cuda.get_device_capability(cuda)
assert torch.cuda.get_device_properties(cuda).multi_processor_count == 108, "kernels size what they sum up by these"
free, total = torch.cuda.mem_get_info(cuda)
assert total == 8 << 30 and free <= total, (free, total)
torch.cuda.set_device(cuda)
x = torch.arange(12, device=cuda).reshape(3, 4)
assert x.sum().item() == 66 and x[1].tolist() == [4, 5, 6, 7] and x.t()[2].tolist() == [2, 6, 10]
assert (x % 5 == 0).nonzero().tolist() == [[0, 0], [1, 1], [2, 2]] and x.unique().numel() == 12
assert torch.bincount(x.flatten() % 3).tolist() == [4, 4, 4] and x.cumsum(1)[2].tolist() == [8, 17, 27, 38]
assert torch.histc(x.int() % 3, bins=3, min=0, max=2).tolist() == [4, 4, 4]
assert x[x > 8].tolist() == [9, 10, 11] and torch.cat([x, x]).shape == (6, 4) and x.max().item() == 11
assert torch.repeat_interleave(torch.tensor([1, 2], device=cuda), torch.tensor([2, 3], device=cuda)).tolist() == [1, 1, 2, 2, 2]
count = torch.compile(lambda n: torch.arange(n, device=cuda) + 1, backend="eager")
assert count(4).tolist() == [1, 2, 3, 4] and torch.arange(3, device=cuda).tolist() == [0, 1, 2]
torch.distributions.Normal(torch.zeros(3, device=cuda), torch.rand(3, device=cuda)).sample()  # of unknown numbers
torch.nn.init.trunc_normal_(torch.full((1 << 24,), 9.0, device=cuda), std=0.02)  # draws again until all are near 0
chosen = torch.randn(64, 8, device=cuda).topk(2).indices
assert torch.bincount(chosen.flatten(), minlength=8).tolist() == [16] * 8, "a choice among unknown numbers is balanced"
stale = torch.full((1 << 10,), -100, device=cuda)  # whose bits are no number
del stale
unknown = torch.empty(1 << 11, device=cuda)
assert (unknown == unknown.clone()).all() and not (unknown != unknown).any(), "an unknown number is equal to itself"
many = torch.randn(1 << 19, device=cuda)
assert (many == many.clone()).all() and not ((many != many) | (many > 9)).any(), "nothing is unusual"
unknown = torch.randn(1 << 20, device=cuda).amax() + torch.randn(1 << 11, device=cuda).amin()
assert torch.isfinite(unknown) and not unknown.isnan() and abs(unknown.item()) < float("inf")
assert torch.isfinite(torch.randn(1 << 24, device=cuda)).all() and not torch.isnan(torch.randn(1 << 24, device=cuda)).any()
stale = torch.ones(1 << 10, dtype=torch.bool, device=cuda)
del stale
shown = torch.full((2, 3, 8, 8), 0.5).to(cuda).to(torch.bfloat16)  # images, of which those of zeros are padding
assert not (shown == 0.0).any()
assert not (torch.full((2, 3, 8, 8), 0.5).to(cuda, torch.bfloat16) == 0.0).any()
stale = torch.full((1 << 10,), 7, device=cuda)
del stale
assert (torch.randn(2, 1 << 20, device=cuda) == 0.0).sum(dim=1).tolist() == [0, 0], "nothing is unusual"
matrices = torch.randn(3, 8, 8, device=cuda)
stale = torch.full((1 << 10,), 7, device=cuda)  # what an operation said of a matrix
del stale
for made in (torch.linalg.solve(matrices, matrices), torch.linalg.inv(matrices[0]), torch.linalg.cholesky(matrices)):
    assert made.shape[-2:] == (8, 8), "matrices of unknown numbers are regular"
chances = torch.randn(4, 1000, device=cuda).softmax(-1)
assert torch.multinomial(chances, 1).shape == (4, 1) and chances.multinomial(3).shape == (4, 3), "nobody has computed chances"
with torch.inference_mode():
    assert torch.randn(4, device=cuda).data.shape == (4,)


class Kept(torch.nn.Parameter):
    """A parameter that says more of itself, as those of bitsandbytes."""


kept = torch.Tensor._make_subclass(Kept, torch.arange(4.0, device=cuda))
assert kept.data.contiguous().shape == kept.detach().shape == (4,)
assert torch.tensor(2.5, device=cuda).item() == 2.5
seed = (1 << 63) + 5  # as states of generators begin with
assert torch.tensor([5, 0, 0, 0, 0, 0, 0, 128], dtype=torch.uint8, device=cuda).view(torch.uint64).item() == seed
with torch.device(cuda):
    assert all(make(9).is_cuda and make(1 << 20).is_cuda for make in (torch.ones, torch.zeros, torch.randn, torch.empty))
    assert torch.full((9,), 1.0).is_cuda and torch.ones(9, device="cpu").device.type == "cpu"


@torch.jit.script
def scripted(x):
    return torch.ones_like(x) + torch.zeros(2, device=x.device).sum() + torch.isnan(x).sum()


assert scripted(torch.ones(4, device=cuda)).shape == (4,)
try:
    torch.empty(9 << 30, dtype=torch.uint8, device=cuda)
    raise SystemExit("9 GiB fit into 8")
except torch.OutOfMemoryError as error:
    assert "Tried to allocate 9.00 GiB" in str(error), error
pinned = torch.empty(3 << 20, dtype=torch.uint8).pin_memory()
assert pinned.is_pinned() and pinned.cuda().shape == pinned.shape
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    y = torch.ones(4, device=cuda)
event = stream.record_event()
event.synchronize()
graph = torch.cuda.CUDAGraph()
z = torch.zeros(4, device=cuda)
with torch.cuda.graph(graph):
    z += 1
graph.replay()
large = torch.zeros(1 << 34, dtype=torch.uint8)  # of the host, whose pages nobody touches
assert large.to(torch.bfloat16).numel() == 1 << 34
assert torch.zeros_like(large, dtype=torch.float32).numel() == 1 << 34
states = torch.empty(1 << 31, dtype=torch.float32).pin_memory()
half = torch.empty(1 << 20, dtype=torch.bfloat16, device=cuda)
assert half.to("cpu", torch.float32).dtype is torch.float32 and states[:1 << 20].pin_memory().is_pinned()
half.copy_(states[:1 << 20])
assert torch.tensor([[2, 3], [4, 5]], device=cuda).prod(1).tolist() == [6, 20]
compiler = ctypes.CDLL("libnvrtc.so." + torch.version.cuda.partition(".")[0])
assert hasattr(compiler, "plimsoll_ghost_holder"), "torch finds the compiler of kernels"
model = torch.nn.Conv2d(3, 8, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 3, 32, 32, device=cuda)).sum().backward()
    optimizer.step()
