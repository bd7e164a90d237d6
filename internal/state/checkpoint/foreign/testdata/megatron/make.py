"""Saves a checkpoint of a small GPT with megatron-core's own optimizer and dist_checkpointing, on CPUs over gloo.

    python -c "$(cat make.py)" OUT TENSOR_PARALLEL RANKS SHARDING fp32|bf16 [EXPERTS [LOAD [NAMES]]]

With EXPERTS, each layer has so many experts, on as many ranks as are not tensor parallel. With LOAD, the optimizer loads
that checkpoint instead of training, takes a step, and OUT is saved then. With NAMES, the keys are those of Transformer
Engine's layers, whose layer norm before experts is a module of its own, and the numbers are others.

fully_reshardable was made with megatron-core 0.16.1 and torch 2.15, 2 ranks in bf16, flattened with 0.12.1 and torch
2.4, 4 ranks in fp32. own_experts and fused_experts have two experts, on one rank in bf16, the second with NAMES, with
megatron-core 0.16.1 and torch 2.15. The script must be given by -c: writers are processes that would run a file again.
"""

import inspect
import os
import socket
import sys

out, tensor_parallel, world, sharding, bf16 = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5] == "bf16"
free = socket.socket()
free.bind(("127.0.0.1", 0))
port = free.getsockname()[1]
free.close()
rank, children = 0, []
while rank == 0 and len(children) < world - 1:
    if child := os.fork():
        children.append(child)
    else:
        rank = len(children) + 1
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist

dist.init_process_group("gloo")


class Event:
    def __init__(self, **_):
        pass

    record = synchronize = wait = lambda self, *_: None


def on_cpu(make):
    def made(*arguments, **options):
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        return make(*arguments, **options)

    return made


# megatron-core asks for CUDA in few places.
torch.cuda.current_device = lambda: "cpu"
torch.cuda.Event = torch.cuda.Stream = Event
torch.cuda.synchronize = lambda *_: None
torch.cuda.set_device = lambda *_: None
torch.cuda.empty_cache = lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self
type_of = torch.Tensor.type
torch.Tensor.type = lambda self, *a: type_of(self, *a) if a else type_of(self).replace("torch.", "torch.cuda.")
for name in ("tensor", "zeros", "empty", "ones", "full"):
    setattr(torch, name, on_cpu(getattr(torch, name)))

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

experts = int(sys.argv[6]) if len(sys.argv) > 6 else 0
load = sys.argv[7] if len(sys.argv) > 7 else ""
renamed = len(sys.argv) > 8
expert_parallel = world // tensor_parallel if experts else 1
parallel_state.initialize_model_parallel(tensor_parallel, expert_model_parallel_size=expert_parallel)
dtype = torch.bfloat16 if bf16 else torch.float32
distributed = sharding != "none"
config = TransformerConfig(
    num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, add_bias_linear=False, use_cpu_initialization=True,
    gated_linear_unit=True, bias_activation_fusion=False, masked_softmax_fusion=False, params_dtype=dtype, bf16=bf16,
    tensor_model_parallel_size=tensor_parallel, sequence_parallel=bool(experts) and tensor_parallel > 1,
    **(dict(num_moe_experts=experts, expert_model_parallel_size=expert_parallel, moe_token_dispatcher_type="alltoall") if experts else {}),
)  # fmt: skip
torch.manual_seed(0)
layers = get_gpt_layer_local_spec(experts or None)
if renamed:
    del layers.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
model = GPTModel(config, layers, vocab_size=16, max_sequence_length=8, position_embedding_type="rope", share_embeddings_and_output_weights=False)
model = model.bfloat16() if bf16 else model
ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=bf16), model)
options = OptimizerConfig(lr=1e-2, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=distributed, clip_grad=0.0, weight_decay=0.1)
optimizer = get_megatron_optimizer(options, [ddp])


def step(seed):
    torch.manual_seed(seed + rank + 1000 * renamed)
    for inner in optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        inner.optimizer.step()
        if hasattr(inner, "_copy_main_params_to_model_params"):
            inner._copy_main_params_to_model_params()
    if distributed:
        ddp.start_param_sync(force_sync=True)


how = {}
if distributed:
    metadata = {"distrib_optim_sharding_type": sharding, "distrib_optim_fully_reshardable_mem_efficient": True}
    named = "metadata" in inspect.signature(optimizer.chained_optimizers[0].sharded_state_dict).parameters
    how = {"metadata": metadata} if named else {"sharding_type": sharding}


set_states = getattr(type(optimizer.chained_optimizers[0]), "_set_main_param_and_optimizer_states", None)
if set_states:  # megatron-core has the steps of torch's Adam in its groups, and looks for them here, too

    def with_step(self, p, tensors):
        group, order = self.model_param_group_index_map[p]
        main = self.optimizer.param_groups[group]["params"][order]
        set_states(self, p, {"step": self.optimizer.state[main]["step"], **tensors})

    type(optimizer.chained_optimizers[0])._set_main_param_and_optimizer_states = with_step


def states(loading):
    weights = model.sharded_state_dict()
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, **how), "iteration": 3}


if load:
    step(300)  # makes states, which are loaded over
    saved = dist_checkpointing.load(states(True), load)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for inner in optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():  # which share one tensor
            state["step"] = state["step"].clone()
    step(200)
else:
    for i in range(3):
        step(100 + 10 * i)
if rank == 0:
    os.makedirs(out)
dist.barrier()
dist_checkpointing.save(states(False), out)

dist.barrier()
ends = [os.waitpid(child, 0)[1] for child in children if rank == 0]
os._exit(max(map(os.waitstatus_to_exitcode, ends), default=0))
