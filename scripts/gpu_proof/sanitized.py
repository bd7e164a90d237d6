"""20 steps that compute-sanitizer watches: AdamW on the host's cores, and states that come to the device."""

import contextlib

import torch

import plimsoll.torch
from gpu_proof import device
from gpu_proof.given import Model


def main() -> None:
    for wrap in (False, True):
        model = Model(device.NAME, torch.bfloat16, [(300, 200), (200,), (65, 33)])
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        optimizer = plimsoll.torch.StateOffload(inner, chunk_bytes=50_000, master="split") if wrap else None
        with contextlib.closing(
            optimizer or plimsoll.torch.AdamW(model.parameters(), model=model, overlap="forward")
        ) as chosen:
            for step in range(10):
                model(model.gradients(step)).backward()
                chosen.step()
                chosen.zero_grad()
            chosen.synchronize()
    device.synchronize()
    print("made 20 steps", flush=True)


if __name__ == "__main__":
    main()
