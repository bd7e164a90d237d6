"""What ranks hold on the host while a checkpoint is saved, and while a job resumes from it.

Makes a Llama of --config with random weights on --ranks processes, shards it with --engine, makes one optimizer step
on the CPU, and saves and loads a checkpoint with the code of transformers' Trainer: accelerate's functions for FSDP, and
DeepSpeed's engine. Prints one JSON document: of every rank the anonymous memory that it has more of than before, at most
and at the end of each part. Files go to memory (/dev/shm), which is not counted.
"""

import argparse
import gc
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import types

from load import anonymous

ENGINES = ["fsdp1", "fsdp2", "zero1", "zero2", "zero3"]


# A process that looks at the anonymous memory of another one. A thread would stand still while a writer holds the lock of
# the interpreter.
WATCH = """
import select, sys
most = 0
while True:
    with open(f"/proc/{sys.argv[1]}/status") as status:
        most = max(most, next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")))
    if select.select([sys.stdin], [], [], 0.001)[0]:
        if not sys.stdin.readline():
            break
        print(most, flush=True)
        most = 0
"""


class Parts(dict):
    """The anonymous memory of each part of a save: at most, and at its end, beyond what was held before."""

    def __init__(self):
        command = [sys.executable, "-S", "-c", WATCH, str(os.getpid())]
        self.watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def most(self):
        """The most since the last call."""
        self.watch.stdin.write("\n")
        self.watch.stdin.flush()
        return int(self.watch.stdout.readline())

    def measure(self, name, body):
        gc.collect()
        self.most()
        before = anonymous()
        result = body()
        peak = self.most() - before
        gc.collect()
        self[name] = {"peak": peak, "end": anonymous() - before}
        return result


def step(model, optimizer, vocabulary):
    """One step, so that the optimizer has its states."""
    import torch

    tokens = torch.randint(0, vocabulary, (1, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    if optimizer is None:
        model.backward(loss)
        model.step()
        return
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Plugin(types.SimpleNamespace):
    """What accelerate's functions read of a FullyShardedDataParallelPlugin."""

    @classmethod
    def of(cls, version, state_dict):
        from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

        kind = fsdp.StateDictType[state_dict]
        full = kind is fsdp.StateDictType.FULL_STATE_DICT
        model, optimizer = ((fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig) if full else
                            (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig))
        options = {"offload_to_cpu": True, "rank0_only": True} if full else {"offload_to_cpu": True}
        return cls(fsdp_version=version, state_dict_type=kind, state_dict_config=model(**options),
                   optim_state_dict_config=optimizer(**options), sync_module_states=True)


def sharded(model, version):
    import torch.distributed as dist

    layers = model.model.layers
    if version == 1:
        import functools

        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True,
                                        device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_fsdp(a, model, parts):
    import torch
    import torch.distributed as dist
    from accelerate.utils import fsdp_utils

    fsdp_utils.logger = logging.getLogger("save")  # accelerate's own wants a state that starts the ranks
    version, rank = int(a.engine[-1]), dist.get_rank()
    plugin = Plugin.of(version, a.state_dict)
    accelerator = types.SimpleNamespace(num_processes=dist.get_world_size(), process_index=rank, is_fsdp2=version == 2,
                                        is_main_process=rank == 0, wait_for_everyone=dist.barrier)
    model = sharded(model, version)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, a.vocabulary)
    folder = os.path.join(a.folder, "checkpoint")
    parts.measure("save model", lambda: fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder))
    parts.measure("save optimizer",
                  lambda: fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder))
    dist.barrier()
    parts.measure("resume model", lambda: fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder))
    parts.measure("resume optimizer",
                  lambda: fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder))


def configuration(stage):
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 1_000_000,
            "allgather_bucket_size": 1_000_000}
    return {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


def with_deepspeed(a, model, parts):
    import accelerate
    import deepspeed
    import torch
    from accelerate.utils import DistributedType

    config = configuration(int(a.engine[-1]))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    step(engine, None, a.vocabulary)
    accelerator = types.SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_config=config,
                                        unwrap_model=lambda m: m.module)
    held = []
    parts.measure("save model", lambda: held.append(accelerate.Accelerator.get_state_dict(accelerator, engine)))
    held.clear()
    parts.measure("save optimizer", lambda: engine.save_checkpoint(os.path.join(a.folder, "checkpoint")))
    parts.measure("resume optimizer", lambda: engine.load_checkpoint(os.path.join(a.folder, "checkpoint")))


def run(a):
    import torch
    import torch.distributed as dist
    import transformers

    torch.set_num_threads(1)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{a.folder}/meeting", rank=rank, world_size=ranks)
    config = transformers.LlamaConfig.from_json_file(a.config)
    a.vocabulary = config.vocab_size
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16 if a.engine.startswith("zero") else torch.float32)
    parts, elements = Parts(), sum(p.numel() for p in model.parameters())
    (with_deepspeed if a.engine.startswith("zero") else with_fsdp)(a, model, parts)
    dist.barrier()
    print(json.dumps({"rank": rank, "parameters": elements, "parts": parts}))
    sys.stdout.flush()
    os._exit(0)


def start(a):
    """Runs the ranks and prints what they hold."""
    import accelerate
    import torch

    ranks = []
    for rank in range(a.ranks):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(a.ranks), "LOCAL_SIZE": str(a.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536"}  # so that what is freed is the system's
        command = [sys.executable, __file__, "--rank", "--folder", a.folder, "--config", a.config, "--engine", a.engine,
                   "--state-dict", a.state_dict]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    lines = [rank.communicate()[0].strip().splitlines()[-1] for rank in ranks]
    versions = {"torch": torch.__version__, "accelerate": accelerate.__version__}
    print(json.dumps({"versions": versions, "ranks": [json.loads(line) for line in lines]}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="a config.json of a Llama")
    parser.add_argument("--engine", choices=ENGINES, default="fsdp2")
    parser.add_argument("--state-dict", choices=["FULL_STATE_DICT", "SHARDED_STATE_DICT"], default="FULL_STATE_DICT")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank:
        return run(a)
    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as a.folder:
        start(a)


if __name__ == "__main__":
    main()
