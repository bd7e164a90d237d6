"""Holds memory of the host that lines of code with strange names ask for, and fails with a strange message if it is told to."""
import sys

import torch

NAMES = "a\tb.py", "a\nb.py", "\udce9.py", "\x1b[31m.py", "long/" * 800 + "long.py"
if "fail" in sys.argv:
    raise ValueError("\udcff\tof it")
kept = []
for name in NAMES:
    deep = f"def {'f' * 900}(n):\n    return {'f' * 900}(n - 1) if n else torch.empty(16 << 20, dtype=torch.uint8)\n"
    space = {"torch": torch}
    exec(compile(deep, name, "exec"), space)
    kept.append(space["f" * 900](30))
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    optimizer.step()
