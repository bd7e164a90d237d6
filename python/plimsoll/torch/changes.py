"""What steps change of the parameters: the method ``delta`` of optimizers."""

from typing import Any

from plimsoll.delta import Delta
from plimsoll.torch.overlap import synchronized
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards


def begin(settings: Settings, shards: Shards) -> None:
    """Has steps note what they change, if the program wants to know."""
    if settings.delta:
        shards.delta(begin=True)


class Noting:
    """A part of an optimizer."""

    _settings: Settings
    _shards: Any

    @synchronized
    def delta(self, *, whole: bool = False) -> Delta:
        """What the last step has changed of the parameters whose states this rank holds, with ``delta=True``.

        It is asked for after every step. With ``whole`` it has all parameters: after a load, or when something else has
        changed them, or when a delta was left out. Raises RuntimeError without ``delta=True``, and ServiceError where
        it is not known what has changed.
        """
        if not self._settings.delta:
            raise RuntimeError(f"delta() needs {type(self).__name__}(..., delta=True), so that steps note what they change")
        self._open_unless_closed()  # type: ignore[attr-defined]
        return self._shards.delta(whole=whole)
