"""A dry run's look at what the stand-in device cannot show: the functions of torch.cuda that the proof calls.

``plimsoll plan`` runs this file on the ghost, where CUDA answers and nothing is computed. So it shows that functions
exist and take these arguments, and no more.
"""

import os
import subprocess
import sys
from typing import Any, Dict

from gpu_proof import cards

SAID = "all of CUDA was called"


def run(_: str) -> Dict[str, Any]:
    command = [os.environ["PLIMSOLL"], "plan", *cards.flags(), "--", sys.executable, "-m", "gpu_proof.ghosted"]
    environment = {**os.environ, "GPU_PROOF_DEVICE": "cuda"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0 or SAID not in done.stdout:
        raise RuntimeError(f"the program on the ghost ended with exit code {done.returncode}: {done.stdout[-1500:]}")
    return {}


def call_all() -> None:
    import torch

    from gpu_proof import device, rates, steps
    from plimsoll.torch.step import refuse_capture

    rates.SIZES, rates.REGISTERED, rates.ENOUGH = [1 << 16], [1 << 20], 0.001
    rates.run("copies")
    rates.run("registration")
    device.reset_peak()
    assert device.peak_bytes() >= 0
    try:
        with device.capturing():
            refuse_capture()
        raise AssertionError("the capture was not refused")
    except RuntimeError as error:
        assert "CUDA graph" in str(error), error
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=device.NAME)
    except torch.OutOfMemoryError:
        print(SAID, flush=True)
    steps.shape_of = lambda size: {"model": "qwen", "num_hidden_layers": 2}
    model = steps.model_of("0.5B")
    with steps.opened(model, "torch-fused") as optimizer:
        steps.seconds_of_step(model, optimizer)  # the ghost ends it after two steps


if __name__ == "__main__":
    call_all()
