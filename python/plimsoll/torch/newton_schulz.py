"""The direction of Muon's update: a matrix with all its singular values near 1, by Newton-Schulz iteration.

The definition, the defaults and the order of operations are those of torch.optim.Muon.
"""

import math
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch

#: The coefficients of Keller Jordan's Muon, which torch.optim.Muon has as its defaults.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7

# How the learning rate follows from the shape of a matrix with so many rows and columns.
_ADJUSTMENTS: Dict[Optional[str], Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
ADJUSTMENTS = tuple(_ADJUSTMENTS)


def adjusted_lr(lr: float, adjustment: Optional[str], shape: Sequence[int]) -> float:
    """The learning rate of a matrix of this shape."""
    return lr * _ADJUSTMENTS[adjustment](*shape[-2:])


def orthogonalized(matrices: torch.Tensor, coefficients: Tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """A matrix, or each matrix of a stack, with its singular values brought to between about 0.7 and 1.2, in bf16."""
    a, b, c = coefficients
    multiply_add = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16, copy=True)
    if is_tall:
        x = x.mT
    norm: Any = x.norm() if x.ndim == 2 else x.flatten(1).norm(dim=1)[:, None, None]
    x.div_(norm.clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def flops(shape: Sequence[int], steps: int) -> int:
    """The floating-point operations of :func:`orthogonalized`: three products a step."""
    *stack, rows, columns = shape
    small, large = sorted((rows, columns))
    return math.prod(stack) * steps * (4 * small * small * large + 2 * small**3)
