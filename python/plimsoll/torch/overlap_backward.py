"""The update of a step during the backward pass, and the rest of it behind the next forward pass.

A step that may be clipped, or skipped by a GradScaler, speculates: its parameters change as if it were neither. When the norm
is known, the service retracts it to the bit where it must, and makes it again behind the next forward pass.

The step begins at the first gradient that is final. How many gradients of a parameter make a step is learned from the steps
before. The model's parameters change while the backward pass runs, each once its own gradient is final. From there on a
parameter must not be read until ``step()`` is called: hooks, and autograd's own count of changes, refuse it.
"""

import contextlib
import math
import warnings
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import torch

from plimsoll.errors import PlimsollError
from plimsoll.torch.algorithm import Numbers
from plimsoll.torch.gradients import Gradients
from plimsoll.torch.overlap import Forward, parameters_read_by
from plimsoll.torch.scaling import Scaling, clips, grad_scale
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.signals import deferred
from plimsoll.torch.slot import Slot
from plimsoll.torch.speculation import Speculation

_UNFORESEEN = (
    "and the backward pass has begun the step without it, as overlap is 'backward': the state has no log to retract the step with, or it "
    "came after the first gradients. Give the optimizer max_grad_norm when it is made, and a GradScaler from the first step on"
)
_UNSCALED = (
    "GradScaler.unscale_ has divided the gradients in place, of which some were taken already, as overlap is 'backward': call it "
    "from the first step on (then steps wait for the norm), or leave it out, as max_grad_norm of the optimizer clips"
)
_MEND = (
    "Only some of the parameters have had the step. To go on, load the last checkpoint (optimizer.load). Without one, close the "
    "optimizer with give_back=True, and load state_dicts into the model and the optimizer"
)
_OTHER_NUMBERS = (
    "the hyperparameters of param_groups were changed between the backward pass and step(), but overlap is 'backward', which begins the "
    "step in the backward pass: change them after optimizer.step()"
)


class Asked(NamedTuple):
    """What a step is made with that begins in the backward pass."""

    sign: float
    loss_scale: float
    numbers: Numbers
    #: What may still change its factor, or have it skipped; None for nothing.
    awaits: Optional[str]

    def is_like(self, other: "Asked") -> bool:
        """Whether the program asks for the same step, as far as it is not decided later."""
        return (self.sign, self.numbers) == (other.sign, other.numbers)


