"""What a small GPT of megatron-core holds for the backward pass with low-rank adapters on its layers.

The model, its layers of megatron-core (--transformer-impl local) and its collectives are real: every rank of tensor
parallelism is a process on the CPU, and gloo communicates. The adapters are the code of the programs that make them, from
a folder with its source: Megatron-Bridge (--bridge, the folder with megatron/bridge) or mcore-bridge of ms-swift
(--mcore-bridge, the folder with mcore_bridge). mcore-bridge adapts layers of Transformer Engine; megatron-core's layers
stand for them, which divide weights and sequences alike.

Prints one JSON document for each case: the elements of what the first rank trains, by module, and the bytes
that its graph has saved after the forward pass, but for parameters.
"""

import argparse
import importlib.machinery
import json
import pathlib
import sys
import tempfile
import types

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

TESTS = pathlib.Path(__file__).parents[2] / "python" / "tests"
LENGTH, SEQUENCES, HIDDEN, VOCABULARY = 64, 2, 64, 512


def cases():
    plain = {"tensor": 1, "sequence": False, "recompute": False, "experts": 0, "dropout": 0.0, "targets": None, "tuned": True}
    for changes in (
        {"tuned": False}, {}, {"dropout": 0.1}, {"targets": ["linear_qkv"]}, {"targets": ["linear_fc2"]}, {"recompute": True},
        {"tensor": 2, "tuned": False}, {"tensor": 2}, {"tensor": 2, "dropout": 0.1}, {"tensor": 2, "sequence": True},
        {"tensor": 2, "sequence": True, "dropout": 0.1}, {"tensor": 2, "sequence": True, "recompute": True},
        {"experts": 4, "tuned": False}, {"experts": 4}, {"experts": 4, "recompute": True},
    ):  # fmt: skip
        yield {**plain, **changes}


def module(name, **attributes):
    """A module that stands for one that is not here, or for a package whose own start would import the whole program."""
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    made.__dict__.update(attributes)
    sys.modules[name] = made
    return made


def bridge(folder, case):
    """Megatron-Bridge's LoRA on a model."""
    for name in "megatron.bridge", "megatron.bridge.peft", "megatron.bridge.utils":
        module(name, __path__=[str(pathlib.Path(folder, *name.split(".")))])
    module("megatron.bridge.utils.common_utils", print_rank_0=lambda *_: None)
    if "transformer_engine" not in sys.modules:
        anything = type("Anything", (torch.nn.Module,), {})
        operations = types.SimpleNamespace(Sequential=anything)
        pytorch = module("transformer_engine.pytorch", Linear=anything, LayerNormLinear=anything, ops=operations)
        module("transformer_engine", pytorch=pytorch, __path__=[])
    from megatron.bridge.peft import module_matcher, utils
    from megatron.bridge.peft.lora import LoRA

    module_matcher.HAVE_TE = utils.HAVE_TE = False
    options = {"target_modules": case["targets"]} if case["targets"] else {}
    return lambda model: LoRA(dim=8, alpha=16, dropout=case["dropout"], **options)(model)


def mcore_bridge(folder, case):
    """The adapters of mcore-bridge, which PEFT puts on a model. What is done around them is that of ms-swift."""
    from megatron.core import extensions
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding  # noqa: F401
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    nothing = {name: type(name, (torch.nn.Module,), {}) for name in (
        "TEColumnParallelGroupedLinear", "TEGroupedLinear", "TELayerNormColumnParallelLinear", "TELinear",
        "TERowParallelGroupedLinear",
    )}  # fmt: skip
    module("megatron.core.extensions.transformer_engine", TEColumnParallelLinear=ColumnParallelLinear,
           TERowParallelLinear=RowParallelLinear, **nothing)  # fmt: skip
    extensions.transformer_engine = sys.modules["megatron.core.extensions.transformer_engine"]
    module("transformer_engine", __path__=[])
    for name in "mcore_bridge", "mcore_bridge.tuners":
        module(name, __path__=[str(pathlib.Path(folder, *name.split(".")))])
    import contextlib

    module("mcore_bridge.utils", get_current_device=lambda: "cpu", patch_deepcopy=contextlib.nullcontext)
    import transformers.utils

    # On NPUs mcore-bridge adapts layers of megatron-core itself, by the same code.
    transformers.utils.is_torch_npu_available = lambda *_, **__: True
    from mcore_bridge.tuners import lora, patcher  # noqa: F401
    from peft import LoraConfig, get_peft_model

    lora._use_legacy_npu_local_linear = lambda: True

    def tune(model):
        names = case["targets"] or ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
        config = LoraConfig(r=8, lora_alpha=16, lora_dropout=case["dropout"], target_modules=names)
        tuned = get_peft_model(model, config).base_model.model
        # ms-swift wraps the model in Float16Module behind the adapters, and mcore-bridge has its inputs need gradients.
        tuned.bfloat16().embedding.register_forward_hook(lambda _, __, x: x if x.requires_grad else x.requires_grad_(True))
        return tuned

    return tune


