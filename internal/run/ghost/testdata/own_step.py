"""Begins with weights that are not here, and writes its parameters without an optimizer."""
import torch

model = torch.nn.Linear(1024, 1024, bias=False).cuda()
model.load_state_dict(torch.hub.load_state_dict_from_url("https://weights.invalid/model.pth"))
for _ in range(9):
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
    model.zero_grad()
