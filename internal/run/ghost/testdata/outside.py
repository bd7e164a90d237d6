"""Takes memory of the GPU and managed memory without PyTorch's allocator, as libraries do that call CUDA themselves."""
import ctypes

import torch

MIB = 1 << 20
cuda = ctypes.CDLL(None)


def take(function, mib, *arguments):
    pointer = ctypes.c_void_p()
    assert getattr(cuda, function)(ctypes.byref(pointer), ctypes.c_size_t(mib * MIB), *arguments) == 0, function
    return pointer


def free(function, pointer, *arguments):
    assert getattr(cuda, function)(pointer, *arguments) == 0, function


def managed(numbers):
    """A tensor of the host in managed memory, as bitsandbytes makes for paged optimizers."""
    memory = (ctypes.c_char * (4 * numbers)).from_address(take("cudaMallocManaged", 4 * numbers // MIB, 1).value)
    return torch.frombuffer(memory, dtype=torch.float32, count=numbers)


class Paged(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"] = managed(parameter.numel())


class Placed(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [(name, ctypes.c_int) for name in ("type", "handles", "place", "device")] + [("rest", ctypes.c_char * 48)]


model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(4)))
kept = take("cudaMalloc", 24)
passing = take("cuMemAlloc_v2", 40)
free("cuMemFree_v2", passing)
passing = take("cuMemAllocAsync", 8, None)
free("cuMemFreeAsync", passing, None)
created = take("cuMemCreate", 6, ctypes.byref(Placed(1, 0, 1, 0)), ctypes.c_ulonglong(0))
beyond = take("cudaMallocManaged", 4096, 1)  # more than the GPU has
kind = (ctypes.c_int * 16)()
assert cuda.cudaPointerGetAttributes(kind, beyond) == 0 and kind[0] == 3  # cudaMemoryTypeManaged
optimizer = Paged(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
