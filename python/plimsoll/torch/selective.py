"""ZenFlow, arXiv 2505.12242, in one set of moments: important columns are updated in every step, all others less often."""

import contextlib
import math
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set

import torch

from plimsoll.client import Session
from plimsoll.errors import PlimsollError
from plimsoll.protocol import Opened
from plimsoll.torch.behind import Behind
from plimsoll.torch.gradients import Gradients
from plimsoll.torch.important import Important, Matrix
from plimsoll.torch.modes import ZenFlow
from plimsoll.torch.scaling import Scaling, grad_scale
from plimsoll.torch.settings import Settings
from plimsoll.torch.shard import Shard
from plimsoll.torch.shards import Numbers, Shards
from plimsoll.torch.signals import deferred
from plimsoll.torch.slot import Slot, dense
from plimsoll.torch.underway import Underway


class Sums:
    """The gradients of a shard, added up in its arena since the last update of all columns."""

    def __init__(self, shard: Shard, ratio: float):
        self.shard, self.important = shard, Important(shard, ratio)
        self.underway = Underway(shard.session)
        self.came: Set[Slot] = set()  # whose gradients have come since the last step
        self._summed: Set[Slot] = set()  # whose gradients have come since the last update
        self._transfer = shard.group.transfer

    def take(self, slot: Slot, *, measures: bool) -> None:
        """Adds a gradient to the sums, and takes it away from the model. With ``measures`` it counts for the scores."""
        matrix, gradient = self.important.matrices[slot.piece.parameter], self._dense(slot)
        self.underway.wait_for(slot.piece)
        adds = slot in self.came
        self.came.add(slot)  # an interrupt may leave it half taken
        (self._transfer.add if slot in self._summed else self._transfer.store)(slot.gradient, gradient.reshape(-1))
        if measures:
            matrix.measure(gradient)
        if matrix.important is not None:
            self.important.take(matrix, gradient, adds=adds)
        self._summed.add(slot)
        slot.piece.parameter.grad = None

    @staticmethod
    def _dense(slot: Slot) -> torch.Tensor:
        return dense(slot.piece.parameter, slot.piece).detach().contiguous()

    def count_missing_as_zero(self) -> None:
        for slot in set(self.shard.slots.values()) - self.came:
            matrix = self.important.matrices[slot.piece.parameter]
            if slot not in self._summed:
                slot.gradient.zero_()
            matrix.gradient.zero_()
            matrix.score = torch.zeros(matrix.columns, device=slot.piece.parameter.device)
            self._summed.add(slot)

    def begin_step(self) -> None:
        """Prepares for the gradients of another step."""
        self.came.clear()
        for matrix in self.important.matrices.values():
            matrix.score = None

    def clear(self) -> None:
        """Begins the sums anew."""
        self._summed.clear()


class Due:
    """When an update of all columns is due, with an update_interval of "auto"."""

    def __init__(self, mode: ZenFlow):
        self._mode = mode
        self.is_asked = mode.update_interval == "auto"
        self.begin()

    def begin(self) -> None:
        self._steps = 0
        self._others: Dict[Matrix, torch.Tensor] = {}  # magnitudes of the other columns, added up
        self._important: Dict[Matrix, torch.Tensor] = {}

    def is_due(self, matrices: List[Matrix]) -> bool:
        """Whether for enough matrices the sums of other columns are as large as a gradient of important columns.

        Both are magnitudes for a column: those of other columns added up over the steps, those of important columns
        averaged.
        """
        ratio = self._mode.topk_ratio
        self._steps += 1
        due = []
        for matrix in matrices:
            important = matrix.score.index_select(0, matrix.important).sum()
            others = matrix.score.sum() - important
            self._others[matrix] = self._others.get(matrix, 0) + others / (1 - ratio)
            self._important[matrix] = self._important.get(matrix, 0) + important / ratio
            due.append(self._others[matrix] >= self._important[matrix] / self._steps)
        return not due or int(torch.stack(due).sum()) >= int(self._mode.auto_ratio * len(matrices))


