"""A training whose parameters have the given MiB. It saves its state after every step to the path that it is given."""

import sys

import torch


def main() -> None:
    numel = int(sys.argv[1]) << 18
    parameter = torch.nn.Parameter(torch.full((numel,), 1.0))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, foreach=False)
    for step in range(3):
        loss = (parameter * 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item()}", flush=True)
        if len(sys.argv) > 2:
            torch.save({"model": parameter, "optimizer": optimizer.state_dict()}, sys.argv[2])


if __name__ == "__main__":
    main()
