"""Trainings that run out of a GPU's memory under ``plimsoll run``, each in its own way, and what plimsoll explain makes of them.

The errors are those of PyTorch, on a GPU that is not there.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from gpt import ROOT
from gpu_not_there import gpu  # noqa: F401
from nightly import nightly_rows
from preloaded import python

# A program may read these: what it holds, and a model whose layers are width by width.
HEAD = """
import os, sys, time
import torch

def grab(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

class Net(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def train(model, batch, width, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        loss = model(torch.zeros(batch, width, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, "loss 1.5", flush=True)
"""


FILL = "kept = [grab(100) for _ in range(20)]\n"

# What a program does, and what is right: the end of the GPU's story, the phase, the first edit, the exit code.
PROGRAMS = {
    "load": ("model = Net(8192, 8).cuda()\n", "capacity", "load", "the load", 1),
    "forward": ("train(Net(4096, 8).cuda(), 4096, 4096)\n", "capacity", "forward", "micro batch", 1),
    "backward": (
        "class Late(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return grab(600)\n"
        "kept = grab(600)\n"
        "x = torch.zeros(4, device='cuda', requires_grad=True)\n"
        "loss = Late.apply(x).sum()\n"
        "loss.backward()\n",
        "capacity",
        "backward",
        "micro batch",
        1,
    ),
    "step": ("train(Net(4096, 5).cuda(), 64, 4096)\n", "capacity", "step", "optimizer", 1),
    "evaluate": (
        "model = Net(1024, 4).cuda()\n"
        "train(model, 64, 1024)\n"
        "def evaluate(model):\n"
        "    with torch.no_grad():\n"
        "        return torch.cat([model(torch.zeros(65536, 1024, device='cuda')) for _ in range(8)])\n"
        "evaluate(model)\n",
        "capacity",
        None,
        "per_device_eval_batch_size",
        1,
    ),
    "save": (
        "model = Net(4096, 5).cuda()\n"
        "keep = grab(500)\n"
        "def save_checkpoint(model):\n"
        "    torch.save({k: v.clone() for k, v in model.state_dict().items()}, 'model.pt')\n"
        "save_checkpoint(model)\n",
        "capacity",
        "checkpoint",
        "the state that is saved",
        1,
    ),
    "pieces": (
        "kept = [grab(9) for _ in range(92)]\ndel kept[::2]\nbig = grab(100)\n",
        "fragmentation",
        None,
        "PYTORCH_CUDA_ALLOC_CONF",
        1,
    ),
    "more than the card": ("grab(1 << 20)\n", "capacity", None, "micro batch", 1),
    "fraction": (
        "torch.cuda.set_per_process_memory_fraction(0.25)\n" + FILL,
        "fraction cap",
        None,
        "torch.cuda.set_per_process_memory_fraction",
        1,
    ),
    "expandable segments": ("torch.cuda.memory._set_allocator_settings('expandable_segments:True')\n" + FILL, "capacity", None, "micro batch", 1),
    "graph": ("with torch.cuda.graph(torch.cuda.CUDAGraph()):\n    " + FILL, "capacity", None, "micro batch", 1),
    "raised again": (
        "try:\n    " + FILL + "except torch.OutOfMemoryError as e:\n    raise RuntimeError('training failed here') from e\n",
        "capacity",
        None,
        "micro batch",
        1,
    ),
    "logged": (
        "import logging\n"
        "try:\n    " + FILL + "except Exception:\n    logging.exception('training failed')\n    os._exit(3)\n",
        "capacity",
        None,
        "micro batch",
        3,
    ),
    "printed": (
        "try:\n    " + FILL + "except Exception as e:\n    print('[ERROR] job failed:', e)\n    sys.exit(1)\n",
        "capacity",
        None,
        "micro batch",
        1,
    ),
    "thread": (
        "import threading\n"
        "t = threading.Thread(target=lambda: [grab(100) for _ in range(20)])\n"
        "kept = t.start(), t.join()\n"
        "sys.exit(1)\n",
        None,  # the list is gone when PyTorch looks, or not
        None,
        None,
        1,
    ),
}

# How a program is started. PROGRAM is the command.
WRAPPERS = {
    "tee": (["bash", "-c", '"$@" 2>&1 | tee log.txt', "bash", "PROGRAM"], 0),
    "shell": (["sh", "-c", '"$@"; code=$?; echo "finished at $(date)"; exit $code', "sh", "PROGRAM"], 1),
    "subprocess": ([sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)", "PROGRAM"], 1),
    "timeout": (["timeout", "600", "PROGRAM"], 1),
    "nohup": (["nohup", "PROGRAM"], 1),
    "a shell that ignores the code": (["sh", "-c", '"$@" || true', "sh", "PROGRAM"], 0),
    "a shell that loses the code": (["sh", "-c", '"$@"; echo "finished with $?"', "sh", "PROGRAM"], 0),
}


@pytest.fixture(scope="module")
def trainer(gpu):  # noqa: F811
    return python("torch", "torch.utils.data", "torch._dynamo", environment=tuple(gpu.items()))


def recorded(folder, trainer, program, code, *flags, wrapper=("PROGRAM",)):
    """Runs a program with a recording, and explains it."""
    (folder / "train.py").write_text(HEAD + program)
    command = [part for word in wrapper for part in ([*trainer, "train.py"] if word == "PROGRAM" else [word])]
    command = [os.environ["PLIMSOLL"], "run", "--record", "run.jsonl", *flags, "--", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == code, done.stdout
    command = [os.environ["PLIMSOLL"], "explain", "--json", "run.jsonl"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_end_of_a_gpu(tmp_path, trainer, name):
    program, detail, phase, edit, code = PROGRAMS[name]
    ended, e = recorded(tmp_path, trainer, program, code)
    cause, text = e["cause"], json.dumps(e, indent=1)
    assert (ended, cause["resource"], cause["rank"]) == (5, "gpu", 0), text
    if detail is not None:
        assert (cause["detail"], e["confidence"]) == (detail, "certain"), text
        assert e["edits"][0]["key"] == edit, text
        asked = re.search(r"asked for ([\d.]+ [KMGT]?i?B)", cause["text"])
        assert asked, text
    assert phase is None or cause["phase"] == phase, text
    if name not in ("more than the card", "thread"):
        assert e["holders"][0]["component"] in ("pytorch_allocated", "pytorch_reserved_unused"), text
        assert sum(h["bytes"] for h in e["holders"]) <= 1 << 30, text


@pytest.mark.parametrize("name", WRAPPERS)
def test_however_it_is_started(tmp_path, trainer, name):
    wrapper, code = WRAPPERS[name]
    ended, e = recorded(tmp_path, trainer, FILL, code, wrapper=wrapper)
    text = json.dumps(e, indent=1)
    assert (ended, e["cause"]["resource"], e["cause"]["detail"], e["cause"]["rank"]) == (5, "gpu", "capacity", 0), text
    assert (e["holders"][0]["component"], e["edits"][0]["key"]) == ("pytorch_allocated", "micro batch"), text


# Memory of a GPU that is not PyTorch's: what others hold of it, and what NCCL's allocator asks for.
BESIDE = {
    "another process": (
        "kept = [grab(100) for _ in range(40)]\n",
        {"CAPACITY": 8 << 30, "CONTEXT": 6 << 30},
        ("another process", "likely", "unexplained"),
    ),
    "NCCL": (
        "import torch.distributed as dist\n"
        "dist.init_process_group('nccl', init_method='file://' + os.path.abspath('store'), rank=0, world_size=1, "
        "device_id=torch.device('cuda:0'))\n"
        "pool = torch.cuda.MemPool(dist.group.WORLD._get_backend(torch.device('cuda')).mem_allocator)\n"
        "with torch.cuda.use_mem_pool(pool):\n    " + FILL,
        {},
        ("", "likely", None),
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_not_pytorchs(tmp_path, gpu, name):  # noqa: F811
    program, settings, (detail, confidence, holder) = BESIDE[name]
    variables = {**gpu, **{f"PLIMSOLL_GHOST_{k}": str(v) for k, v in settings.items()}}
    ended, e = recorded(tmp_path, [sys.executable], program, 1, wrapper=["env", *(f"{k}={v}" for k, v in variables.items()), "PROGRAM"])
    cause, text = e["cause"], json.dumps(e, indent=1)
    assert (ended, cause["resource"], cause["rank"], e["confidence"]) == (5, "gpu", 0, confidence), text
    assert cause.get("detail", "") == detail, text
    assert holder is None or e["holders"][0]["component"] == holder, text


def test_the_rank_that_ran_out(tmp_path, trainer):
    program = "if os.environ['RANK'] == '1':\n    " + FILL + "time.sleep(600)\n"
    ended, e = recorded(tmp_path, trainer, program, 1, "--nproc", "2")
    assert (ended, e["cause"]["resource"], e["cause"]["rank"]) == (5, "gpu", 1), json.dumps(e, indent=1)
    assert [v["rank"] for v in e["victims"]] == [0], json.dumps(e, indent=1)


# Ends that are no want of a GPU's memory, though words of it stand in the output.
OTHERS = {
    "a shape that is wrong": ("torch.empty(1 << 61, device='cuda')\n", "not_memory", 1),
    "another error after one that was overcome": (
        "size = 4096\n"
        "while size:\n"
        "    try:\n        kept = grab(size); break\n"
        "    except torch.OutOfMemoryError as e:\n        print(f'batch does not fit: {e}', flush=True); size //= 2\n"
        "for step in range(20): print('step', step, 'loss', 2.5, flush=True)\n"
        "raise KeyError('labels')\n",
        "not_memory",
        1,
    ),
    "overcome, and ended well": (
        "size = 4096\n"
        "while size:\n"
        "    try:\n        kept = grab(size); break\n"
        "    except torch.OutOfMemoryError as e:\n        print(f'batch does not fit: {e}', flush=True); size //= 2\n"
        "for step in range(20): print('step', step, 'loss', 2.5, flush=True)\n",
        "none",
        0,
    ),
    "a forked loader": (
        "torch.zeros(1, device='cuda')\n"
        "if os.fork() == 0:\n    torch.zeros(1, device='cuda')\n"
        "raise SystemExit(os.wait()[1] >> 8)\n",
        "not_memory",
        1,
    ),
    "SIGTERM of somebody": ("import signal\nos.kill(os.getpid(), signal.SIGTERM)\n", "", 143),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_gpu_ran_out(tmp_path, trainer, name):
    program, resource, code = OTHERS[name]
    _, e = recorded(tmp_path, trainer, program, code)
    assert e["cause"]["resource"] == resource, json.dumps(e, indent=1)


@pytest.mark.parametrize("launcher", [row for row in nightly_rows(("torchrun",), ("accelerate",))])
def test_a_launcher_within(tmp_path, trainer, gpu, launcher):  # noqa: F811
    commands = {
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
        "accelerate": ["-m", "accelerate.commands.launch", "--num_processes", "2", "--multi_gpu"],
    }
    program = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n    " + FILL + "dist.barrier()\n"
    )
    wrapper = ["env", *(f"{k}={v}" for k, v in {**gpu, "PLIMSOLL_GHOST_DEVICES": "2"}.items()), sys.executable, *commands[launcher]]
    ended, e = recorded(tmp_path, [], program, 1, wrapper=[*wrapper, "PROGRAM"])
    assert (ended, e["cause"]["resource"], e["cause"]["rank"]) == (5, "gpu", 1), json.dumps(e, indent=1)
