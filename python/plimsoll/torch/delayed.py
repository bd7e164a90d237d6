"""Updates one step behind: the delayed parameter update of ZeRO-Offload, arXiv 2101.06840, section 5.2."""

from typing import Any, Optional

from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.step import Step
from plimsoll.torch.updates import Exact, Outcome, Wanted


class Delayed(Exact):
    """Begins an update in each step, and brings its parameters into the model in the next."""

    def __init__(self, shards: Shards, settings: Settings, lock: Any):
        super().__init__(shards, settings, lock)
        self._warm_up = settings.overlap.warm_up_steps
        self._is_pending = False

    def step(self, wanted: Wanted) -> Optional[Outcome]:
        self.finish()
        return super().step(wanted)

    def _make(self, step: Step, maximize: bool) -> None:
        step.make(maximize=maximize, pulls=False)
        self._is_pending = True
        for shard in self.shards:
            shard.gradients.are_read()
        if self.shards.step <= self._warm_up:
            self.finish()

    def finish(self) -> None:
        """Waits for the update under way, and brings its parameters into the model.

        Raises RuntimeError if the program has changed the model's parameters since: the update does not have those
        changes.
        """
        if not self._is_pending:
            return
        for shard in self.shards:
            shard.parameters.check_untouched()
        self.shards.pull()
        # The next update changes what copies to a device may still read.
        self.shards.transfer.settle()
        self._is_pending = False
