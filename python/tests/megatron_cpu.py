"""megatron-core on the CPU: a small GPT, trained by its own classes among gloo ranks.

megatron-core asks torch.cuda for a device, for streams and for random states, and asks tensors for their type. Here the CPU
answers. What computes is torch on the CPU, and what communicates is gloo.
"""

import contextlib
import types

import torch
import torch.distributed as dist


class Stream:
    """A stream on which everything has been done."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self


TYPES = {
    torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float16: "torch.cuda.HalfTensor"
}  # fmt: skip


def on_cpu(function):
    """A function of torch that takes the CPU for a GPU, and plain memory for pinned memory."""

    def call(*arguments, pin_memory=False, **options):
        cpu = lambda x: "cpu" if isinstance(x, str) and x.startswith("cuda") else x
        return function(*map(cpu, arguments), **{name: cpu(x) for name, x in options.items()})

    return call


def following(function):
    """A method of tensors whose result is on the host where the tensor is, or as its name is ``cpu``."""

    def call(tensor, *arguments, **options):
        result = function(tensor, *arguments, **options)
        if function.__name__ == "cpu" or tensor.__dict__.get("is_host"):
            result = result.view(result.shape) if result is tensor else result
            result.is_host = True
        return result

    return call


def pretend():
    """Has the CPU answer where megatron-core asks for a GPU. It is for a process that ends with its job."""
    # torch and megatron-core register functions of torch.cuda when they are imported: those of a CPU come after.
    import megatron.core.models.gpt  # noqa: F401
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    plain = torch.Tensor.type
    cuda = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.current_stream = cuda.default_stream = cuda.Stream = Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = cuda.manual_seed = lambda *_: None
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    torch.Tensor.type = lambda tensor, *wanted, **options: (
        plain(tensor, *wanted, **options) if wanted or options else TYPES.get(tensor.dtype) or plain(tensor)
    )
    torch.Tensor.is_cuda = property(lambda tensor: not tensor.__dict__.get("is_host"))
    for name in "cpu", "clone", "detach", "float":
        setattr(torch.Tensor, name, following(getattr(torch.Tensor, name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for name in "tensor", "empty", "zeros", "ones", "full":
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.to = on_cpu(torch.Tensor.to)
    moe_utils.te_general_gemm = None  # of Transformer Engine, which is not here
    # gloo has no coalescing. With Transformer Engine, checkpoints go another way, which is that of most users.
    optimizer_config.is_te_min_version = lambda version: True
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: contextlib.nullcontext(None)
    distrib_optimizer.HAVE_APEX_OR_TE = True


def gpt(tensor=1, pipeline=1, experts=0, dtype=torch.bfloat16, hidden=64, layers=2, vocabulary=128, length=16):
    """This rank's part of a model. Its experts, if it has some, are divided between two ranks."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=2 if experts else 1)
    torch.manual_seed(1 + parallel_state.get_tensor_model_parallel_rank() + 7 * parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=4, use_cpu_initialization=True, params_dtype=dtype,
        pipeline_dtype=dtype, bf16=dtype is torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        attention_softmax_in_fp32=True, num_moe_experts=experts or None, moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2 if experts else 1, moe_router_topk=2, moe_aux_loss_coeff=0.01,
        add_bias_linear=not experts,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(num_experts=experts or None), vocabulary, length, position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    return config, model.to(dtype)


def wrap(config, model, gradients=torch.bfloat16, **options):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=gradients is torch.float32, use_distributed_optimizer=True, bucket_size=20_000, **options
    )
    return DistributedDataParallel(config, settings, model)


def optimizer_of(model, gradients=torch.bfloat16, **options):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = OptimizerConfig(**{
        "optimizer": "adam", "lr": 1e-3, "weight_decay": 0.1, "bf16": True, "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": True, "clip_grad": 1.0, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0,
        "use_precision_aware_optimizer": True, "main_grads_dtype": gradients, "overlap_cpu_optimizer_d2h_h2d": False, **options
    })  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def batches(vocabulary, length, size=2):
    """Sequences that a rank of data parallelism can learn: each token is the one before, times 3 and more."""
    from megatron.core import parallel_state

    chance = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    while True:
        first = torch.randint(vocabulary, (size, 1), generator=chance)
        tokens = (first * 3 ** torch.arange(length + 1) + torch.arange(length + 1)) % vocabulary
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def step(config, model, optimizer, data, micro_batches=2, length=16):
    """A step of training. Returns the sum of losses of this rank's micro batches, on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(data, model):
        batch = next(data)
        positions = torch.arange(length).expand_as(batch["tokens"])
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        output = model(batch["tokens"], positions, mask, labels=batch["labels"])
        return output, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=data, model=[model], num_microbatches=micro_batches, seq_length=length,
        micro_batch_size=2, forward_only=False,
    )  # fmt: skip
    succeeded, norm, _ = optimizer.step()
    assert succeeded
    return sum(float(x["loss"]) for x in losses)
