"""Checks what a GPU says of itself: kernels size their buffers by it, and whether they can run."""
import torch

told = torch.cuda.get_device_properties(0)
assert (told.major, told.minor, told.multi_processor_count) == (8, 9, 128), told
assert told.max_threads_per_multi_processor == 1536, told.max_threads_per_multi_processor
assert told.shared_memory_per_block_optin == 99 << 10, told.shared_memory_per_block_optin
assert told.shared_memory_per_multiprocessor == 100 << 10, told.shared_memory_per_multiprocessor
weight = torch.ones(8, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    weight.sum().backward()
    optimizer.step()
