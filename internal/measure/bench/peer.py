"""One optimizer step of PyTorch or DeepSpeed on the CPU for each line of input.

The argument is JSON: "peer", whose steps; "elements", the number of parameters;
and "cpus", where to run, one thread on each. The first line of output says which
variants there are. Each line of input names one of them, and is answered with the
seconds that a step took and the most memory that the process held beside its
tensors.
"""

import json
import os
import sys
import time

request = json.loads(sys.argv[1])
os.sched_setaffinity(0, request["cpus"])  # before OpenMP counts its threads
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries, and what builds their kernels, print what they like

import torch

torch.set_num_threads(len(request["cpus"]))
version = torch.__version__
if request["peer"] == "deepspeed":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    version = f"{deepspeed.__version__} with torch {version}"

# A model is many tensors. Temporaries of a loop over them are small; those of
# foreach are as large as all of them.
TENSORS = 64


def variants(elements):
    """The ways to make a step, all over the same tensors."""
    random = lambda bound: torch.empty(elements).uniform_(-bound, bound)
    master, gradient = random(1e-2), random(1e-2)
    moment, variance = random(1e-3), random(1e-3).square_()
    bf16 = torch.zeros(elements, dtype=torch.bfloat16)

    def adamw(pieces, make=torch.optim.AdamW, step=lambda: torch.tensor(1000.0), **how):
        parameters = [torch.nn.Parameter(p) for p in master.chunk(pieces)]
        optimizer = make(parameters, **how)
        slices = zip(parameters, gradient.chunk(pieces), moment.chunk(pieces), variance.chunk(pieces))
        for p, g, m, v in slices:
            p.grad = g
            optimizer.state[p] = {"step": step(), "exp_avg": m, "exp_avg_sq": v}
        return optimizer

    if request["peer"] == "deepspeed":
        flat = adamw(1, DeepSpeedCPUAdam, lambda: 1000, adamw_mode=True)
        found = {"cpu_adam": flat.step}
    else:
        found = {"single": adamw(TENSORS, foreach=False).step, "foreach": adamw(TENSORS, foreach=True).step}
        try:
            found["fused"] = adamw(TENSORS, fused=True).step
            flat = adamw(1, fused=True)
        except (RuntimeError, TypeError):  # an older version: not on the CPU
            flat = adamw(1, foreach=False)

    def sequence():
        # What DeepSpeed does on the host in its ZeRO stages 1 and 2 with the
        # optimizer offloaded (deepspeed/runtime/zero/stage_1_and_2.py): norm,
        # unscale, update, bf16 copy, each over the whole flat partition.
        gradient.norm()
        gradient.mul_(1.0)
        flat.step()
        bf16.copy_(master)

    found["sequence"] = sequence
    return found


def memory(field):
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return 1024 * int(line.split()[1])


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def answer(line):
    print(json.dumps(line), file=answers, flush=True)


# The first steps import and set up what is not memory of a step.
for step in variants(TENSORS * 1024).values():
    step()

steps = variants(request["elements"])
tensors = memory("VmRSS")
answer({
    "version": version,
    "variants": [{"name": name, "whole_step": name == "sequence"} for name in steps],
})
for line in sys.stdin:
    reset_peak()
    begin = time.perf_counter()
    steps[line.strip()]()
    seconds = time.perf_counter() - begin
    answer({"seconds": seconds, "extra_bytes": max(0, memory("VmHWM") - tensors)})
