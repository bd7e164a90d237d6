"""A data loader whose workers return large samples, for 1000 steps. The argument "kill" ends a worker in step 2."""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, numel: int) -> None:
        self.numel = numel

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if sys.argv[2:] == ["kill"] and index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((self.numel,), 1.0)


def main() -> None:
    loader = DataLoader(Samples(int(sys.argv[1]) << 18), batch_size=2, num_workers=2)
    for step, batch in enumerate(loader):
        print(f"step {step}: {batch.sum().item()}", flush=True)


if __name__ == "__main__":
    main()
