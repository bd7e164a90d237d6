"""Client of Plimsoll's optimizer service.

``plimsoll.torch`` has optimizers for PyTorch. What they are made of is here: a
:class:`Session` is one rank's optimizer state, in memory that the service and
this process share, and :class:`Service` is a service of this process's own.
"""

from plimsoll.client import Arena, Session
from plimsoll.errors import PlimsollError, ProtocolError, ServiceError, StateLost
from plimsoll.service import Service

__version__ = "0.1.0"
__all__ = ["Arena", "PlimsollError", "ProtocolError", "Service", "ServiceError", "Session", "StateLost"]
