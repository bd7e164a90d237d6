"""Trees of numbers as JSON: what an optimizer has beside the state of its parameters."""

import collections
import math
from typing import Any, Dict, Optional, Sequence

import torch

from plimsoll.torch.tree import SMALL, Uncarried, described

_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS = {"dict": dict, "ordered": collections.OrderedDict}
_IDS = 1 << 32  # numbers from here on are addresses of objects, which another process has elsewhere


def encode(value: Any, path: str, limit: int = SMALL) -> Any:
    """A value as JSON. Raises Uncarried for what JSON cannot hold, such as tensors of more than ``limit`` elements."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).partition(".")[2]}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, limit)
    for name, kind in _CONTAINERS.items():
        if type(value) is kind:
            return {name: [encode(v, f"{path}.{i}", limit) for i, v in enumerate(value)]}
    if type(value) is collections.deque:
        return {"deque": [encode(v, f"{path}.{i}", limit) for i, v in enumerate(value)], "maxlen": value.maxlen}
    for name, kind in _DICTS.items():
        if type(value) is kind:
            return {name: [[_encode_key(k, path), encode(v, f"{path}.{k}", limit)] for k, v in value.items()]}
    raise Uncarried(path, described(value))


def _encode_key(key: Any, path: str) -> Any:
    if isinstance(key, torch.Tensor) or type(key) is int and key >= _IDS:
        raise Uncarried(path, "a dict with parameters for keys")
    return encode(key, path)


def _encode_tensor(value: torch.Tensor, path: str, limit: int) -> Dict[str, Any]:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.numel() > limit or value.layout is not torch.strided:
        raise Uncarried(path, f"a tensor of {list(value.shape)}")
    elements = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "tensor": bytes(elements.tolist()).hex(),
        "dtype": str(value.dtype).partition(".")[2],
        "shape": list(value.shape),
        "device": value.device.type,
    }


def decode(value: Any, device: torch.device) -> Any:
    """The value that :func:`encode` has written. Tensors that were on a device come to this one."""
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "tensor" in value:
        return _decode_tensor(value, device)
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "deque" in value:
        return collections.deque((decode(v, device) for v in value["deque"]), value["maxlen"])
    (name, held), = value.items()
    if name in _DICTS:
        return _DICTS[name]((decode(k, device), decode(v, device)) for k, v in held)
    return _CONTAINERS[name](decode(v, device) for v in held)


def _decode_tensor(value: Dict[str, Any], device: torch.device) -> torch.Tensor:
    dtype, elements = getattr(torch, value["dtype"]), bytearray.fromhex(value["tensor"])
    found = torch.frombuffer(elements, dtype=dtype).clone() if elements else torch.empty(0, dtype=dtype)
    return found.reshape(value["shape"]).to("cpu" if value["device"] == "cpu" else device)


def encode_all(values: Dict[str, Any], limit: int = SMALL) -> Dict[str, Any]:
    """The values that JSON can hold. Others are left to the program that makes the optimizer again."""
    found = {key: _encoded_or_none(value, key, limit) for key, value in values.items()}
    return {key: value[0] for key, value in found.items() if value is not None}


def _encoded_or_none(value: Any, key: str, limit: int) -> Optional[Sequence[Any]]:
    try:
        return (encode(value, key, limit),)
    except Uncarried:
        return None


def put(place: Dict[str, Any], key: str, value: Any) -> None:
    """Sets a value. A tensor that is there already gets the elements, so that whoever else has it sees them."""
    before = place.get(key)
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and before.shape == value.shape:
        if before is not value:
            with torch.no_grad():
                before.copy_(value)
    else:
        place[key] = value
