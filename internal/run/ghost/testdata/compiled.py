"""Trains a compiled model of a class of its own, which must be compiled once."""
import torch
import torch._dynamo.config as dynamo

dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 1, True


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, x):
        return self.layer(x)


model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters())
train = torch.compile(model, backend="eager")
for _ in range(3):
    train(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