class Normalized(torch.autograd.Function):
    """A norm that saves its input and two numbers of each row, as one kernel does."""

    @staticmethod
    def forward(ctx, x, weight):
        factor = x.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
        ctx.save_for_backward(x, weight, torch.cat([factor, factor], -1))
        return (x * factor).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight, factors = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            made = (x * factors[..., :1]).to(x.dtype) * weight
            return torch.autograd.grad(made, (x, weight), gradient)


class Norm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        return Normalized.apply(x, self.weight)


def gpt(case):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(case["tensor"], expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(1)
    experts, bf16 = case["experts"], torch.bfloat16
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128, params_dtype=bf16,
        use_cpu_initialization=True, bf16=True, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        tensor_model_parallel_size=case["tensor"], sequence_parallel=case["sequence"], gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        persist_layer_norm=False, num_moe_experts=experts or None, moe_router_topk=2, moe_ffn_hidden_size=64 if experts else None,
        moe_token_dispatcher_type="alltoall", **(recompute if case["recompute"] else {}),
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(experts or None, normalization="RMSNorm"), VOCABULARY, LENGTH,
                     position_embedding_type="rope", share_embeddings_and_output_weights=False)  # fmt: skip
    return model.to(bf16)


class Saved:
    """Storages that the graph has saved, but for those of parameters."""

    def __init__(self, parameters):
        self.known = {p.untyped_storage().data_ptr() for p in parameters}
        self.held = {}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.held[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    def bytes(self):
        return sum(size for size, _ in self.held.values())


def matrix(name):
    """The module of a parameter, with A or B for those of an adapter."""
    for mark, is_matrix in {".adapter.linear_in": "A", ".adapter.linear_out": "B", ".lora_A": "A", ".lora_B": "B"}.items():
        if mark in name:
            return name.split(mark)[0].split(".")[-1] + "." + is_matrix
    return name.split(".")[-2]


def run(rank, arguments, case, results):
    sys.path.insert(0, str(TESTS))
    dist.init_process_group("gloo", f"file://{arguments.rendezvous}", rank=rank, world_size=case["tensor"])
    import megatron_cpu

    from megatron.core.transformer import torch_norm

    megatron_cpu.pretend()
    # Norms and dropout save what they save on a GPU.
    torch_norm.WrappedTorchNorm.__new__ = lambda cls, config, hidden_size, eps=1e-5, **_: Norm(hidden_size)
    torch.nn.functional.dropout = lambda x, p, training, inplace=False: torch.native_dropout(x, p, training)[0]
    model = gpt(case)  # before anything stands for Transformer Engine
    if case["tuned"]:
        tune = bridge(arguments.bridge, case) if arguments.bridge else mcore_bridge(arguments.mcore_bridge, case)
        model = tune(model)
    model.train()
    saved = Saved(model.parameters())
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
    positions = torch.arange(LENGTH).expand(SEQUENCES, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = model(tokens, positions, mask, labels=tokens)
    held = saved.bytes()
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[matrix(name)] = trained.get(matrix(name), 0) + parameter.numel()
    loss.float().mean().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if rank == 0:
        results.put({**case, "saved": held, "trained": trained, "without_gradient": without})
    dist.barrier()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bridge")
    parser.add_argument("--mcore-bridge")
    arguments = parser.parse_args()
    for case in cases():
        arguments.rendezvous = tempfile.mktemp()
        results = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(run, (arguments, case, results), nprocs=case["tensor"])
        print(json.dumps(results.get()))


if __name__ == "__main__":
    main()
