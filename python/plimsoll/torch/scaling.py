"""The factor of gradients in a step: it undoes the loss scale of a GradScaler, and clips."""

from typing import Any, Optional

from plimsoll.torch.algorithm import LARGEST_SCALE, SMALLEST


class Scaling:
    """What a GradScaler has set on the optimizer for this step. There may be no GradScaler."""

    def __init__(self, optimizer: Any):
        self._loss_scale = getattr(optimizer, "grad_scale", None)
        self._found_inf = getattr(optimizer, "found_inf", None)

    @property
    def is_used(self) -> bool:
        return self._found_inf is not None

    @property
    def was_undone(self) -> bool:
        """Whether GradScaler.unscale_ has divided the gradients in place: its operator does not count as a version of
        them.
        """
        return self.is_used and self._loss_scale is None

    def overflowed(self) -> bool:
        return self.is_used and float(self._found_inf) != 0

    def loss_scale(self) -> float:
        """The factor of the loss."""
        scale = 1.0 if self._loss_scale is None else float(self._loss_scale)
        if not SMALLEST / 2 <= scale <= LARGEST_SCALE:
            raise ValueError(
                f"the scale of the GradScaler is {scale:g}: expected {SMALLEST / 2:.3g} to {LARGEST_SCALE:.3g}, by which fp32 can divide; "
                "a scale falls that far where gradients are never finite"
            )
        return scale


def takes_scaled_gradients(asking: str) -> bool:
    """Whether GradScaler may leave gradients scaled, as the module that asks understands it.

    Lightning takes yes to mean that gradients cannot be unscaled earlier. It then clips none, even without a scaler.
    They can be: GradScaler tells the step when ``unscale_`` was called. So the answer to Lightning is no, and
    Lightning calls ``unscale_``.
    """
    return not asking.startswith(("lightning.", "lightning_fabric.", "pytorch_lightning."))


def clips(norm: float, max_norm: Optional[float]) -> bool:
    """Whether gradients of this norm are clipped."""
    return max_norm is not None and max_norm / (norm + 1e-6) < 1.0


def grad_scale(loss_scale: float, norm: Optional[float], max_norm: Optional[float]) -> float:
    """The factor of gradients. ``norm`` is their norm without the loss scale. It is finite, and clipped to
    ``max_norm``.
    """
    clip = 1.0
    if norm is not None and max_norm is not None:
        clip = min(1.0, max_norm / (norm + 1e-6))
    factor = clip / loss_scale
    if factor < SMALLEST:
        raise ValueError(
            f"the norm of all gradients is {norm:g}, and max_grad_norm is {max_norm:g}: fp32 cannot hold the factor "
            f"{factor:g} that clips them; give a larger max_grad_norm, or find out why the gradients are so large"
        )
    return factor
