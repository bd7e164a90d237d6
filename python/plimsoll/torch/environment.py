"""The environment variables of the process, as ``plimsoll run`` and torchrun set them."""

import os
import sys
from typing import List, Optional

from plimsoll.service import UNNAMED


def socket() -> Optional[str]:
    """The socket of the service, if one was started for this process."""
    return os.environ.get("PLIMSOLL_SOCKET")


def job() -> str:
    return os.environ.get("PLIMSOLL_JOB") or UNNAMED


def rank() -> int:
    return _number("RANK", 0)


def world() -> int:
    return _number("WORLD_SIZE", 1)


def local_ranks(world: int) -> int:
    """How many of ``world`` ranks are on this host."""
    return min(world, _number("PLIMSOLL_LOCAL_RANKS", _number("LOCAL_WORLD_SIZE", world)))


def computes() -> bool:
    """Whether numbers on devices mean anything. ``plimsoll plan -- PROGRAM`` runs programs whose kernels compute nothing."""
    return "plimsoll_stage" not in sys.modules


def optimizer_cpus() -> List[int]:
    """The CPUs that the workers of this rank's shards run on. Empty if the service chooses them."""
    text = os.environ.get("PLIMSOLL_OPTIMIZER_CPUS")
    cpus: List[int] = []
    try:
        for interval in text.split(",") if text else ():
            first, _, last = interval.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ValueError(f"the variable PLIMSOLL_OPTIMIZER_CPUS is {text!r}: expected a list such as 0-3,8") from None
    return cpus


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "").strip()
    if not text:
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the variable {variable} is {text!r}: expected a whole number") from None
