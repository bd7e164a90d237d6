"""Weights that are not here: ``from_pretrained`` reads files of the names, types and shapes that a configuration gives.

The files are holes: they take no space, and their pages are never touched. So the library's own code loads, quantizes and
places the weights.
"""

import copy
import functools
import json
import os
from typing import Any, Dict, List, Optional

from plimsoll_stage import Refused

_WEIGHTS = ("model", "pytorch_model", "diffusion_pytorch_model")
_FILES = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
_FILE = 1 << 30  # bytes: a mapping far larger than the memory of the host may be refused
_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
# Options of from_pretrained that are none of the configuration.
_LOADING = {"dtype", "torch_dtype", "device_map", "quantization_config", "attn_implementation", "max_memory", "config",
            "low_cpu_mem_usage", "load_in_4bit", "load_in_8bit", "output_loading_info", "state_dict", "key_mapping"}  # fmt: skip


def install(module: Any, settings: Dict[str, Any], recorder: Any) -> None:
    """Stands in for the weights of models of transformers."""

    def model_of(cls, path, options):
        config = options.get("config")
        if not hasattr(config, "to_dict"):
            rest = {k: v for k, v in options.items() if k not in _LOADING}
            config, _ = cls.config_class.from_pretrained(config or path, return_unused_kwargs=True, **rest)
        if getattr(config, "quantization_config", None) is not None:
            raise Refused(f"the weights of {path} are quantized, and are not here: expected the files, or a model that is not")
        return cls(copy.deepcopy(config)), getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)

    _stand_in(module.PreTrainedModel, "model", model_of, settings, recorder)


def install_diffusers(module: Any, settings: Dict[str, Any], recorder: Any) -> None:
    """Stands in for the weights of models of diffusers."""

    def model_of(cls, path, options):
        return cls.from_config(cls.load_config(path, subfolder=options.get("subfolder"))), None

    _stand_in(module.ModelMixin, "diffusion_pytorch_model", model_of, settings, recorder)


def _stand_in(kind: Any, name: str, model_of: Any, settings: Dict[str, Any], recorder: Any) -> None:
    load = kind.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls, path, *arguments, **options):
        there = None if options.get("gguf_file") else _folder(path, options)
        if there is None or any(f.startswith(_WEIGHTS) and f.endswith(_FILES) for f in os.listdir(there)):
            return load(cls, path, *arguments, **options)
        import torch

        _are_absent(recorder, f"{path} are not here: the model was made from its configuration")
        with torch.device("meta"):
            model, dtype = model_of(cls, path, options)
        made = os.path.join(settings["scratch"], "weights", str(len(recorder.result["phases"])), cls.__name__)
        made = os.path.join(made, os.path.basename(os.path.abspath(there)))
        _copy(there, made)
        _write(made, name, model, getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32)
        for unknown in ("subfolder", "variant", "use_safetensors", "revision"):
            options.pop(unknown, None)
        made = load(cls, made, *arguments, **options)
        if hasattr(getattr(made, "config", None), "_name_or_path"):
            made.config._name_or_path = made.name_or_path = str(path)
        return made

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


def _folder(path: Any, options: Dict[str, Any]) -> Optional[str]:
    """The folder of a model's files: of a path, or in the cache of the hub. None if there is no configuration."""
    within = options.get("subfolder") or ""
    if os.path.isdir(str(path)):
        found: Any = os.path.join(path, within, "config.json")
    else:
        from huggingface_hub import try_to_load_from_cache

        options = {k: options[k] for k in ("cache_dir", "revision") if options.get(k) is not None}
        try:
            found = try_to_load_from_cache(str(path), os.path.join(within, "config.json"), **options)
        except ValueError:  # no name of a model
            return None
    return os.path.dirname(found) if isinstance(found, str) and os.path.exists(found) else None


def _copy(there: str, to: str) -> None:
    os.makedirs(to, exist_ok=True)
    for file in os.listdir(there):
        if not os.path.lexists(os.path.join(to, file)):
            os.symlink(os.path.abspath(os.path.join(there, file)), os.path.join(to, file))


def _write(folder: str, name: str, model: Any, dtype: Any) -> None:
    """Writes files of safetensors for the parameters and buffers of a model."""
    seen, files, size = set(), [], _FILE  # type: Any
    for key, x in model.state_dict(keep_vars=True).items():
        if id(x) in seen:  # tied to another, and not in files
            continue
        seen.add(id(x))
        kind = dtype if x.is_floating_point() else x.dtype
        count = x.numel() * kind.itemsize
        if size + count > _FILE:
            size = 0
            files.append({})
        files[-1][key] = {"dtype": _TYPES[str(kind).removeprefix("torch.")], "shape": list(x.shape), "data_offsets": [size, size + count]}
        size += count
    names = [f"{name}-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = [f"{name}.safetensors"]
    for file, tensors in zip(names, files):
        _write_file(os.path.join(folder, file), tensors)
    if len(files) > 1:
        total = sum(t["data_offsets"][1] - t["data_offsets"][0] for tensors in files for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": {k: f for f, ts in zip(names, files) for k in ts}}
        with open(os.path.join(folder, f"{name}.safetensors.index.json"), "w") as file:
            json.dump(index, file)


def _write_file(path: str, tensors: Dict[str, Any]) -> None:
    head = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    head += b" " * (-len(head) % 8)
    ends: List[int] = [t["data_offsets"][1] for t in tensors.values()]
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + max(ends, default=0))
