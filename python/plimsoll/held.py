"""States of an optimizer that the optimizer service holds between steps, while this process updates them."""

import os
import time
from typing import Any, Dict, Optional, Tuple

from plimsoll import protocol, states
from plimsoll.client import Holder
from plimsoll.errors import ServiceError
from plimsoll.protocol import Kind
from plimsoll.service import shared_service

_NAMES = {"held_states": "states", "held_control": "control", "gradients": "gradients"}


class HeldStates(Holder):
    """The states of one rank's optimizer, in arenas that outlive this process and the service.

    ``document`` is that of hold (docs/protocol.md). ``arenas`` are ``"states"``, ``"control"`` and, with recovery,
    ``"gradients"``. This process writes them as the protocol says; :class:`plimsoll.states.Layout` knows where.
    """

    opening = Kind.HOLD

    def __init__(self, path: str, document: Dict[str, Any], *, patience: float = 60.0):
        self._sizes = states.sizes_of(document)
        super().__init__(path, document, patience)
        self.arenas = {_NAMES[component]: arena for component, arena in self.arenas.items()}
        self.layout = states.Layout([c["bytes"] for c in document["chunks"]])
        self.control = states.Control(self.arenas["control"].memory, document)
        self._service: Any = None
        #: The condition in which the states were found: "new", "whole", "redo" or "torn".
        self.found = self.opened.condition
        if self.found == "new":
            self.control.gradients_of = 0
            self.control.position = 0  # a first step that was broken off is made anew

    @classmethod
    def open(cls, document: Dict[str, Any], *, socket: Optional[str] = None, patience: float = 60.0) -> "HeldStates":
        """Opens the states at a service: that of ``socket``, of ``$PLIMSOLL_SOCKET``, or this process's own."""
        socket = socket or os.environ.get("PLIMSOLL_SOCKET")
        if socket:
            return cls(socket, document, patience=patience)
        service, instance = shared_service(document["job"])
        held = cls(service.socket, {**document, "instance": instance}, patience=patience)
        held._service = service  # which ends with the last one who uses it
        return held

    @property
    def is_new(self) -> bool:
        """Whether no step was finished when the states were opened."""
        return self.found == "new"

    @property
    def moment(self) -> states.Moment:
        """How far the optimizer is."""
        return self.layout.at(self.control.position)

    def wait_until_read(self, position: int) -> None:
        """Waits until the region that is written at a position may be: a save may still read what it overwrites."""
        control, looked = self.control, time.monotonic()
        if control.read >= position:
            return
        control.wanted = position
        try:
            while control.read < position:
                time.sleep(0.0002)
                if time.monotonic() - looked > 1:
                    self._check_service()  # one that has died reads no more, until its successor says so
                    looked = time.monotonic()
        finally:
            control.wanted = 0

    def _check_service(self) -> None:
        """Connects again if the service has died."""
        with self._lock:
            self._check_open()
            self.drain()  # an answer that an interrupt has left would hide the end of the connection
            if self._is_over():
                self._recover(ConnectionResetError("the service has closed the connection"))

    def save(self, directory: str, step: int, training: Any = None, *, identity: str = "") -> int:
        """Begins to save the states of a step, in the background, as soon as its last copies have ended. See
        :meth:`saved` and :meth:`commit`.

        The next step may go on: before it writes a region, it calls :meth:`wait_until_read`.
        """
        document = {"directory": os.path.abspath(directory), "step": step, "training": training, "identity": identity}
        return protocol.parse_number(self.call(Kind.SAVE, protocol.pack_document(document)), Kind.SAVE)

    def load(self, directory: str, *, several: bool = False) -> Tuple[int, Any]:
        """Loads a checkpoint, or the newest in a folder. Its step, and its training document.

        No copy to or from the arenas may be under way. Where ``several`` sessions load it together, the states are torn
        until :meth:`set_step` says that all have.
        """
        document = {"directory": os.path.abspath(directory), "several": several}
        before = self.found, self.control.position
        self.found = "torn"  # until all is there
        try:
            step, training = protocol.parse_loaded(self.call(Kind.LOAD, protocol.pack_document(document)))
        except ServiceError:
            if self.control.position == before[1] > 0:  # the service has overwritten nothing
                self.found = before[0]
            raise
        if not several:
            self.found = "whole"
        return step, training

    def set_step(self, step: int) -> None:
        """Says that all sessions have loaded the checkpoint of that step."""
        self.call(Kind.SET_STEP, protocol.pack_number(step))
        self.found = "whole"

    def _parse(self, result: bytes) -> protocol.Held:
        return protocol.parse_held(result, self._sizes)