class Backward(Forward):
    """Steps whose update goes on during the backward pass and the next forward pass."""

    name = "backward"

    def __init__(self, model: torch.nn.Module, lock: Any, ask: Callable[[], Asked]):
        super().__init__(model, lock, None)
        self._asked = ask  # what the optimizer would make a step with now
        self._shards: Optional[Shards] = None  # while the optimizer is open
        self._gradients: Optional[Gradients] = None  # as long
        self._began: Optional[Asked] = None  # with what a step has begun that waits for step()
        self._intended: Optional[Asked] = None  # what would have been asked for, where the step does not begin yet
        self._is_waiting: Optional[bool] = None  # whether this step waits for its norm, once that is known
        self.speculation = Speculation()

    @property
    def has_begun(self) -> bool:
        return self._began is not None

    @property
    def speculates(self) -> bool:
        """Whether a step has begun of which it is decided later what becomes of it."""
        return self._began is not None and self._began.awaits is not None

    # Opening and closing

    def gradients_of(self, shards: Shards, settings: Settings, lock: Any) -> Gradients:
        self._gradients = super().gradients_of(shards, settings, lock)
        return self._gradients

    def refuse(self, shards: Shards) -> None:
        if shards.ranks.mesh.size > 1 or shards.trained.are_sharded:
            raise ValueError(
                "overlap is 'backward', but several ranks hold the state, or a part of it: expected one rank alone; use "
                "overlap='forward'"
            )
        super().refuse(shards)

    def attach(self, shards: Shards) -> None:
        super().attach(shards)
        self._shards, self._began, self._intended = shards, None, None
        for shard in shards:
            shard.gradients.takes_final = self._final
            for slot in shard.slots.values():
                slot.expected = 0  # how many is not learned yet

    def detach(self) -> None:
        super().detach()
        self._shards, self._gradients, self._began = None, None, None

    def close(self) -> None:
        if self.speculates:
            with contextlib.suppress(RuntimeError):  # it has failed before, or its gradients were changed
                self.refuse_begun()
        if self.has_begun:
            warnings.warn(f"the optimizer is closed in the middle of step {self._shards.step}. {_MEND}")
        super().close()

    # The backward pass

    def _before_forward(self, module: torch.nn.Module, *arguments: Any) -> None:
        with self._lock:
            for parameter in parameters_read_by(module) if self.has_begun else ():
                if self._arrivals.missing(parameter) is not None:
                    self._refuse(f"a forward pass reads parameter {self._arrivals.name(parameter)}, whose update has begun")
        super()._before_forward(module, *arguments)

    def _before_gradient(self, parameter: torch.Tensor, gradient: Optional[torch.Tensor]) -> None:
        if self._arrivals is None:
            super()._before_gradient(parameter, gradient)
            return
        slot = self._arrivals.slot(parameter)
        if self.has_begun:
            self._arrivals.check()
            if self._arrivals.missing(parameter) is not None:
                self._fail(
                    f"parameter {slot.piece.name} got a gradient more than the {slot.expected} that made its steps so far, and its update "
                    "has begun"
                )
        elif slot.expected == 0:
            self._intended = self._asked()
        if parameter.grad is None:
            slot.fired = 0  # what was accumulated before is gone
        super()._before_gradient(parameter, gradient)

    def _final(self, slot: Slot) -> None:
        """Runs when a parameter has all its gradients, before they are brought to the service."""
        with deferred(), self._apart():
            self.speculation.gradient()
            if not self.has_begun:
                if self._may_lack() or self._waits():
                    return  # step() makes the step, once it is known what is left alone
                self._begin()
            try:
                self._uses.check([slot.piece.parameter], self._arrivals.name)
            except RuntimeError as error:
                self._fail(str(error))
            self._arrivals.changes(slot)
            self._arrivals.check()

    def _waits(self) -> bool:
        """Whether the step waits for the norm of all gradients."""
        if self._is_waiting is None:
            self.speculation.updated(self._arrivals.update_seconds)
            is_decided = self._asked().awaits is None
            self._is_waiting = not is_decided and (self._never_begins() or not self.speculation.is_worthwhile())
        return self._is_waiting

    def _never_begins(self) -> bool:
        """Whether no step can begin before its norm is known."""
        return self._asked().awaits is not None and (self.speculation.is_unscaled or not self._shards.can_retract)

    def _begin(self) -> None:
        """Begins the step. Where it can be refused, that is before anything has changed."""
        asked = self._asked()
        self._arrivals.need_all()
        self._arrivals.check()
        self._gradients.check_model()
        self._check_uses()
        self._shards.take_weights()
        self._shards.transfer.settle()  # copies to the device may still read the parameters
        self._began = asked
        self._shards.will_change()
        self._arrivals.begin()
        self._arrivals.expect_some()
        self._shards.begin_arriving(asked.sign / asked.loss_scale, asked.numbers, speculates=asked.awaits is not None)

    def _missing(self) -> List[torch.Tensor]:
        """The parameters that have no gradient yet, and had one in the steps before."""
        return [p for p in self._arrivals.parameters if p.grad is None and self._arrivals.slot(p).expected > 0]

    def _may_lack(self) -> bool:
        """Whether a parameter that no module has read may get no gradient, or one that comes too late for a step that
        has begun: other code may have read it.
        """
        return self._gradients.may_lack and bool(self._uses.unread(self._missing()))

    def _check_uses(self) -> None:
        """Refuses gradients that are there, and those that will be missing or of no use."""
        parameters = self._arrivals.parameters
        self._uses.check(parameters, self._arrivals.name)
        if self._gradients.must_be_all:
            missing = self._missing()
            frozen = [self._arrivals.name(p) for p in missing if not p.requires_grad]
            if frozen:
                raise RuntimeError(
                    f"parameter {frozen[0]} was frozen since the optimizer was opened, so it will have no gradient. Nothing has changed yet: "
                    "close the optimizer and make a new one, or leave it alone (missing_gradients='keep')"
                )
            self._uses.check_read(missing, self._arrivals.name)

    # Steps

    def check(self) -> None:
        super().check()
        if self._intended is not None and not self._intended.is_like(self._asked()):
            raise RuntimeError(f"{_OTHER_NUMBERS}. Nothing has changed yet")
        self.speculation.steps()
        if not self._never_begins():
            self._check_unchanged([self._arrivals.slot(p) for p in self._arrivals.parameters])

    def bring_rest(self, scaling: Scaling) -> None:
        """Brings the gradients that are left to the step that has begun."""
        self.speculation.steps()
        final = self._arrivals.all_missing()
        try:
            self._arrivals.check()
            asked = self._asked()
            if not asked.is_like(self._began):
                raise RuntimeError(_OTHER_NUMBERS)
            unforeseen = "there is a GradScaler" if scaling.is_used else asked.awaits
            if unforeseen is not None and not self.speculates:
                raise RuntimeError(f"{unforeseen}, {_UNFORESEEN}")
            if scaling.was_undone:
                raise RuntimeError(_UNSCALED)
            self._check_unchanged(final)
            lost = [slot.piece.name for slot in final if slot.piece.parameter.grad is None]
            if lost:
                raise RuntimeError(f"the gradient of parameter {lost[0]} was removed after it was accumulated")
            self._gradients.check_all()
            self._gradients.leave_missing()
            self._uses.check(self._arrivals.parameters, self._arrivals.name)
            self._gradients.collect(anew=False)
            self._shards.arrived()
        except PlimsollError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            self._fail(str(error))

    def finish(self, grad_scale: float) -> None:
        """Goes on as after a step that has begun with all its gradients."""
        self._arrivals.expect_rest()
        has_speculated = self.speculates
        if has_speculated:
            self._shards.decide(grad_scale * self._began.sign)
        self._began = None
        super().begun(None)
        self.speculation.stepped(has_speculated)

    def begun(self, failure: Optional[Exception]) -> None:
        super().begun(failure)
        self.speculation.stepped(False)

    def retract(self) -> None:
        """Retracts the step that has begun. The model has the parameters of the step before again, and keeps its gradients."""
        try:
            self._check_unchanged(self._arrivals.all_missing())
        except RuntimeError as error:
            self._fail(str(error))
        with self._apart():
            self._arrivals.expect_no_rest()
            self._shards.decide(None)
            self._began = None
            self._arrivals.need_all()
            self._gradients.give_up()  # what was announced of them is of no step
            self._arrivals.check()
        self.speculation.stepped(True)

    def learn(self, scaling: Scaling, is_other: bool) -> None:
        self.speculation.learn(scaling.loss_scale(), scaling.is_used, scaling.was_undone, is_other)

    def _check_unchanged(self, slots: Sequence[Slot]) -> None:
        changed = self._gradients.changed(slots)
        if changed:
            raise RuntimeError(
                f"the gradient of parameter {changed[0].piece.name} was changed after it was accumulated, but overlap is 'backward', which "
                "takes it at once. Change it before, in a hook (register_hook), or use overlap='forward'"
            )

    def discard(self) -> None:
        super().discard()
        self._intended, self._is_waiting = None, None
        for parameter in self._arrivals.parameters if self._arrivals is not None else ():
            slot = self._arrivals.slot(parameter)
            slot.fired, slot.accumulated = 0, None

    def over(self) -> None:
        super().over()
        self._intended, self._is_waiting = None, None

    def forgive(self) -> None:
        super().forgive()
        if self.has_begun:
            self._gradients.give_up()
            self._began = None

    # What waits for everything

    def refuse_begun(self) -> None:
        if self.speculates:
            self._arrivals.check()
            self.retract()
        if self.has_begun:
            self._refuse("the backward pass has begun the update")

    def synchronize(self) -> None:
        self.refuse_begun()
        super().synchronize()

    def settle(self) -> None:
        if not self.has_begun:
            super().settle()

    def will_step(self) -> None:
        if not self.has_begun:
            super().will_step()

    # Faults

    def _refuse(self, what: str) -> None:
        """Refuses a call that may not come now."""
        self._arrivals.check()
        raise RuntimeError(
            f"{what}, and step {self._shards.step} waits for the rest of its gradients: call optimizer.step() first. If the backward pass has "
            f"failed, that is not possible. {_MEND}"
        )

    def _fail(self, what: str) -> None:
        """Refuses everything from here on: the step that has begun cannot be finished."""
        self._arrivals.fail(f"{what}. Step {self._shards.step} had begun in the backward pass. {_MEND}")
        self._arrivals.check()


