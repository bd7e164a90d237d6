"""The jobs that are planned three ways and then run. Their batches are chosen from the card's memory."""

import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

_LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=8192,
    head_dim=64,
)
_QWEN = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
_QWEN_SHALLOW = dict(_QWEN, num_hidden_layers=6)  # which a compiler reads quickly
_QWEN_LARGER = dict(_QWEN, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12)
_MIXTURE = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=3072,
    moe_intermediate_size=768,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=4,
    max_position_embeddings=8192,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    mlp_only_layers=[],
    tie_word_embeddings=False,
)
_VIT = dict(
    architectures=["ViTForImageClassification"],
    model_type="vit",
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    image_size=224,
    patch_size=16,
)
_BERT = dict(
    architectures=["BertForMaskedLM"],
    model_type="bert",
    vocab_size=30522,
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    max_position_embeddings=512,
    type_vocab_size=2,
)

#: config.json of each model: transformers makes it, and the planner reads it.
MODELS: Dict[str, Dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen": _QWEN,
    "qwen-shallow": _QWEN_SHALLOW,
    "qwen-larger": _QWEN_LARGER,
    "mixture": _MIXTURE,
    "vit": _VIT,
    "bert": _BERT,
}

#: What makes a model so small that a CPU trains it in a dry run.
TINY = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    image_size=32,
)


#: In a dry run programs are planned with as many layers: all say the same.
SHALLOW = {"num_hidden_layers": 3} if os.environ.get("GPU_PROOF_DEVICE") == "standin" else {}


def config_of(model: str, tiny: bool = False) -> Dict[str, Any]:
    config = {**MODELS[model], **SHALLOW}
    return {**config, **{key: value for key, value in TINY.items() if key in config}} if tiny else config


@dataclass(frozen=True)
class Job:
    """A training. ``fill`` is the share of the card that it shall take: above 1 it must run out of memory."""

    name: str
    model: str
    fill: float
    length: int = 1024
    precision: str = "amp-bf16"
    optimizer: str = "adamw/fused"
    flags: List[str] = field(default_factory=list)  # of the planner, beside these
    options: Dict[str, Any] = field(default_factory=dict)  # of the program, for the same
    unplanned: Optional[str] = None  # why the planner's flags cannot say the job


JOBS = [
    Job("llama-amp", "llama", 0.25),
    Job("llama-bf16", "llama", 0.5, 4096, "bf16"),
    Job(
        "llama-checkpointing", "llama", 0.95, 2048, flags=["--gradient-checkpointing"], options={"checkpointing": True}
    ),
    Job("llama-lora", "llama", 0.5, 2048, "bf16", flags=["--lora", "16"], options={"lora": 16}),
    Job(
        "llama-lora-checkpointing",
        "llama",
        0.95,
        8192,
        "bf16",
        flags=["--lora", "16", "--gradient-checkpointing"],
        options={"lora": 16, "checkpointing": True},
    ),
    Job("llama-clipped", "llama", 0.75, 1024, "bf16", "adamw/foreach", ["--clip", "1"], {"clip": 1.0}),
    Job("qwen-amp", "qwen", 0.5),
    Job("qwen-adafactor", "qwen", 0.75, 2048, "bf16", "adafactor", options={"optimizer": "adafactor"}),
    Job("qwen-compiled", "qwen-shallow", 0.5, 1024, "bf16", flags=["--compile"], options={"compile": True}),
    Job(
        "qwen-fused-loss",
        "qwen",
        0.75,
        4096,
        "bf16",
        options={"fused-loss": True},
        unplanned="the program fuses head and loss in its own way, which no flag describes",
    ),
    Job("mixture-amp", "mixture", 0.5),
    Job(
        "mixture-checkpointing",
        "mixture",
        0.9,
        4096,
        "bf16",
        flags=["--gradient-checkpointing"],
        options={"checkpointing": True},
    ),
    Job("vit-amp", "vit", 0.5, 0),
    Job("bert-amp", "bert", 0.75, 512),
    Job("bert-eager", "bert", 0.5, 512, "bf16", flags=["--attention", "eager"], options={"attention": "eager"}),
    Job("llama-runs-out", "llama", 1.2, 2048, "bf16"),
]

BY_NAME = {job.name: job for job in JOBS}
