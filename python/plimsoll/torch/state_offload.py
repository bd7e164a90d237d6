"""StateOffload: any optimizer of torch, with its state on the host between the steps."""

import os
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch

from plimsoll import states
from plimsoll.torch import environment, layout, owners, regions
from plimsoll.torch.demands import Demands, demanded
from plimsoll.torch.entries import Copy, Entries, Entry
from plimsoll.torch.held_checkpoint import HeldSaver, Saved, all_ranks
from plimsoll.torch.held_state import Found, HeldState, why_torn
from plimsoll.torch.refusals import check_arguments, refuse_optimizer, refuse_sparse
from plimsoll.torch.signals import deferred
from plimsoll.torch.step import refuse_capture
from plimsoll.torch.trained import Trained
from plimsoll.torch.tree import copied
from plimsoll.torch.wrapped import Wrapped


class StateOffload(torch.optim.Optimizer):
    """Wraps an optimizer of torch: its state rests on the host, in memory of the optimizer service, and comes through
    a bounded window of the device for each step. The update is the optimizer's own, on the device, to the bit.

    Args:
        optimizer: the optimizer, with or without a state. It is called by this one alone from now on.
        mode: "chunked" updates chunk after chunk, with at most two chunks on the device. "whole" has the whole state
            there during the step, for optimizers whose parameters depend on each other.
        chunk_bytes: the size of a chunk. A larger parameter is a chunk of its own.
        fraction: the share of the state that leaves the device. The rest stays there.
        master: fp32 master weights of 16-bit parameters: "fp32", 4 bytes a parameter; "split", the 2 bytes that a bf16
            parameter lacks; or None.
        moments: how fp32 state of the parameter's shape is held: "fp32", or "bf16", rounded to the nearest.
        recovery: also holds parameters and gradients, so that the next process finishes the step in which this one dies.
        named_parameters, model: for the names of parameters in checkpoints and messages.
        name: tells several optimizers of one program apart.
        job, socket: of the service, as for the other optimizers of this package.
    """

    wraps_optimizers = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mode: str = "chunked",
        chunk_bytes: int = 64 << 20,
        fraction: float = 1.0,
        master: Optional[str] = None,
        moments: str = "fp32",
        recovery: bool = True,
        *,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
    ) -> None:
        check_arguments(mode, chunk_bytes, fraction, master, moments)
        refuse_optimizer(optimizer, chunked=mode == "chunked")
        self._wrapped = Wrapped(optimizer)
        self._demands = Demands(mode == "whole", chunk_bytes, fraction, master, moments, recovery)
        self._names_from = list(named_parameters) if named_parameters is not None else None, model
        self._where = job or environment.job(), name, socket or environment.socket()
        self._entries = Entries(self)
        self._state: Optional[HeldState] = None
        self._torn: Optional[str] = None
        self._resumed_step, self._closed = 0, False
        self._lay_out()
        owners.claim(self, self.param_groups)
        super().__setstate__({})  # hooks, and torch's profiler around the step
        self._wrapped.seize(self)

    def _lay_out(self) -> None:
        names = self._names()
        self._trained, self._kinds = Trained(self.param_groups, names), self._kinds_of_parameters()
        self._demands, self._layout, self._resident = demanded(self._wrapped, names, self._demands)

    def _kinds_of_parameters(self) -> List[Any]:
        return [(p.requires_grad, p.dtype, layout.local(p).device) for g in self.param_groups for p in g["params"]]

    def _names(self) -> Dict[torch.Tensor, str]:
        return layout.names_of(self.param_groups, *self._names_from)

    # What is the wrapped optimizer's

    @property
    def param_groups(self) -> List[Dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer, itself."""
        return self._wrapped.groups

    @param_groups.setter
    def param_groups(self, groups: List[Dict[str, Any]]) -> None:
        self._wrapped.optimizer.param_groups = groups

    @property
    def defaults(self) -> Dict[str, Any]:  # type: ignore[override]
        return self._wrapped.optimizer.defaults

    @property
    def window_bytes(self) -> int:
        """The most bytes of the device that steps hold, beside what the wrapped optimizer allocates for a while."""
        return regions.window_bytes(self._layout, self._demands.whole)

    @property
    def first_window_bytes(self) -> int:
        """The same for the first step, in which the wrapped optimizer makes its state."""
        return regions.first_window_bytes(self._layout, self._demands.whole)

    @property
    def host_bytes(self) -> int:
        """The bytes of all arenas on the host."""
        return sum(states.sizes_of(regions.document(self._layout)).values())

    # Opening

    def open(self) -> None:
        """Makes the state, or goes on from the one that the service has: see :attr:`resumed_step`."""
        if self._state is not None:
            return
        if self._kinds != self._kinds_of_parameters():  # the program has moved the model
            self._lay_out()
        owners.claim(self, self.param_groups)
        state = HeldState(self._wrapped, self._layout, self._resident, self._demands, self._trained.device)
        ranks = all_ranks()

        def begin() -> Found:
            state.open(*self._where)
            return state.begin()

        try:
            every = ranks.agree("opening the state", begin)
            found = [f for f in every if f.has_state] or every
            step, torn = max(f.steps for f in found), why_torn(found)
            if torn is None and any(f.steps < step for f in found):
                ranks.agree(f"finishing step {step}", lambda: state.finish_prepared(step))
            self._torn, self._resumed_step = torn, 0 if torn else step
            before = self._wrapped.take_state()
            if before and state.steps == 0:
                state.replace(before)
        except BaseException:
            state.close()
            raise
        self._state, self._saver, self._release = state, HeldSaver(state.session), weakref.finalize(self, _close, state, os.getpid())
        self._closed = False

    @property
    def resumed_step(self) -> int:
        """The step that the state was at when it was found: 0 for a new one. Opens the optimizer.

        A program that may have been restarted reads it before its first forward pass, and goes on with the data of the
        next step.
        """
        self._open_unless_closed()
        self._refuse_torn()
        return self._resumed_step

    def _open_unless_closed(self) -> None:
        """Opens the optimizer for code that needs the state. After :meth:`close` the program says if it wants a new one."""
        if self._closed:
            raise RuntimeError(
                "the optimizer is closed: open() attaches to the state if a service still has it, or begins with a new one; load() "
                "and load_state_dict() fill it"
            )
        self.open()

    @property
    def is_torn(self) -> bool:
        """Whether the state that was found is of no step: a load replaces it."""
        return self._torn is not None

    def _refuse_torn(self) -> None:
        if self._torn is not None:
            raise RuntimeError(f"a state was found, but {self._torn}: load a checkpoint (load, load_state_dict)")

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a parameter group, as torch does, until the state exists."""
        if self._state is not None:
            raise RuntimeError(
                "add_param_group: the state is already in memory of exactly its size: add all groups before the first step"
            )
        self._wrapped.optimizer.add_param_group(param_group)
        try:
            refuse_optimizer(self._wrapped.optimizer, chunked=not self._demands.whole)
            self._lay_out()
            owners.claim(self, self.param_groups)
        except BaseException:
            self.param_groups.pop()
            self._lay_out()
            raise

    # Steps

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Makes a step, and returns what ``closure`` returned, which is called once, before the update."""
        refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_step()
        with deferred():  # an interrupt would leave the step half made
            self.prepare()
            self.make()
        return loss

    # A step in two phases, for ranks that make it together

    def check_step(self) -> None:
        """Opens the state, and raises where no step can be made of these gradients."""
        if self._state is None:
            self._open_unless_closed()
            if self._resumed_step:
                raise RuntimeError(
                    f"the service has the state of step {self._resumed_step}, and these gradients are of other parameters: read "
                    "optimizer.resumed_step before the first forward pass, and go on with the data of the next step"
                )
        self._refuse_torn()
        self._trained.check_groups(self.param_groups)
        self._trained.check_forms()
        self._trained.check_frozen()
        refuse_sparse(self.param_groups, self._names)
        self._state.refuse_broken()
        self._wrapped.optimizer._opt_called = True  # for schedulers that were made for it

    def prepare(self, wait: bool = False) -> None:
        """The first phase: begins a step. If it waits, the next process can make the step, whenever this one dies."""
        self._state.prepare(wait)

    def make(self) -> None:
        """The second phase."""
        self._state.make()

    @property
    def steps(self) -> int:
        """The number of steps that were made, also by earlier processes. Waits until the host has their state."""
        self._state.settle()
        return self._state.steps

    def prefetch(self) -> None:
        """Begins to copy the state to the device, where the mode is "whole". Otherwise nothing happens."""
        if self._state is not None:
            self._state.prefetch()

    def synchronize(self) -> None:
        """Waits until the host has the state of the last step."""
        if self._state is not None:
            self._state.settle()

    # State

    @property
    def state(self) -> Entries:  # type: ignore[override]
        """The state of each parameter, copied from the host's memory on access. It is read-only."""
        return self._entries

    @state.setter
    def state(self, value: Any) -> None:
        raise RuntimeError("optimizer.state cannot be set: the service holds the state. Use optimizer.load_state_dict")

    def _refuse_full_state(self) -> None:
        """Every parameter of this optimizer has its full state here."""

    def _has_state(self) -> bool:
        return self._state is not None and bool(self._state.parameters_with_state())

    def _readers(self) -> Dict[torch.Tensor, Callable[[], Entry]]:
        def reader(parameter: torch.Tensor) -> Callable[[], Entry]:
            def read() -> Entry:
                entry = self._state.entry(parameter)
                return Entry({k: v.as_subclass(Copy) if type(v) is torch.Tensor else v for k, v in entry.items()})

            return read

        if self._state is None:
            return {}
        named = {key: lambda value=value: copied({"": value})[""] for key, value in self._wrapped.named.items()}
        return {**{p: reader(p) for p in self._state.parameters_with_state()}, **named}

    def state_dict(self) -> Dict[str, Any]:
        """The state in the format of the wrapped optimizer, which can load it. It is read on the host.

        Parameters with master weights have ``master_weights`` beside its entries.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        found = self._plain_state_dict()
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, found)
            found = found if changed is None else changed
        return found

    def _plain_state_dict(self) -> Dict[str, Any]:
        optimizer = self._wrapped.optimizer
        if self._state is None and not self._closed:
            return optimizer.state_dict()
        self._open_unless_closed()
        self._refuse_torn()
        self._state.refuse_broken()
        optimizer.state = {**self._state.entries(), **self._wrapped.named}
        try:
            return optimizer.state_dict()
        finally:
            optimizer.state = {}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes a state from :meth:`state_dict`, or from the wrapped optimizer. It is written on the host."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        entries = state_dict.get("state", {})
        optimizer = self._wrapped.optimizer
        if entries:
            self.open()
        groups = self.param_groups
        ids = [i for g in state_dict["param_groups"] for i in g["params"]]
        try:
            optimizer.load_state_dict({**state_dict, "state": {k: v for k, v in entries.items() if k not in set(ids)}})
            if self._state is not None:
                self._wrapped.take_state()
                given = zip(ids, (p for g in self.param_groups for p in g["params"]))
                self._state.replace({p: entries[i] for i, p in given if i in entries})
        except Exception:
            self.param_groups = groups
            raise
        self._torn = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # Checkpoints

    def save(self, directory: Any, training: Any = None) -> int:
        """Begins to save the state to ``directory``, and returns its step. The service writes it while training goes on.

        All ranks call it, and later :meth:`saved`. ``training`` is a JSON document that :meth:`load` returns, such as the
        state of a scheduler. With the options of the parameter groups it has at most 60 KiB.
        """
        self._open_unless_closed()
        self._refuse_torn()
        self._state.refuse_broken()
        self._refuse_resident("save", "state_dict")
        self.synchronize()
        return self._saver.save(directory, self._state.steps, self._wrapped.document(), training)

    def saved(self) -> int:
        """Waits until all ranks have written what :meth:`save` began, and makes it a checkpoint. Returns its step."""
        self._open_unless_closed()
        return self._saver.saved()

    def load(self, directory: Any) -> Any:
        """Loads a checkpoint, or the newest in a folder of them. Returns its training document.

        The options of the parameter groups become the saved ones, as with :meth:`load_state_dict`. With ``recovery`` the model
        gets its parameters, too. Otherwise the program loads the model's of the same step.
        """
        self.open()
        self._refuse_resident("load", "load_state_dict")
        self._state.forget()
        self._torn = f"the load of {directory} has failed"  # until all is there
        saved = self._saver.load(directory, self._take)
        self._state.loaded()
        self._torn, self._resumed_step = None, self._state.steps
        return saved.training

    def _take(self, saved: Saved) -> None:
        """Takes what a checkpoint has beside the state of parameters."""
        if saved.optimizer is not None:
            self._wrapped.load_document(saved.optimizer, self._trained.device)
        elif self._wrapped.has_more:
            raise ValueError(
                f"the checkpoint is of an earlier release, without what {type(self._wrapped.optimizer).__name__} has beside the state "
                "of its parameters, such as a count of steps: save it with this release, or load a state_dict"
            )

    def _refuse_resident(self, method: str, instead: str) -> None:
        if self._resident:
            raise RuntimeError(
                f"fraction is {self._demands.fraction}, so a part of the state is on the device: use {instead}, not {method}"
            )

    def __reduce__(self) -> Any:
        raise TypeError(
            "StateOffload is not copied or pickled: its state is the service's, and its parameters are the model's. Copy the "
            "model, make an optimizer of it, and load this one's state_dict() there"
        )

    def close(self) -> None:
        """Ends the session, and gives the device's memory back."""
        if self._state is not None:
            self._release()
            self._state, self._closed = None, True
        owners.release(self, self.param_groups)


def _close(state: HeldState, owner: int) -> None:
    if os.getpid() == owner:  # the session is the parent's
        state.close()
