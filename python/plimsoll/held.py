"""States of an optimizer that the optimizer service holds between steps, while this process updates them."""

import os
import time
from typing import Any, Dict, Optional, Sequence, Tuple

from plimsoll import protocol, states
from plimsoll.client import Holder
from plimsoll.errors import PlimsollError
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

    def _parse(self, result: bytes) -> protocol.Held:
        return protocol.parse_held(result, self._sizes)
