"""The steps of an open optimizer, from its gradients to the model's parameters."""

from typing import Any, Callable, List, NamedTuple, Optional

from plimsoll.client import Session
from plimsoll.protocol import Opened
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
    """Makes the steps of an open optimizer."""

    def __init__(self, shards: Shards):
        self.shards = shards

    @property
    def sessions(self) -> List[Session]:
        return self.shards.sessions

    def opened(self, found: List[Opened]) -> List[Opened]:
        """Continues once the shards are opened. Returns what they have found."""
        return found

    def hook(self) -> None:
        """Puts hooks on the parameters."""

    def remove_hooks(self) -> None:
        """Removes them."""

    def discard(self) -> None:
        """Discards the gradients that have left the model."""

    def step(self, wanted: Wanted) -> Optional[Outcome]:
        """Makes a step, unless gradients are not finite. None if there are no gradients."""
        raise NotImplementedError

    def finish(self) -> None:
        """Finishes what goes on in the background. Then state and model are of one step."""

    def close(self) -> None:
        """Ends what the shards do not end."""

    def release(self) -> None:
        """Lets go of sessions and memory, even if the optimizer was not closed."""
        self.shards.release()


class Exact(Updates):
    """Makes steps. When one returns, the model has its parameters."""

    def __init__(self, shards: Shards, settings: Settings, lock: Any):
        super().__init__(shards)
        self._gradients = Gradients(shards, settings, lock)

    def hook(self) -> None:
        self._gradients.hook()

    def remove_hooks(self) -> None:
        self._gradients.remove_hooks()

    def discard(self) -> None:
        self._gradients.discard()

    def step(self, wanted: Wanted) -> Optional[Outcome]:
        step = Step(self.shards, self._gradients, wanted.scaling, wanted.max_norm)
        if not step.prepare(wanted.check, wanted.numbers):
            return None
        if step.is_finite:
            self._make(step, wanted.maximize)
        self._gradients.forget()
        return Outcome(step.norm, step.is_finite)

    def _make(self, step: Step, maximize: bool) -> None:
        step.make(maximize=maximize)
