"""Converts a model of 4 GiB on the host: nothing of it is ever made. What has a gradient keeps it."""
import torch

own = torch.nn.Parameter(torch.empty(1024, 1024))
for convert in (lambda x: x.bfloat16(), lambda x: x.to(torch.bfloat16), lambda x: x.clone(), lambda x: x.to("cpu", copy=True)):
    torch.autograd.grad(convert(own).sum(), own)
model = torch.nn.Sequential(*(torch.nn.Linear(16384, 16384, bias=False) for _ in range(4)))
model = model.bfloat16().double().half().to(torch.bfloat16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(1, 16384, dtype=torch.bfloat16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
