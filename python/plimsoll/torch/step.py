"""One step of all shards of all ranks."""

import math
from typing import Callable, Optional

import torch

from plimsoll.torch.gradients import Gradients
from plimsoll.torch.overlap import Serial
from plimsoll.torch.ranks import Vote
from plimsoll.torch.scaling import Scaling, clips, grad_scale
from plimsoll.torch.shards import Numbers, Shards


def refuse_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step: a CUDA graph is being captured, but the service makes steps outside of graphs: capture only the forward "
            "and backward pass"
        )


class Step:
    """A step in two phases: :meth:`prepare` and :meth:`make`. All ranks call both, or none calls the second."""

    def __init__(
        self, shards: Shards, gradients: Gradients, overlap: Serial, scaling: Scaling, max_norm: Optional[float]
    ):
        self._shards, self._gradients, self._overlap = shards, gradients, overlap
        self._scaling, self._max_norm = scaling, max_norm
        self._numbers: Optional[Numbers] = None  # what the shards get with the step
        self._loss_scale = 1.0
        #: The norm of the gradients of all ranks, where somebody asks for it. Not finite where they are not.
        self.norm: Optional[float] = None

    def prepare(self, check: Callable[[], None], numbers: Callable[[], Numbers], failure: Optional[Exception]) -> bool:
        """Brings gradients and hyperparameters to the shards of all ranks. Returns whether there are gradients.

        Refuses the step on all ranks if one has failed, as with the given ``failure``, if not all have gradients, if
        their shards are not all at the same step, if their losses had different scales, or if gradients differ that
        should have been averaged.
        """
        if self._shards.transfer.is_capturing():
            raise RuntimeError(
                "optimizer.step() was called while a CUDA graph is captured: the host makes the update, outside of graphs; "
                "capture only the forward and backward pass, and call step() after each replay()"
            )
        vote = Vote()
        try:
            self._gradients.finish_reducing()
            if failure is not None:
                raise failure
            self._loss_scale = self._scaling.loss_scale()
            vote = vote._replace(loss_scale=self._loss_scale)
            check()
            if self._gradients.check():
                self._overlap.check()
                self._bring(numbers)
                vote = vote._replace(has_gradients=True)
                vote = vote._replace(squares=self._squares(), fingerprint=self._gradients.fingerprint())
                vote = vote._replace(left_alone=self._gradients.left_alone_number())
        except Exception as error:
            vote = vote._replace(failure=error)
        squares = self._vote(vote)
        if vote.has_gradients and self._asks_norm:
            self.norm = math.sqrt(squares) / self._loss_scale
        if vote.has_gradients:
            self._overlap.learn(self._scaling, not self.is_finite or self.norm is not None and clips(self.norm, self._max_norm))
        return vote.has_gradients

    @property
    def is_finite(self) -> bool:
        return self.norm is None or math.isfinite(self.norm)

    def make(self, *, maximize: bool) -> None:
        """Makes the step that all ranks have prepared."""
        try:
            scale = grad_scale(self._loss_scale, self.norm, self._max_norm)
        except ValueError:
            self._discard()
            raise
        try:
            self._overlap.begins()
            self._shards.make(-scale if maximize else scale, self._numbers, awaits=self._overlap.awaits)
        except Exception as error:
            self._overlap.begun(error)  # other ranks may have begun the step
            raise
        self._overlap.begun(None)

    def _bring(self, numbers: Callable[[], Numbers]) -> None:
        self._shards.take_weights()
        self._gradients.collect(anew=self._scaling.was_undone)
        self._numbers = self._shards.prepare(numbers(), self._gradients.left_alone.places)

    @property
    def _asks_norm(self) -> bool:
        return self._max_norm is not None or self._scaling.is_used

    def _squares(self) -> float:
        """The sum of the squares of this rank's gradients. 0 if it is not needed; not finite if the gradients are
        not.
        """
        if self._scaling.is_used and self._gradients.are_reduced:
            raise RuntimeError(
                "sharding is 'zero2', whose gradients a GradScaler cannot see: use bfloat16, or sharding='zero1'"
            )
        squares = self._shards.sum_of_squares() if self._asks_norm else 0.0
        self._shards.drain()  # all requests to prepare have succeeded
        if self._scaling.overflowed():
            return math.inf
        if self._shards.ranks.mesh.replica and math.isfinite(squares):
            return 0.0  # replicas have the same gradients, and the first counts them
        return squares

    def _vote(self, vote: Vote) -> float:
        """The sums of squares of all ranks. When it returns, all shards have prepared the step."""
        if not self._shards.ranks.are_heard:
            if vote.failure is not None:
                raise vote.failure
            return vote.squares
        try:
            count = self._shards.count(vote)
        except Exception as error:
            # Other ranks may have the sum, and make the step. What was prepared here stays, for this rank to catch
            # up.
            raise vote.failure or error
        try:
            self._shards.check(vote, count)
        except Exception:
            self._discard()
            raise
        return count.squares

    def _discard(self) -> None:
        """Takes back what was prepared: these gradients belong to no step."""
        self._gradients.forget()
        self._shards.take_back()
