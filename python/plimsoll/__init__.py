"""Client of Plimsoll: plans of jobs, its optimizer service, and marks for its recordings.

:func:`plan` says whether a job fits, and :func:`fit` what would.

``plimsoll.torch`` has optimizers for PyTorch. What they are made of is here: a
:class:`Session` is one rank's optimizer state, in memory that the service and
this process share, and :class:`Service` is a service of this process's own.

:func:`mark` and :class:`phase` say where a program is in its training loop, for
``plimsoll run --record``. ``plimsoll.torch.watch`` does so by itself.
"""

from plimsoll.client import Arena, Session
from plimsoll.errors import PlimsollError, ProtocolError, ServiceError, StateLost
from plimsoll.marks import mark, phase
from plimsoll.planning import Fit, Plan, fit, plan
from plimsoll.service import Service

__version__ = "0.1.0"
__all__ = [
    "Arena", "Fit", "Plan", "PlimsollError", "ProtocolError", "Service", "ServiceError", "Session", "StateLost", "fit", "mark",
    "phase", "plan",
]  # fmt: skip
