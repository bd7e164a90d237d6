"""Models of transformers, made from their configurations, and batches of made-up numbers."""

import json
import pathlib
import tempfile
from typing import Any, Dict, Tuple

import torch

from gpu_proof import jobs


def folder_of(model: str, tiny: bool = False, **changes: Any) -> str:
    """A folder with the model's config.json, for transformers and for the planner."""
    folder = tempfile.mkdtemp(prefix="gpu-proof-")
    text = json.dumps({**jobs.config_of(model, tiny), **changes})
    (pathlib.Path(folder) / "config.json").write_text(text)
    return folder


def make(model: str, tiny: bool, dtype: torch.dtype, attention: str = "sdpa", **changes: Any) -> torch.nn.Module:
    """A model with random weights, made on the current default device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder_of(model, tiny, **changes))
    classes = {
        "vit": transformers.AutoModelForImageClassification,
        "bert": transformers.AutoModelForMaskedLM,
    }
    chosen = classes.get(config.model_type, transformers.AutoModelForCausalLM)
    config.use_cache = False
    return chosen.from_config(config, dtype=dtype, attn_implementation=attention)


def batch_of(config: Any, batch: int, length: int, device: str) -> Dict[str, torch.Tensor]:
    """The inputs of one step, with labels."""
    if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
        shape: Tuple[int, ...] = (batch, 3, config.image_size, config.image_size)
        return {
            "pixel_values": torch.rand(shape, device=device),
            "labels": torch.randint(config.num_labels, (batch,), device=device),
        }
    tokens = torch.randint(config.vocab_size, (batch, length), device=device)
    return {"input_ids": tokens, "labels": tokens}
