#!/usr/bin/env python3
"""Writes the defaults of configurations inside a multimodal config.json, as in ../defaults.json.

    defaults.py > ../defaults.json

A multimodal model's text_config and vision_config leave out what is the default
of their class in transformers. The fields are those that parameters and
activations depend on, as the classes declare them, before they are completed.
"""

import dataclasses
import json
import sys

from transformers import CONFIG_MAPPING

TYPES = (
    "clip_vision_model clip_text_model siglip_vision_model siglip_text_model pixtral internvl_vision idefics3_vision smolvlm_vision "
    "qwen2_vl_vision qwen2_5_vl_vision qwen3_vl_vision qwen3_vl_moe_vision "
    "qwen3_5_vision qwen3_5_moe_vision llama4_vision_model glm4v_vision glm4v_moe_vision mllama_vision_model "
    "qwen2_audio_encoder voxtral_encoder qwen2_5_omni_audio_encoder qwen2_5_omni_vision_encoder gemma4_vision "
    "gemma4_audio paddleocr_vl_vision paddleocr_vl_text siglip2_vision_model lfm2 "
    "gemma3n_text gemma3n_vision gemma3n_audio gemma4_unified_text gemma4_unified_vision gemma4_unified_audio "
    "qwen2_vl_text qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text qwen3_5_text qwen3_5_moe_text "
    "llama4_text glm4v_text glm4v_moe_text mllama_text_model gemma4_text qwen2_5_omni_text "
    "llama mistral ministral3 mistral4 qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text gpt_oss"
).split()
UNUSED = (
    "initializer_range initializer_factor rms_norm_eps layer_norm_eps use_cache max_position_embeddings "
    "pretraining_tp output_router_logits router_aux_loss_coef norm_eps layer_scale_init_value mask_ratio "
    "tokens_per_second transformers_version query_pre_attn_scalar projection_dim"
).split()


def plain(value):
    return value is None or isinstance(value, (bool, int, float, str)) or (
        isinstance(value, (list, tuple)) and all(plain(v) for v in value))


def main():
    defaults = {}
    for model_type in TYPES:
        cls = CONFIG_MAPPING[model_type]
        parent = cls.__mro__[1]
        inherited = {f.name for f in dataclasses.fields(parent)} if "PreTrained" in parent.__name__ else set()
        defaults[model_type] = {
            f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory()
            for f in dataclasses.fields(cls)
            if (f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING)
            and f.name not in inherited and f.name not in UNUSED and not f.name.endswith("token_id")
            and plain(f.default if f.default is not dataclasses.MISSING else f.default_factory())
        }
    sys.stdout.write("{\n" + ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in defaults.items()) + "\n}\n")


if __name__ == "__main__":
    main()
