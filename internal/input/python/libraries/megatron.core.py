# What recipes of Megatron-Bridge ask of a model before they have set it: fields of TransformerConfig with their defaults,
# which no model of Megatron-Bridge changes (megatron/core/transformer/transformer_config.py of August 2026).
from dataclasses import dataclass


@dataclass
class TransformerConfig:
    use_transformer_engine_op_fuser = False
    cuda_graph_impl = "none"
    cuda_graph_scope = None