class Applied(NamedTuple):
    """What the gradients of an update are multiplied by, and with which hyperparameters it is made."""

    numbers: Numbers
    maximize: bool
    max_norm: Optional[float]
    scale: float = 1.0

    def of(self, norm: Optional[float]) -> "Applied":
        """The same for gradients of another norm."""
        scale = grad_scale(1.0, norm, self.max_norm)
        return self._replace(scale=-scale if self.maximize else scale)


class Selective(Behind):
    """Steps as :class:`ZenFlow` says. A step updates the important columns with its gradients. The gradients of all others
    are added up, and a step that ends an interval updates them with their mean.
    """

    def __init__(self, settings: Settings, model: Optional[torch.nn.Module], lock: Any):
        super().__init__(settings.overlap, model, lock)
        self._settings = settings
        self.sums: List[Sums] = []
        self.due = Due(self._mode)
        self.count = 0  # steps in the sums
        self._is_pending = False  # whether the model lacks the parameters of an update
        self._applied: Optional[Applied] = None  # how the last step was made

    # Opening and closing

    @property
    def sessions(self) -> List[Session]:
        return [sums.important.session for sums in self.sums]

    def gradients_of(self, shards: Shards, settings: Settings, lock: Any) -> Gradients:
        return SummedGradients(self, shards, settings, lock)

    def refuse(self, shards: Shards) -> None:
        super().refuse(shards)
        for piece in (piece for shard in shards for piece in shard.group.own):
            if not piece.parameter.is_contiguous():
                raise ValueError(
                    f"parameter {piece.name} is not contiguous, and ZenFlow takes columns of the shape's order "
                    "(parameter.data = parameter.data.contiguous())"
                )
            if piece.parameter.dtype is torch.float16:
                raise ValueError(
                    f"parameter {piece.name} is float16: ZenFlow adds up gradients of several steps, whose loss scales may differ; "
                    "use bfloat16 or float32"
                )

    def opened(self, shards: Shards, found: List[Opened]) -> List[Opened]:
        """Opens the sessions of important columns. Where a trainer has died while columns were there, all begins anew:
        only that trainer knew which columns they are.
        """
        self._open(shards)
        if any(session.initialized for session in self.sessions):
            warnings.warn(
                f"the trainer of job {self._settings.job} died with overlap=ZenFlow, and only it knew which columns were "
                "important: their state is freed. Training begins anew, unless a checkpoint is loaded"
            )
            for session in self.sessions:
                session.close(give_back=True)
            found = shards.open_anew()
            self._open(shards)
        return found

    def _open(self, shards: Shards) -> None:
        self.sums = [Sums(shard, self._mode.topk_ratio) for shard in shards]
        self._shards, self._is_pending, self.count = shards, False, 0
        self.due.begin()

    def detach(self) -> None:
        for session in self.sessions:
            with contextlib.suppress(PlimsollError, OSError):  # nobody waits for this
                session.close(give_back=not self.is_away or self._shards.service is not None)
        self.sums = []
        super().detach()

    # Steps

    @property
    def next(self) -> int:
        """The number of the next step."""
        return 1 + max(session.step for session in (*self._shards.sessions, *(self.sessions if self.is_away else ())))

    @property
    def is_away(self) -> bool:
        """Whether important columns are in their own sessions."""
        return any(sums.important.are_away for sums in self.sums)

    @property
    def selects(self) -> bool:
        """Whether the next step selects columns."""
        every, number = self._mode.selects_every, self.next
        if number <= self._mode.full_warm_up_rounds:
            return False
        return not self.is_away or (every > 0 and (number - 1) % every == 0)

    @property
    def measures(self) -> bool:
        """Whether the next step needs the scores of columns."""
        return self.selects or (self.due.is_asked and self.next > self._mode.full_warm_up_rounds)

    def ends_interval(self, number: int) -> bool:
        """Whether a step updates all columns."""
        mode, every = self._mode, self._mode.selects_every
        after = number - mode.full_warm_up_rounds
        if after <= 0 or (every > 0 and number % every == 0):
            return True  # a selection finds no sums
        if mode.update_interval == "auto":
            return self.due.is_due([m for sums in self.sums for m in sums.important.matrices.values() if m.is_matrix])
        return after % mode.update_interval == 0

    def will_step(self) -> None:
        """The step itself waits for what it needs."""

    def arrive(self) -> None:
        """Brings the parameters of the update before into the model, and the program's changes into the state."""
        if self._is_pending or self.is_away:
            for shard in self._shards:
                shard.parameters.check_untouched()
        self._finish_update()
        self._shards.transfer.settle()
        if not self.is_away:
            self._shards.take_weights()

    def select(self, number: int) -> None:
        for sums in self.sums:
            sums.important.select(number - 1)
            sums.important.take_from_sums()

    def squares(self, ends: bool) -> float:
        """The sum of the squares of the important columns' gradients and, at the end of an interval, of the mean of
        the others.
        """
        important = self._squares(self.sessions) if self.is_away else 0.0
        return important + (self._squares(self._shards.sessions) / self.count**2 if ends else 0.0)

    @staticmethod
    def _squares(sessions: Sequence[Session]) -> float:
        asked = [(session, session.norm()) for session in sessions]
        return sum(session.norm_result(request) for session, request in asked)

    def make(self, number: int, applied: Applied, ends: bool) -> None:
        """Makes a step whose gradients are final."""
        self._applied = applied
        away = [sums.important for sums in self.sums] if self.is_away else []
        begun = [(i.session, i.session.begin(applied.scale, applied.numbers, wait=True)) for i in away]
        for session, request in begun:
            session.begun(request)
        if ends:
            self._update(number, applied, waits=not away or not self._mode.overlap_step)
        for important in away:
            important.bring()
        self.begin_step()

    def begin_step(self) -> None:
        """Prepares for the gradients of another step."""
        for sums in self.sums:
            sums.begin_step()

    def drop(self) -> None:
        """Drops all that was added up."""
        self.count = 0
        self.due.begin()
        self.begin_step()
        for sums in self.sums:
            sums.clear()

    def _update(self, number: int, applied: Applied, *, waits: bool) -> None:
        """Updates all columns that are at home with the mean of the sums, as step ``number``."""
        numbers = applied.numbers
        if self._mode.scale_lr:
            numbers = [[lr * self.count, *others] for lr, *others in numbers]
        for sums in self.sums:
            session = sums.shard.session
            if session.step != number - 1:
                session.set_step(number - 1)
            sums.underway.begins()
            session.begun(session.begin(applied.scale / self.count, numbers, wait=waits))
            sums.clear()
        self.count, self._is_pending = 0, True
        self.due.begin()
        if waits:
            self._finish_update()

    def _finish_update(self) -> None:
        """Waits for the update under way, and brings the parameters into the model."""
        if self._is_pending:
            self._bring_all()
            self._is_pending = False

    def _bring_all(self) -> None:
        for sums in self.sums:
            sums.shard.parameters.pull(after_step=True)
            sums.underway.wait()
            if sums.important.are_away:
                sums.important.bring()
        self._shards.transfer.settle()  # the next update changes what copies may still read

    # What needs all of a state

    def synchronize(self) -> None:
        """Ends the interval: all columns are updated with what was added up, and state and model are of one step.

        Raises RuntimeError between a backward pass and its step.
        """
        if any(sums.came for sums in self.sums):
            raise RuntimeError(
                "gradients have come since the last step, and overlap=ZenFlow has added them to those before: save, load and "
                "synchronize after optimizer.step()"
            )
        for shard in self._shards if self._is_pending or self.is_away else ():
            shard.parameters.check_untouched()
        self.settle()

    def settle(self) -> None:
        if self._shards is not None:
            with deferred():
                self._move_home()

    def _move_home(self) -> None:
        self._finish_update()
        if not self.is_away:
            return
        number = self.next - 1
        if self.count and not any(sums.came for sums in self.sums):
            self._end_interval(number)
        self.drop()
        for sums in self.sums:
            sums.important.move_home(number)
        self._bring_all()

    def _end_interval(self, number: int) -> None:
        for sums in self.sums:
            sums.important.clear_sums()
        applied = self._applied
        if applied.max_norm is not None:
            norm = math.sqrt(self._squares(self._shards.sessions)) / self.count
            if not math.isfinite(norm):
                warnings.warn(f"the gradients of {self.count} steps are dropped: they are not finite")
                return
            applied = applied.of(norm)
        self._update(number, applied, waits=True)


