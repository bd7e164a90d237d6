"""The steps of an open optimizer, from its gradients to the model's parameters."""

from typing import Any, Callable, NamedTuple, Optional

from plimsoll.torch.gradients import Gradients
from plimsoll.torch.scaling import Scaling
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Numbers, Shards
from plimsoll.torch.step import Step


class Wanted(NamedTuple):
    """What a step is asked for."""

    scaling: Scaling
    max_norm: Optional[float]
    check: Callable[[], None]  # refuses parameter groups that have changed
    numbers: Callable[[], Numbers]
    maximize: bool


class Outcome(NamedTuple):
    """What has become of a step."""

    norm: Optional[float]  # of the gradients, where somebody asks for it
    is_made: bool


class Updates:
    """Makes steps. When one returns, the model has its parameters."""

    def __init__(self, shards: Shards, settings: Settings, lock: Any):
        self.shards, self._gradients = shards, Gradients(shards, settings, lock)

    def hook(self) -> None:
        """Puts hooks on the parameters."""
        self._gradients.hook()

    def remove_hooks(self) -> None:
        self._gradients.remove_hooks()

    def discard(self) -> None:
        """Discards the gradients that have left the model."""
        self._gradients.discard()

    def finish(self) -> None:
        """Finishes what goes on in the background. Then state and model are of one step."""

    def step(self, wanted: Wanted) -> Optional[Outcome]:
        """Makes a step, unless gradients are not finite. None if there are no gradients."""
        step = Step(self.shards, self._gradients, wanted.scaling, wanted.max_norm)
        if not step.prepare(wanted.check, wanted.numbers):
            return None
        if step.is_finite:
            self._make(step, wanted.maximize)
        self._gradients.forget()
        return Outcome(step.norm, step.is_finite)

    def _make(self, step: Step, maximize: bool) -> None:
        step.make(maximize=maximize)