class BegunStep:
    """A step that has begun in the backward pass, of which only the rest is left."""

    def __init__(self, shards: Shards, overlap: Backward, scaling: Scaling, max_norm: Optional[float]):
        self._shards, self._overlap, self._scaling, self._max_norm = shards, overlap, scaling, max_norm
        #: The norm of the gradients, where somebody asks for it. Not finite where they are not.
        self.norm: Optional[float] = None

    @property
    def is_finite(self) -> bool:
        return self.norm is None or math.isfinite(self.norm)

    def prepare(self, check: Callable[[], None], numbers: Callable[[], Numbers], failure: Optional[Exception]) -> bool:
        if failure is not None:
            raise failure
        self._overlap.bring_rest(self._scaling)
        if self._overlap.speculates and (self._scaling.is_used or self._max_norm is not None):
            squares = math.inf if self._scaling.overflowed() else self._shards.sum_of_squares()
            self.norm = math.sqrt(squares) / self._scaling.loss_scale()
        self._overlap.learn(self._scaling, not self.is_finite or self.norm is not None and clips(self.norm, self._max_norm))
        if not self.is_finite:
            self._overlap.retract()
        return True

    def make(self, *, maximize: bool) -> None:
        try:
            scale = grad_scale(self._scaling.loss_scale(), self.norm, self._max_norm)
        except ValueError:
            self._overlap.retract()
            raise
        self._overlap.finish(scale)
