"""An update that goes on while the trainer does something else."""

from plimsoll import protocol
from plimsoll.client import Session
from plimsoll.torch.layout import Piece


class Underway:
    """The update that a session may be making. It reads gradients that the next ones will replace."""

    def __init__(self, session: Session):
        self._session, self._may_be = session, False

    def __bool__(self) -> bool:
        return self._may_be

    def begun(self) -> None:
        self._may_be = True

    def wait_for(self, piece: Piece) -> None:
        """Waits until the update is through with a piece."""
        if self._may_be:
            self._wait(piece.offset, piece.count)

    def wait(self) -> None:
        """Waits until the update is finished."""
        if self._may_be:
            self._wait(0, self._session.elements)
            self._may_be = False

    def _wait(self, first: int, count: int) -> None:
        request = self._session.wait(first, count)
        _, seconds = protocol.parse_stepped(self._session.result(request), protocol.Kind.WAIT)
        if seconds > 0:
            self._may_be = False  # all of it is finished
