"""A model whose gradients are given: the same to the bit on every device, from a real backward pass."""

from typing import Any, Dict, List, Sequence

import torch
from torch import nn

SHAPES = [(300, 200), (200,), (65, 33), (512, 256), (7,), (64, 64)]


class Layer(nn.Module):
    def __init__(self, parameter: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(parameter)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Its gradient is ``gradient``: the sum's is one, and one times a number is that number."""
        return (self.weight * gradient).sum()


class Model(nn.Module):
    """Layers that are used one after the other. ``after`` is called between the passes of the second and third."""

    def __init__(self, device: str, dtype: torch.dtype, shapes: Sequence[Any] = SHAPES):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        numbers = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.layers = nn.ModuleList(Layer(n.to(device)) for n in numbers)

    def gradients(self, step: int) -> List[torch.Tensor]:
        """Those of a step, the same whoever asks."""
        generator = torch.Generator().manual_seed(1000 + step)
        weights = [layer.weight for layer in self.layers]
        return [torch.randn(w.shape, generator=generator).to(w.dtype).to(w.device) for w in weights]

    def forward(self, gradients: List[torch.Tensor], without: Sequence[int] = ()) -> torch.Tensor:
        used = [layer(g) for i, (layer, g) in enumerate(zip(self.layers, gradients)) if i not in without]
        return torch.stack(used).sum()


def weights(model: nn.Module) -> Dict[str, torch.Tensor]:
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def values(model: nn.Module, optimizer: Any) -> Dict[str, torch.Tensor]:
    """All numbers of a training, on the host: parameters, and every tensor of the state."""
    found = weights(model)
    for i, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                found[f"{i}.{key}"] = value.detach().cpu()
    return found


def compared(ours: Dict[str, torch.Tensor], theirs: Dict[str, torch.Tensor]) -> Dict[str, Any]:
    """Whether all bits are the same, and otherwise how many elements differ and by how much."""
    assert set(ours) == set(theirs), f"found {sorted(ours)}, expected {sorted(theirs)}"
    differing, largest, elements = 0, 0.0, 0
    for name, one in ours.items():
        one, other = one.double().flatten(), theirs[name].double().flatten()
        elements += one.numel()
        unlike = ~((one == other) | (one.isnan() & other.isnan()))
        differing += int(unlike.sum())
        if unlike.any():
            scale = other[unlike].abs().clamp_min(1e-12)
            largest = max(largest, float(((one - other)[unlike].abs() / scale).max()))
    return {"elements": elements, "differing": differing, "largest_relative": largest}