class SelectiveStep:
    """A step, as :class:`plimsoll.torch.step.Step` has it."""

    def __init__(self, selective: Selective, gradients: "SummedGradients", scaling: Scaling, max_norm: Optional[float]):
        if scaling.is_used:
            raise RuntimeError(
                "a GradScaler was given to a step with overlap=ZenFlow, which adds up gradients of several steps, whose scales may "
                "differ: use bfloat16 or float32 without a GradScaler"
            )
        self._selective, self._gradients, self._max_norm = selective, gradients, max_norm
        self._number, self._ends = selective.next, False
        self._numbers: Numbers = ()
        #: The norm of the gradients that the step applies, where somebody asks for it. Not finite where they are not.
        self.norm: Optional[float] = None

    def prepare(self, check: Callable[[], None], numbers: Callable[[], Numbers], failure: Optional[Exception]) -> bool:
        """Gathers gradients, selects columns and adds up the norm. Returns whether there are gradients."""
        if failure is not None:
            raise failure
        selective = self._selective
        check()
        if not self._gradients.gather():
            return False
        self._numbers = numbers()
        selective.arrive()
        selective.count += 1
        if selective.selects:
            if self._max_norm is not None and not self._gradients.scores_are_finite():
                self._skip(math.inf)
                return True
            selective.select(self._number)
        self._ends = selective.ends_interval(self._number)
        if self._ends and selective.is_away:
            for sums in selective.sums:
                sums.important.clear_sums()
        if self._max_norm is not None:
            self.norm = math.sqrt(selective.squares(self._ends))
            if not self.is_finite:
                self._skip(self.norm)
        return True

    def _skip(self, norm: float) -> None:
        self.norm = norm
        self._selective.drop()

    @property
    def is_finite(self) -> bool:
        return self.norm is None or math.isfinite(self.norm)

    def make(self, *, maximize: bool) -> None:
        applied = Applied(self._numbers, maximize, self._max_norm).of(self.norm)
        self._selective.make(self._number, applied, self._ends)


