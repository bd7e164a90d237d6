"""Holds memory of the host in several ways."""
import ctypes
import multiprocessing

import torch

MIB = 1 << 20


def hold(begun, ended):
    own = bytearray(b"1" * 40 * MIB)
    begun.set()
    ended.wait()
    return own


forked = multiprocessing.get_context("fork")
begun, ended = forked.Event(), forked.Event()
child = forked.Process(target=hold, args=(begun, ended), daemon=True)
child.start()
begun.wait()
read = bytearray(b"1" * 200 * MIB)
passing = torch.empty(512 * MIB, dtype=torch.uint8)
del passing
kept = torch.nn.Linear(1024, 16 * 1024, bias=False)
kept.weight.data[:1] = 1.0
pinned = torch.empty(3 * MIB, dtype=torch.uint8).pin_memory()
registered = torch.empty(16 * MIB, dtype=torch.uint8)
torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), 16 * MIB, 0)
cuda, given_back = ctypes.CDLL(None), ctypes.c_void_p()
assert cuda.cudaMallocHost(ctypes.byref(given_back), ctypes.c_size_t(32 * MIB)) == 0 and cuda.cudaFreeHost(given_back) == 0
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    optimizer.step()
ended.set()
