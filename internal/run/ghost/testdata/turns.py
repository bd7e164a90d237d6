"""Trains a generator after every two steps of its critic, each on two micro batches that workers have transformed."""
import torch


class Transform(torch.nn.Module):
    def forward(self, x):
        return x


class Samples(torch.utils.data.Dataset):
    transform = Transform()

    def __len__(self):
        return 999

    def __getitem__(self, i):
        return self.transform(torch.ones(1024))


samples = iter(torch.utils.data.DataLoader(Samples(), batch_size=8, num_workers=1))
generator, critic = (torch.nn.Linear(1024, 1024, bias=False).cuda() for _ in range(2))
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (critic, generator)]
for turn in range(99):
    for _ in range(2):
        made = generator(next(samples).cuda())
        critic(made if turn % 3 == 2 else made.detach()).sum().backward()
    optimizer = optimizers[turn % 3 == 2]
    optimizer.step()
    optimizer.zero_grad()
