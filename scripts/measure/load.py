"""What ranks hold on the host when from_pretrained has loaded a model under FSDP.

Makes a model of --config with random weights in bfloat16, starts --ranks processes that
load it as --dtype with FSDP_CPU_RAM_EFFICIENT_LOADING, and prints one JSON document: the
number of parameters, and of every rank the anonymous memory that it has more of than before,
at most and at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading


def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Looks at the anonymous memory again and again, as the kernel keeps no peak of it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self.loaded = 0, threading.Event()

    def run(self):
        while not self.loaded.wait(0.0005):
            self.bytes = max(self.bytes, anonymous())

    def end(self):
        self.loaded.set()
        self.join()
        return max(self.bytes, anonymous())


def load(folder, dtype):
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    before, peak = anonymous(), Peak()
    peak.start()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    held = {"anonymous": anonymous() - before, "peak": peak.end() - before}
    dist.barrier()
    print(json.dumps({"rank": rank} | held | {"parameters": sum(p.numel() for p in model.parameters())}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="a config.json of a Llama")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--efficient", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank:
        return load(a.folder, a.dtype)

    with tempfile.TemporaryDirectory() as folder:
        start(a, folder)


def start(a, folder):
    """Runs the ranks and prints what they hold."""
    import torch
    import transformers

    config = transformers.LlamaConfig.from_json_file(a.config)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    ranks = []
    for rank in range(a.ranks):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": a.ranks,
                     "ACCELERATE_USE_FSDP": True, "FSDP_CPU_RAM_EFFICIENT_LOADING": a.efficient}
        environment = os.environ | {name: str(value).lower() for name, value in variables.items()}
        command = [sys.executable, __file__, "--rank", "--folder", folder, "--dtype", a.dtype]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    lines = [rank.communicate()[0].strip().splitlines()[-1] for rank in ranks]
    print(json.dumps({"transformers": transformers.__version__, "ranks": [json.loads(line) for line in lines]}))


if __name__ == "__main__":
    main()
