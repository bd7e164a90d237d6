"""An update that goes on while the trainer does something else."""

from typing import Dict, Optional

from plimsoll.client import Session
from plimsoll.torch.layout import Piece


class Underway:
    """The update that a session may be making. It reads gradients that the next ones will replace."""

    def __init__(self, session: Session):
        self._session, self._may_be = session, False
        # The ranges of gradients in the order in which they come, until the service knows it.
        self._order: Optional[Dict[int, int]] = {}

    def __bool__(self) -> bool:
        return self._may_be

    def begins(self) -> None:
        """Records that an update begins. Gradients that come first are read first."""
        if self._order:
            self._session.order(list(self._order.items()))
            self._order = None
        self._may_be = True

    def wait_for(self, piece: Piece) -> None:
        """Waits until the update is through with a piece, whose gradient has come."""
        if self._order is not None:
            self._order[piece.offset] = piece.count
        if self._may_be:
            self._wait(piece.offset, piece.count)

    def wait(self) -> None:
        """Waits until the update is finished."""
        if self._may_be:
            self._wait(0, self._session.elements)
            self._may_be = False

    def _wait(self, first: int, count: int) -> None:
        if self._session.waited(self._session.wait(first, count)) > 0:
            self._may_be = False  # all of it is finished
