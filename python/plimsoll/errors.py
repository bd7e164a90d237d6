"""What can go wrong, by who has to mend it."""


class PlimsollError(RuntimeError):
    """The base of all errors of this package."""


class ServiceError(PlimsollError):
    """The service has refused a request.

    ``status`` is its name in the protocol, such as ``"does_not_fit"``, and the
    message is the service's own: what was found, what was expected, and how to
    mend it.
    """

    def __init__(self, status: str, message: str):
        super().__init__(f"{message} ({status})")
        self.status = status


class ProtocolError(PlimsollError):
    """The other side of the socket does not speak this version of the protocol."""


class StateDamaged(PlimsollError):
    """Memory that decides something has changed since it was written: its checksum is another."""


class StateLost(PlimsollError):
    """The service was started anew without the state that it held."""
