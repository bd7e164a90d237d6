"""Makes the states of its optimizer by a step of its own, before any pass, as DeepSpeed's BF16_Optimizer does."""
import torch

model = torch.nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for p in model.parameters():
    p.grad = torch.zeros_like(p)
optimizer.step()
optimizer.zero_grad()
for _ in range(9):
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
