"""Whether a step that may be clipped begins before its norm is known.

Such a step speculates: if it is clipped after all, or skipped, the service retracts it to the bit and makes it again. That
pays while few steps are clipped. Either way has the same bits.
"""

import time
from typing import Optional

_STEPS = 32  # over which the share of clipped steps is a mean
_AGAIN = 64  # steps that wait for the norm until one is tried that speculates


def exposed(update: float, again: float, forward: float, backward: float, share: float) -> float:
    """The mean time that a trainer waits for steps that speculate, of which a share is retracted and made ``again``."""
    unclipped = max(0.0, update - forward - backward)
    return (1 - share) * unclipped + share * max(0.0, again - forward)


class Speculation:
    """What is known of the steps so far: how often they were clipped, and how long everything takes."""

    def __init__(self) -> None:
        #: The factor of the loss in the last step. A step that speculates takes it for its own.
        self.loss_scale = 1.0
        #: Whether a GradScaler may skip steps.
        self.is_scaled = False
        #: Whether the program divides gradients by the scale in place: after that they cannot be retracted.
        self.is_unscaled = False
        self._share = 0.0  # of steps that are made again, or skipped
        self._is_fresh = True  # whether the last step was one that a speculation would have been right about
        self._waited = 0  # steps since one has speculated
        self._speculates = False  # whether the last step did
        self._update = {False: 0.0, True: 0.0}  # seconds of an update that waits for the norm, and of one that speculates
        self._again = 0.0  # and of retracting one and making it again
        self._forward = self._backward = 0.0  # seconds between a step and the first gradient, and from there to the next step
        self._stepped: Optional[float] = None
        self._first: Optional[float] = None

    # Times

    def gradient(self) -> None:
        """Runs when a gradient is final."""
        if self._first is None:
            self._first = time.perf_counter()
            if self._stepped is not None:
                self._forward = self._first - self._stepped

    def steps(self) -> None:
        """Runs when the program asks for a step."""
        if self._first is not None:
            self._backward = time.perf_counter() - self._first

    def stepped(self, speculates: bool) -> None:
        """Runs when the step goes on behind the program."""
        self._stepped, self._first = time.perf_counter(), None
        self._waited = 0 if speculates else self._waited + 1
        self._speculates = speculates

    def updated(self, seconds: float) -> None:
        """Runs when it is known how long the last step took."""
        if seconds <= 0:
            return
        if self._is_fresh or not self._speculates:
            self._update[self._speculates] = seconds
        elif self._update[True]:
            self._again = max(0.0, seconds - self._update[True])

    # Steps

    def learn(self, loss_scale: float, is_scaled: bool, is_unscaled: bool, is_other: bool) -> None:
        """Runs when a step is known: whether it has another factor than the last loss scale gives, or is skipped."""
        self._is_fresh = not is_other and loss_scale == self.loss_scale
        self._share += (is_other - self._share) / _STEPS
        self.loss_scale, self.is_scaled = loss_scale, is_scaled
        self.is_unscaled = self.is_unscaled or is_unscaled

    def is_worthwhile(self) -> bool:
        """Whether the next step speculates."""
        if self.is_unscaled or self.is_scaled and not self._is_fresh:
            return False  # after a step that was skipped the scale is another
        waiting, speculating = self._update[False], self._update[True]
        if self._share > 0.5:
            return False
        if not waiting or not speculating or self._waited >= _AGAIN:
            return True
        again = self._again or 2 * speculating
        return exposed(speculating, again, self._forward, self._backward, self._share) < max(0.0, waiting - self._forward)
