"""Weights that are not here: ``from_pretrained`` makes the model from its configuration."""

import os
from typing import Any, Dict

_FILES = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def install(module: Any, settings: Dict[str, Any], recorder: Any) -> None:
    kind = module.PreTrainedModel
    load = kind.from_pretrained.__func__

    def from_pretrained(cls, path, *arguments, **options):
        if _has_weights(path, options):
            return load(cls, path, *arguments, **options)
        recorder.note("weights", f"the weights of {path} are not here: the model was made from its configuration")
        return _from_configuration(cls, path, options)

    kind.from_pretrained = classmethod(from_pretrained)


def _has_weights(path: Any, options: Dict[str, Any]) -> bool:
    if os.path.isdir(str(path)):
        return any(name.endswith(_FILES) for name in os.listdir(path))
    from transformers.utils import cached_file

    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        try:
            if cached_file(path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False) is not None:
                return True
        except OSError:
            pass
    return False


def _from_configuration(cls: Any, path: Any, options: Dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig

    trusts = options.get("trust_remote_code", False)
    config = options.pop("config", None) or AutoConfig.from_pretrained(path, trust_remote_code=trusts)
    dtype = options.pop("dtype", None) or options.pop("torch_dtype", None)
    if dtype in (None, "auto"):
        dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    attention = options.get("attn_implementation")
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype, **({"attn_implementation": attention} if attention else {}))
    model = model.to_empty(device=_device_of(options.get("device_map")))
    model.tie_weights()
    return model.eval()


def _device_of(asked: Any) -> str:
    if isinstance(asked, dict):
        asked = next(iter(asked.values()), "cpu")
    if asked in ("auto", "balanced", "sequential"):
        return "cuda:0"
    if isinstance(asked, int):
        return f"cuda:{asked}"
    return str(asked) if asked is not None else "cpu"
