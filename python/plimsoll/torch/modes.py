"""Overlaps of updates and training that are not exact: what a program chooses of them."""

from typing import NamedTuple


class Async(NamedTuple):
    """Each update runs during the forward and backward pass of the next step, whose gradients it does not change.

    The first ``warm_up_steps`` steps are exact. The default is that of the paper.
    """

    warm_up_steps: int = 40
