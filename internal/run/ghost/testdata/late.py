"""Gives a block of 64 MiB back while another stream uses it, and takes as much again."""
import torch

MIB = 1 << 20
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.cuda.Stream()
for _ in range(3):
    for _ in range(2):
        block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        block.record_stream(other)
        del block
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
event = other.record_event()
while not event.query():  # a program that asks and does nothing else has an answer in the end
    pass
