"""The update of a step during the backward pass, and the rest of it behind the next forward pass.

The step begins at the first gradient that is final. How many gradients of a parameter make a step is learned from the steps
before. The model's parameters change while the backward pass runs, each once its own gradient is final. From there on a
parameter must not be read until ``step()`` is called: hooks, and autograd's own count of changes, refuse it.
"""

import warnings
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import torch

from plimsoll.errors import PlimsollError
from plimsoll.torch.algorithm import Numbers
from plimsoll.torch.gradients import Gradients
from plimsoll.torch.overlap import Forward, parameters_read_by
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.signals import deferred
from plimsoll.torch.slot import Slot

UNCLIPPED = (
    "overlap is 'backward', which updates parameters before the norm of all gradients is known: leave max_grad_norm None, or use "
    "overlap='forward', which clips"
)
UNSCALED = (
    "overlap is 'backward', which updates parameters before it is known whether all gradients are finite: train in bfloat16, or use "
    "overlap='forward', which a GradScaler can skip"
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
    """What a step is made with."""

    grad_scale: float
    numbers: Numbers


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

    @property
    def has_begun(self) -> bool:
        return self._began is not None

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
            if not self.has_begun:
                if self._may_lack():
                    return  # step() makes the step, once it is known what is left alone
                self._begin()
            try:
                self._uses.check([slot.piece.parameter], self._arrivals.name)
            except RuntimeError as error:
                self._fail(str(error))
            self._arrivals.changes(slot)
            self._arrivals.check()

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
        self._shards.begin_arriving(asked.grad_scale, asked.numbers)

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
        asked = self._asked()
        if self._intended not in (None, asked):
            raise RuntimeError(f"{_OTHER_NUMBERS}. Nothing has changed yet")
        self._check_unchanged([self._arrivals.slot(p) for p in self._arrivals.parameters])

    def bring_rest(self) -> None:
        """Brings the gradients that are left to the step that has begun."""
        final = self._arrivals.all_missing()
        try:
            self._arrivals.check()
            if self._asked() != self._began:
                raise RuntimeError(_OTHER_NUMBERS)
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

    def finish(self) -> None:
        """Goes on as after a step that has begun with all its gradients."""
        self._arrivals.expect_rest()
        self._began = None
        self.begun(None)

    def _check_unchanged(self, slots: Sequence[Slot]) -> None:
        changed = self._gradients.changed(slots)
        if changed:
            raise RuntimeError(
                f"the gradient of parameter {changed[0].piece.name} was changed after it was accumulated, but overlap is 'backward', which "
                "takes it at once. Change it before, in a hook (register_hook), or use overlap='forward'"
            )

    def discard(self) -> None:
        super().discard()
        self._intended = None
        for parameter in self._arrivals.parameters if self._arrivals is not None else ():
            slot = self._arrivals.slot(parameter)
            slot.fired, slot.accumulated = 0, None

    def over(self) -> None:
        super().over()
        self._intended = None

    def forgive(self) -> None:
        super().forgive()
        if self.has_begun:
            self._gradients.give_up()
            self._began = None

    # What waits for everything

    def refuse_begun(self) -> None:
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

    norm = None
    is_finite = True

    def __init__(self, overlap: Backward):
        self._overlap = overlap

    def prepare(self, check: Callable[[], None], numbers: Callable[[], Numbers], failure: Optional[Exception]) -> bool:
        if failure is not None:
            raise failure
        self._overlap.bring_rest()
        return True

    def make(self, *, maximize: bool) -> None:
        self._overlap.finish()
