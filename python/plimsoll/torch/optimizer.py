"""A torch.optim.Optimizer whose state the optimizer service holds and updates."""

import os
import secrets
import sys
import threading
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, TypeVar

import torch

from plimsoll.protocol import Opened
from plimsoll.torch import changes, layout, owners
from plimsoll.torch.algorithm import Algorithm, Numbers
from plimsoll.torch.checkpoint import Saver, fit_entries, replace_state
from plimsoll.torch.entries import Entries, Entry, readers
from plimsoll.torch.gradients import Gradients
from plimsoll.torch.kinds import maximizes, overlap_of, step_of
from plimsoll.torch.overlap import release, replacing, stepping, synchronized, together
from plimsoll.torch.scaling import Scaling, takes_scaled_gradients
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.signals import uninterrupted
from plimsoll.torch.state_dict import read_entries
from plimsoll.torch.step import refuse_capture

_Result = TypeVar("_Result")

_APART_KEY = "plimsoll_state_saved_apart"  # in a state_dict


class Optimizer(changes.Noting, torch.optim.Optimizer):
    """The base class of this package's optimizers.

    The optimizer allocates nothing until the first step, :meth:`open`, or anything else that needs the state. Until
    then the program may move, convert, wrap and load the model as with an optimizer of torch.

    A step leaves a parameter without a gradient alone, as torch does: it keeps weight and state, and its own number of
    steps. ``missing_gradients`` has other ways.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave gradients scaled, and pass its scale to the step."""
        return takes_scaled_gradients(asking=sys._getframe(1).f_globals.get("__name__", ""))

    _algorithm: Algorithm  # of each class

    def __init__(
        self,
        params: Any,
        defaults: Dict[str, Any],
        *,
        max_grad_norm: Optional[float] = None,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        **settings: Any,
    ):
        defaults = self._algorithm.checked(defaults, type(self).__name__)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}: expected a number above 0, or None not to clip")
        self._settings = Settings.checked(self._algorithm, **settings).clipping(max_grad_norm)
        self._model, self._named = model, list(named_parameters) if named_parameters is not None else None
        self._shards: Optional[Shards] = None  # while the optimizer is open
        self._gradients: Optional[Gradients] = None  # as long
        self._closed = False
        super().__init__(params, defaults)
        self._saver = Saver()
        self._lock = threading.RLock()  # hooks run on autograd's threads, one for each device
        self.max_grad_norm = max_grad_norm
        self._overlap = overlap_of(self, self._settings, model, self._lock)
        weakref.finalize(self, self._overlap.remove)
        #: Steps that were not made, because gradients were not finite.
        self.skipped = 0
        #: The norm of all gradients at the last step, before clipping; None where it was not asked for.
        self.last_grad_norm: Optional[float] = None
        #: Whether :meth:`state_dict` leaves the state out, as :meth:`save` writes it beside. See plimsoll.transformers.
        self.saves_state_apart = False
        #: What tells the state that a state_dict without one was saved with, until it is loaded.
        self.awaits_state: Optional[str] = None
        self._saved_with: Optional[str] = None

    # Opening

    @uninterrupted
    def open(self) -> None:
        """Makes the state from the model's parameters, or attaches to the state that the service has.

        In a job of several ranks all ranks call it, or make their first step, at the same time. On the CPU the
        parameters' data become views of shared memory, and their values stay. After attaching, the values are those
        of the state: see :attr:`resumed_step`.

        Raises ServiceError if the state does not fit, among other reasons. Raises TypeError and ValueError for
        parameters that the service cannot hold.
        """
        if self._shards is None:
            self._open(lambda shards, found: shards.start(found))

    def _open_unless_closed(self) -> None:
        """Opens the optimizer for code that needs the state. After :meth:`close` the program says if it wants a new one."""
        self._check_not_closed()
        self.open()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise RuntimeError(
                "the optimizer is closed: open() attaches to the state if a service still has it, or begins with a new one "
                "(moments of zero); load() and load_state_dict() fill it"
            )

    def _open(self, begin: Callable[[Shards, List[Opened]], _Result]) -> _Result:
        """Opens the sessions, and calls ``begin`` to make state and model agree, with what the sessions of all ranks
        found when they were opened. If it fails, the model keeps its parameters.
        """
        owners.claim(self, self.param_groups)
        names, announces = self._names(), self.max_grad_norm is not None
        shards = Shards.divide(self.param_groups, names, self._model, self._settings, announces)
        self._overlap.refuse(shards)
        gradients = self._overlap.gradients_of(shards, self._settings, self._lock)
        self._release = weakref.finalize(self, release, gradients, shards, self._overlap, os.getpid())
        try:
            found = shards.open(lambda: self._algorithm.rule_of(self.param_groups))
            result = begin(shards, self._overlap.opened(shards, found))
            self._overlap.attach(shards)
            changes.begin(self._settings, shards)
        except BaseException:
            shards.give_back_if_new()
            self._release()
            raise
        self._shards, self._gradients, self._closed = shards, gradients, False
        gradients.hook()
        return result

    def _names(self) -> Dict[torch.Tensor, str]:
        return layout.names_of(self.param_groups, self._named, self._model)

    @property
    def resumed_step(self) -> int:
        """The step that the state was at when it was attached to or loaded: 0 for a new one. Opens the optimizer.

        A program that may have been restarted reads it before its first forward pass, and continues with the data of
        the next step.
        """
        self._open_unless_closed()
        return self._shards.resumed_step

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a parameter group, as torch does, until the state exists."""
        if self._shards is not None:
            raise RuntimeError(
                "add_param_group: the state is already in memory of exactly its size: add all groups before the first step"
            )
        super().add_param_group(param_group)
        try:
            self._check_options(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise

    def _check_options(self, g: int) -> None:
        self._algorithm.check_group(self.param_groups, g, self.defaults, type(self).__name__)
        layout.check_types(self.param_groups[g]["params"], self._names)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Takes parameter groups from a state_dict, possibly one that an older release of torch saved."""
        self._algorithm.complete(state["param_groups"], self.defaults, type(self).__name__, self._opened_rules())
        super().__setstate__(state)

    def _numbers(self) -> Numbers:
        return self._algorithm.numbers(self.param_groups, type(self).__name__, self._opened_rules())

    def _opened_rules(self) -> List[str]:
        return [s.document["optimizer"] for s in self._shards.sessions] if self._shards is not None else []

    # Steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``sharding="zero2"`` it discards the gradients that were sent to their owners."""
        self._overlap.refuse_begun()
        if not set_to_none:
            self._overlap.will_zero()
        super().zero_grad(set_to_none)
        self._overlap.discard()
        if self._shards is not None:
            self._gradients.discard()

    def synchronize(self) -> None:
        """Waits until the model has all parameters of the last step: see ``overlap``."""
        with self._lock:
            self._overlap.synchronize()

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Makes a step, and returns what ``closure`` returned.

        Gradients are clipped to ``max_grad_norm``. If they are not finite, the step is skipped and counted in
        :attr:`skipped`. If no parameter has a gradient, nothing happens.
        """
        refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        except BaseException:
            # GradScaler removes them only after a step that succeeds, and multiplies its scale with one that is left.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise
        return loss

    def _open_for_step(self) -> None:
        if self._shards is not None:
            return
        if self._settings.sharding == "zero2" and not self._closed:
            raise RuntimeError(
                "sharding is 'zero2': call optimizer.open() before the first backward pass, which sends gradients to their owners"
            )
        self._open_unless_closed()
        self._shards.refuse_resumed()

    @stepping
    def _step(self, failure: Optional[Exception]) -> None:
        self._check_awaited()
        self._open_for_step()
        step = step_of(self._shards, self._gradients, self._overlap, Scaling(self), self.max_grad_norm)
        if not step.prepare(self._check_groups, self._numbers, failure):
            return
        self.last_grad_norm = step.norm
        if step.is_finite:
            step.make(maximize=maximizes(self))
        else:
            self.skipped += 1
        self._gradients.forget()
        self._overlap.over()

    def _check_groups(self) -> None:
        self._shards.trained.check_groups(self.param_groups)

    # State

    @property
    def state(self) -> Entries:  # type: ignore[override]
        """The state of each parameter, fetched from the service on access and read-only: ``optimizer.state[p]["exp_avg"]``."""
        return self._entries

    @state.setter
    def state(self, value: Any) -> None:
        if "_entries" in self.__dict__:
            raise RuntimeError(
                "optimizer.state cannot be set: the service holds the state. Use optimizer.load_state_dict, or make a new "
                "optimizer to begin with moments of zero"
            )
        self._entries = Entries(self)  # torch's constructor sets it first

    def _refuse_full_state(self) -> None:
        self._settings.refuse_full_state()

    def _has_state(self) -> bool:
        return self._shards is not None and self._shards.step > 0

    def _readers(self) -> Dict[torch.Tensor, Callable[[], Entry]]:
        """The parameters whose state this rank has, and a reader for each."""
        return readers(self._shards, self._algorithm, self.synchronize) if self._has_state() and not self._settings.divides else {}

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} of plimsoll is not copied or pickled: its state is the service's, and its parameters are the model's. "
            "Copy the model, make an optimizer of it, and load this one's state_dict() there"
        )

    @synchronized
    def state_dict(self) -> Dict[str, Any]:
        """The state in torch's format, as fp32 tensors on the CPU: 8 bytes a parameter and more.

        Parameters in 16 bits have ``master_weights`` beside torch's entries. Before the optimizer is opened there is
        no state, as in torch. With ``sharding`` it raises RuntimeError, as no rank has the full state: use
        :meth:`save`.
        """
        if self.saves_state_apart:
            self._saved_with = secrets.token_hex(16)
            with self.state.showing({}):
                return {**super().state_dict(), _APART_KEY: self._saved_with}
        if self._shards is None:
            self._check_not_closed()
            return super().state_dict()
        self._refuse_full_state()
        self._check_groups()
        entries: Dict[torch.Tensor, Any] = {}
        if self._shards.step:
            self._shards.take_weights()
            entries = read_entries(self._shards, self._algorithm)
        with self.state.showing(entries):
            return super().state_dict()

    @replacing
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes a state from :meth:`state_dict`, or from the torch optimizer of the same name. Opens the optimizer if
        there is any state.

        With ``sharding`` every rank passes the full state. Raises ValueError if shapes, names or steps do not fit,
        and PlimsollError if they do not on another rank. In both cases nothing has changed.
        """
        load, entries = super().load_state_dict, state_dict.get("state", {})
        apart = state_dict.get(_APART_KEY)
        if apart is not None:
            load({**state_dict, "state": {}})
            self.awaits_state = apart
            return
        if self._shards is None and not entries:
            load(state_dict)
            return
        self.open()
        self._overlap.refuse_begun()
        groups = self.param_groups

        def entries_by_parameter() -> Dict[torch.Tensor, Any]:
            self._check_groups()
            load({**state_dict, "state": {}})
            ids = [i for g in state_dict["param_groups"] for i in g["params"]]
            return {p: entries.get(i) for i, p in zip(ids, (p for g in self.param_groups for p in g["params"]))}

        try:
            step, given = fit_entries(self._shards, self._algorithm, entries_by_parameter)
        except Exception:
            self.param_groups = groups
            raise
        replace_state(self._shards, self._algorithm, step, given)
        self.awaits_state = None

    # Checkpoints

    def saved_with(self) -> Optional[str]:
        """What distinguishes the last state_dict without a state from any other: on all ranks, that of the first."""
        self.open()
        return self._shards.ranks.gather([self._saved_with])[0]

    def _check_awaited(self) -> None:
        if self.awaits_state is not None:
            raise RuntimeError(
                "this optimizer has loaded a state_dict saved by plimsoll.transformers.CheckpointCallback, and the state "
                "is in the folder plimsoll beside it: give the Trainer that callback, or call optimizer.load(folder)"
            )

    @together
    def save(self, directory: Any, training: Any = None) -> int:
        """Begins to save the state to ``directory`` in the background, and returns the step that is saved. Training
        may go on.

        All ranks call it, and later :meth:`saved`. ``training`` is a JSON document of at most 64 KiB that
        :meth:`load` returns, such as the state of a scheduler.
        """
        self._check_awaited()
        self._open_unless_closed()
        return self._saver.save(self._shards, directory, training, self._check_groups)

    @together
    def saved(self) -> int:
        """Waits until all ranks have written what :meth:`save` began, and makes it a checkpoint. Returns its step.

        Raises ServiceError if a file could not be written, and PlimsollError if another rank failed, or if the service
        was restarted meanwhile: then call save again.
        """
        self._check_not_closed()
        return self._saver.saved(self._shards)

    @replacing
    def load(self, directory: Any) -> Any:
        """Loads a checkpoint, or the newest in a folder of them, into the state and the model. Returns its training
        document.

        All ranks call it. See :attr:`resumed_step` for the step. The optimizer need not be open; then it is not
        filled from the model first. A rank without any state gets the document of another. If loading fails on one
        rank it fails on all. The states of some may then have been overwritten, and steps are refused until all have
        loaded.
        """
        if self._shards is None:
            training = self._open(lambda shards, _: self._saver.load(shards, directory))
        else:
            training = self._saver.load(self._shards, directory)
        self.awaits_state = None
        return training

    def close(self, *, give_back: bool = False) -> None:
        """Ends the sessions. The state stays in a service that is not this process's own, unless it is given back.

        Parameters keep their values. Afterwards :meth:`open`, :meth:`load` or :meth:`load_state_dict` open the
        optimizer again. Anything else that needs the state raises RuntimeError, so that no training continues with a
        new state by accident.
        """
        if self._shards is None:
            return
        self._overlap.close()
        self._shards.close(give_back)
        owners.release(self, self.param_groups)
        self._release()
        self._saver.forget()
        self._shards, self._gradients, self._closed = None, None, True
