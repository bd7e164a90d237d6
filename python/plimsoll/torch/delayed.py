"""Updates one step behind: the delayed parameter update of ZeRO-Offload, arXiv 2101.06840, section 5.2."""

from typing import Optional

from plimsoll.torch.behind import Behind
from plimsoll.torch.shards import Shards


class Delayed(Behind):
    """Begins an update in each step, and brings its parameters into the model in the next."""

    _is_pending = False

    def attach(self, shards: Shards) -> None:
        super().attach(shards)
        self._is_pending = False

    def synchronize(self) -> None:
        """Waits for the update under way, and brings its parameters into the model.

        Raises RuntimeError if the program has changed the model's parameters since: the update does not have those
        changes.
        """
        for shard in self._shards if self._is_pending else ():
            shard.parameters.check_untouched()
        self.settle()

    def settle(self) -> None:
        if self._shards is None or not self._is_pending:
            return
        self._shards.pull()
        # The next update changes what copies to a device may still read.
        self._shards.transfer.settle()
        self._is_pending = False

    def begun(self, failure: Optional[Exception]) -> None:
        if failure is not None:
            return
        self._is_pending = True
        if self._shards.step <= self._mode.warm_up_steps:
            self.settle()