class SummedGradients(Gradients):
    """Adds each gradient to the sums as soon as autograd has made it, and takes it away from the model."""

    def __init__(self, selective: Selective, shards: Shards, settings: Settings, lock: Any):
        super().__init__(shards, settings, lock)
        self._selective = selective

    def hook(self) -> None:
        if self._settings.gradients != "step":
            super().hook()

    def _accumulated(self, parameter: torch.Tensor, shard: Shard) -> None:
        if self._transfer.is_capturing():
            raise RuntimeError(
                "this backward pass is captured for a CUDA graph, but ZenFlow takes gradients away: leave it out of the graph"
            )
        if parameter.grad is not None:
            with self._lock:
                sums = next(sums for sums in self._selective.sums if sums.shard is shard)
                sums.take(shard.slots[parameter], measures=self._selective.measures)

    def gather(self) -> bool:
        """Takes the gradients that no hook has taken. Returns whether there are gradients, of all parameters."""
        every = self._selective.sums
        for sums in every:
            for parameter in (p for p in sums.shard.slots if p.grad is not None):
                self._accumulated(parameter, sums.shard)
        self._trained.check_frozen()
        if not any(sums.came for sums in every):
            return False
        missing = sorted(s.piece.name for sums in every for s in set(sums.shard.slots.values()) - sums.came)
        if missing:
            self._refuse_missing(missing)
            self._selective.arrive()
            for sums in every:
                sums.count_missing_as_zero()
        return True

    def scores_are_finite(self) -> bool:
        return bool(torch.cat([m.score for sums in self._selective.sums for m in sums.important.matrices.values()]).isfinite().all())

    def discard(self) -> None:
        """Discards the gradients that have come since the last step. They cannot be told from those of earlier steps."""
        if not any(sums.came for sums in self._selective.sums):
            return
        if self._selective.count:
            warnings.warn(
                f"zero_grad() discards gradients that are added to those of {self._selective.count} steps before: these are discarded, too"
            )
        self._selective.drop()

    def forget(self) -> None:
        """The step itself has forgotten them."""
