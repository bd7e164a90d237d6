"""ZenFlow, arXiv 2505.12242, in one set of moments: important columns are updated in every step, all others less often."""

import contextlib
import math
import os
import warnings
from typing import Any, Callable, Dict, List, Optional, Set

import torch

from plimsoll.client import Session
from plimsoll.errors import PlimsollError
from plimsoll.protocol import Opened
from plimsoll.torch.important import Important, Matrix
from plimsoll.torch.modes import ZenFlow
from plimsoll.torch.scaling import grad_scale
from plimsoll.torch.settings import Settings
from plimsoll.torch.shard import Shard
from plimsoll.torch.shards import Numbers, Shards
from plimsoll.torch.slot import Slot, dense
from plimsoll.torch.underway import Underway
from plimsoll.torch.updates import Outcome, Updates, Wanted


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
        (self._transfer.add if slot in self._summed else self._transfer.store)(slot.gradient, gradient.reshape(-1))
        if measures:
            matrix.measure(gradient)
        if matrix.important is not None:
            self.important.take(matrix, gradient, adds=slot in self.came)
        self._summed.add(slot)
        self.came.add(slot)
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


class Selective(Updates):
    """Makes the steps of an open optimizer as :class:`ZenFlow` says.

    A step updates the important columns with its gradients. The gradients of all others are added up. A step that ends
    an interval updates them with their mean.
    """

    def __init__(self, shards: Shards, settings: Settings, lock: Any):
        super().__init__(shards)
        self._settings, self._lock = settings, lock
        self._mode: ZenFlow = settings.overlap
        self._sums: List[Sums] = []
        self._hooks: List[Any] = []
        self._is_pending = False  # whether the model lacks the parameters of an update
        self._count = 0  # steps in the sums
        self._due = _Due(self._mode)
        self._last: Optional[Wanted] = None  # what the last step was asked for
        self._numbers: Numbers = ()

    # Opening and closing

    @property
    def sessions(self) -> List[Session]:
        return [*self.shards.sessions, *(sums.important.session for sums in self._sums)]

    def opened(self, found: List[Opened]) -> List[Opened]:
        """Opens the sessions of important columns. Returns what the shards have found, or have after beginning anew.

        Where a trainer has died, columns may be here and there, and only it knew which.
        """
        self._check()
        self._open()
        if any(sums.important.session.initialized for sums in self._sums):
            warnings.warn(
                f"the trainer of job {self._settings.job} died with overlap=ZenFlow, and only it knew which columns were "
                "important: their state is freed. Training begins anew, unless a checkpoint is loaded"
            )
            for sums in self._sums:
                sums.important.close()
            found = self.shards.open_anew()
            self._open()
        return found

    def _open(self) -> None:
        self._sums = [Sums(shard, self._mode.topk_ratio) for shard in self.shards]

    def _check(self) -> None:
        for slot in (slot for shard in self.shards for slot in shard.slots.values()):
            if not slot.contiguous:
                raise ValueError(
                    f"parameter {slot.piece.name} is not contiguous, and ZenFlow takes columns of the shape's order "
                    "(parameter.data = parameter.data.contiguous())"
                )
            if slot.piece.parameter.dtype is torch.float16:
                raise ValueError(
                    f"parameter {slot.piece.name} is float16: ZenFlow adds up gradients of several steps, whose loss scales may differ; "
                    "use bfloat16 or float32"
                )

    def hook(self) -> None:
        """Puts a hook on every parameter. It takes each gradient as soon as autograd has made it."""
        for sums in self._sums:
            for parameter, slot in sums.shard.slots.items():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook_of(sums, slot)))

    def _hook_of(self, sums: Sums, slot: Slot) -> Callable[[torch.Tensor], None]:
        owner = os.getpid()

        def hook(parameter: torch.Tensor) -> None:
            if os.getpid() != owner or parameter.grad is None:
                return
            if self.shards.transfer.is_capturing():
                raise RuntimeError("this backward pass is captured for a CUDA graph, but ZenFlow takes gradients away: leave it out of the graph")
            with self._lock:
                self._take(sums, slot)

        return hook

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        """Ends the sessions of important columns, which are all at home."""
        for sums in self._sums:
            sums.important.close()

    def release(self) -> None:
        service = self.shards.service
        for session in (sums.important.session for sums in self._sums):
            if service is not None and service.process.poll() is None:
                with contextlib.suppress(PlimsollError, OSError):
                    session.close(give_back=True)  # other users of the service need the memory
            session.abandon()
        super().release()

    # Gradients

    def _take(self, sums: Sums, slot: Slot) -> None:
        sums.take(slot, measures=self._selects or (self._due.is_asked and self._next > self._mode.full_warm_up_rounds))

    def discard(self) -> None:
        """Discards the gradients that have come since the last step. They cannot be told from those of earlier steps."""
        if not any(sums.came for sums in self._sums):
            return
        if self._count:
            warnings.warn(
                f"zero_grad() discards gradients that are added to those of {self._count} steps before: these are discarded, too"
            )
        self._drop()

    def _drop(self) -> None:
        self._count = 0
        self._due.begin()
        for sums in self._sums:
            sums.begin_step()
            sums.clear()

    # Steps

    @property
    def _next(self) -> int:
        """The number of the next step."""
        return 1 + max(session.step for session in (self.sessions if self._is_away else self.shards.sessions))

    @property
    def _is_away(self) -> bool:
        """Whether important columns are in their own sessions."""
        return any(sums.important.are_away for sums in self._sums)

    @property
    def _selects(self) -> bool:
        """Whether the next step selects columns."""
        every, number = self._mode.selects_every, self._next
        if number <= self._mode.full_warm_up_rounds:
            return False
        return not self._is_away or (every > 0 and (number - 1) % every == 0)

    def _ends_interval(self, number: int) -> bool:
        """Whether a step updates all columns."""
        mode, every = self._mode, self._mode.selects_every
        after = number - mode.full_warm_up_rounds
        if after <= 0 or (every > 0 and number % every == 0):
            return True  # a selection finds no sums
        if mode.update_interval == "auto":
            return self._due.is_due([m for sums in self._sums for m in sums.important.matrices.values() if m.is_matrix])
        return after % mode.update_interval == 0

    def step(self, wanted: Wanted) -> Optional[Outcome]:
        """Makes a step, unless gradients are not finite. None if there are no gradients."""
        if wanted.scaling.is_used:
            raise RuntimeError(
                "a GradScaler was given to a step with overlap=ZenFlow, which adds up gradients of several steps, whose scales may "
                "differ: use bfloat16 or float32 without a GradScaler"
            )
        if not self._gather():
            return None
        wanted.check()
        self._last, self._numbers = wanted, wanted.numbers()
        self._finish_update()
        self.shards.transfer.settle()
        if not self._is_away:
            self.shards.take_weights()
        number, self._count = self._next, self._count + 1
        if self._selects:
            if not self._scores_are_finite():
                self._drop()
                return Outcome(math.inf, False)
            for sums in self._sums:
                sums.important.select(number - 1)
                sums.important.take_from_sums()
        norm = self._make(number, self._ends_interval(number))
        for sums in self._sums:
            sums.begin_step()
        return Outcome(norm, norm is None or math.isfinite(norm))

    def _gather(self) -> bool:
        """Takes the gradients that no hook has taken. Returns whether there are gradients."""
        for sums in self._sums:
            for parameter, slot in sums.shard.slots.items():
                if parameter.grad is not None:
                    self._take(sums, slot)
        self.shards.trained.check_frozen()
        if not any(sums.came for sums in self._sums):
            return False
        missing = sorted(s.piece.name for sums in self._sums for s in set(sums.shard.slots.values()) - sums.came)
        if missing and self._settings.missing_gradients == "refuse":
            raise RuntimeError(
                f"{len(missing)} parameters have no gradient, {missing[0]} among them: every step updates all parameters. Freeze them before "
                "the optimizer is made (requires_grad_(False)), or count their gradients as zero (missing_gradients='zero')"
            )
        if missing:
            self._finish_update()
            self.shards.transfer.settle()
            for sums in self._sums:
                sums.count_missing_as_zero()
        return True

    def _scores_are_finite(self) -> bool:
        if self._last.max_norm is None:
            return True
        return bool(torch.cat([m.score for sums in self._sums for m in sums.important.matrices.values()]).isfinite().all())

    def _make(self, number: int, ends: bool) -> Optional[float]:
        """Updates the important columns, and all others at the end of an interval. Returns the norm of the gradients
        that this applies, if it is asked for. If that is not finite, all that was added up is dropped.
        """
        important = [sums.important for sums in self._sums] if self._is_away else []
        shards = list(self.shards) if ends else []
        for sums in self._sums if ends and important else ():
            sums.important.clear_sums()
        norm = self._norm([i.session for i in important], [s.session for s in shards])
        if norm is not None and not math.isfinite(norm):
            self._drop()
            return norm
        scale = grad_scale(1.0, norm, self._last.max_norm) * (-1 if self._last.maximize else 1)
        begun = [(i.session, i.session.begin(scale, self._numbers, wait=True)) for i in important]
        for session, request in begun:
            session.begun(request)
        if ends:
            self._update(number, scale, waits=not important or not self._mode.overlap_step)
        for i in important:
            i.bring()
        return norm

    def _norm(self, important: List[Session], shards: List[Session]) -> Optional[float]:
        """The norm of the gradients of important columns, and of the mean of the sums."""
        if self._last.max_norm is None:
            return None
        asked = [(session, session.norm()) for session in important]
        squares = sum(session.norm_result(request) for session, request in asked)
        asked = [(session, session.norm()) for session in shards]
        return math.sqrt(squares + sum(session.norm_result(request) for session, request in asked) / self._count**2)

    def _update(self, number: int, scale: float, *, waits: bool) -> None:
        """Updates all columns that are at home with the mean of the sums, as step ``number``."""
        for sums in self._sums:
            session = sums.shard.session
            if session.step != number - 1:
                session.set_step(number - 1)
            session.begun(session.begin(scale / self._count, self._numbers, wait=waits))
            sums.underway.begun()
            sums.clear()
        self._count, self._is_pending = 0, True
        self._due.begin()
        if waits:
            self._finish_update()

    def _finish_update(self) -> None:
        """Waits for the update under way, and brings the parameters into the model."""
        if self._is_pending or self._is_away:
            self._check_untouched()
        if not self._is_pending:
            return
        self._bring_all()
        self._is_pending = False

    def _check_untouched(self) -> None:
        for shard in self.shards:
            shard.parameters.check_untouched()

    def _bring_all(self) -> None:
        for sums in self._sums:
            sums.shard.parameters.pull(after_step=True)
            sums.underway.wait()
            if sums.important.are_away:
                sums.important.bring()
        self.shards.transfer.settle()  # the next update changes what copies may still read

    def finish(self) -> None:
        """Ends the interval: all columns are updated with what was added up, and state and model are of one step.

        Raises RuntimeError between a backward pass and its step.
        """
        if any(sums.came for sums in self._sums):
            raise RuntimeError(
                "gradients have come since the last step, and overlap=ZenFlow has added them to those before: save, load and "
                "synchronize after optimizer.step()"
            )
        self._finish_update()
        if not self._is_away:
            return
        number = self._next - 1
        if self._count:
            self._end_interval(number)
        for sums in self._sums:
            sums.important.move_home(number)
        self._bring_all()

    def _end_interval(self, number: int) -> None:
        for sums in self._sums:
            sums.important.clear_sums()
        norm = self._norm([], self.shards.sessions)
        if norm is not None and not math.isfinite(norm):
            warnings.warn(f"the gradients of {self._count} steps are dropped: they are not finite")
            self._drop()
            return
        scale = grad_scale(1.0, norm, self._last.max_norm) * (-1 if self._last.maximize else 1)
        self._update(number, scale, waits=True)


class _Due:
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
