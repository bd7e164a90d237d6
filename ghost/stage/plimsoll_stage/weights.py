"""Weights that are not here: the model is made from its configuration, and stays as it was made."""

import functools
import os
from typing import Any, Dict

_FILES = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def install(module: Any, settings: Dict[str, Any], recorder: Any) -> None:
    kind = module.PreTrainedModel
    load = kind.from_pretrained.__func__

    def from_pretrained(cls, path, *arguments, **options):
        if _has_weights(path, options):
            return load(cls, path, *arguments, **options)
        _are_absent(recorder, f"{path} are not here: the model was made from its configuration")
        return _from_configuration(cls, path, options)

    kind.from_pretrained = classmethod(from_pretrained)


def install_diffusers(module: Any, recorder: Any) -> None:
    """``from_pretrained`` of diffusers, whose models have a configuration beside their weights."""
    kind = module.ModelMixin
    load = kind.from_pretrained.__func__

    def from_pretrained(cls, path, **options):
        try:
            return load(cls, path, **options)
        except OSError:
            named = {k: options[k] for k in ("subfolder", "cache_dir", "revision") if k in options}
            model = cls.from_config(cls.load_config(path, **named))
            _are_absent(recorder, f"{path} are not here: the model was made from its configuration")
            dtype = options.get("torch_dtype")
            return (model if dtype is None else model.to(dtype)).eval()

    kind.from_pretrained = classmethod(from_pretrained)


def install_timm(module: Any, recorder: Any) -> None:
    """``create_model(pretrained=True)`` of timm."""
    load = module.load_pretrained

    @functools.wraps(load)
    def load_pretrained(model, *arguments, **options):
        try:
            load(model, *arguments, **options)
        except OSError:
            _are_absent(recorder, f"{type(model).__name__} of timm are not here: it stays as it was made")

    module.load_pretrained = load_pretrained


def install_hub(torch: Any, recorder: Any) -> None:
    """torch.hub's downloads of weights, which torchvision and others load next."""
    fetch, load = torch.hub.load_state_dict_from_url, torch.nn.Module.load_state_dict

    class Absent(dict):
        """Stands for the weights of a file that is not here."""

    @functools.wraps(fetch)
    def load_state_dict_from_url(url, *arguments, **options):
        try:
            return fetch(url, *arguments, **options)
        except OSError:
            _are_absent(recorder, f"{url} are not here: the model stays as it was made")
            return Absent()

    @functools.wraps(load)
    def load_state_dict(self, state_dict, *arguments, **options):
        if isinstance(state_dict, Absent):
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return load(self, state_dict, *arguments, **options)

    torch.hub.load_state_dict_from_url, torch.nn.Module.load_state_dict = load_state_dict_from_url, load_state_dict


def _are_absent(recorder: Any, which: str) -> None:
    recorder.note("weights", f"the weights of {which}")


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
