"""Muon for the matrices of hidden layers and AdamW for the rest, in one optimizer."""

import weakref
from typing import Any, Callable, Dict, Iterable, Literal, Mapping, Optional, Tuple

import torch

from plimsoll.torch import layout, newton_schulz
from plimsoll.torch.algorithm import flags_of
from plimsoll.torch.arguments import Moments, Number, Parameters, Sharding, described
from plimsoll.torch.entries import Entries, Entry
from plimsoll.torch.matrix_groups import check_parameters, checked_adamw, checked_muon
from plimsoll.torch.muon_update import MuonUpdate
from plimsoll.torch.owned_step import OwnedStep
from plimsoll.torch.ranks import mesh_for
from plimsoll.torch.refusals import check_arguments
from plimsoll.torch.settings import choose
from plimsoll.torch.signals import deferred
from plimsoll.torch.state_offload import StateOffload
from plimsoll.torch.step import refuse_capture


@described(
    params="parameters, (name, parameter) pairs, or dicts that are parameter groups. A group that does not say use_muon is one of Muon.",
    weight_decay="is what a weight of Muon loses in a step, times lr and itself.",
    momentum="how much of Muon's momentum stays in a step.",
    ns_coefficients="of the polynomial of Newton-Schulz.",
    eps="the least norm by which a matrix is divided.",
    ns_steps="of Newton-Schulz: 0 to 99.",
    adjust_lr_fn='how lr follows from the shape of a matrix: "original", which is None, "match_rms_adamw" or "spectral_unclamped".',
    adamw="the options of groups with use_muon=False, where they do not say otherwise. Defaults are torch.optim.AdamW's.",
    master='fp32 master weights of 16-bit parameters: "split", the 2 bytes that a bf16 parameter lacks; "fp32", 4 bytes; or None.',
    moments='how momentum and moments rest on the host: "fp32", or "bf16", which takes 2 bytes less for each.',
    sharding=(
        'None; "zero1", where each rank of process_group updates parameters of its own, and gradients are the same on all ranks '
        '(DistributedDataParallel); "zero2", where the optimizer averages gradients itself, each to the rank that needs it. '
        "Parameters that fully_shard has sharded are gathered, with None."
    ),
    chunk_bytes="of states that are on the device at a time: two chunks of this size, or of the largest parameter.",
    recovery="also holds parameters and gradients, so that the next process finishes the step in which this one dies.",
    model="for the names of parameters, and to tell embeddings and the output head from hidden layers.",
)
class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for parameter groups with ``use_muon=True``, torch.optim.AdamW for those with
    ``use_muon=False``. Updates run on the device of the parameters; states rest on the host between the steps.

    :func:`plimsoll.torch.muon_groups` makes the groups of a model.
    """

    def __init__(
        self,
        params: Parameters,
        lr: Number = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Tuple[float, float, float] = newton_schulz.COEFFICIENTS,
        eps: float = newton_schulz.EPS,
        ns_steps: int = newton_schulz.STEPS,
        adjust_lr_fn: Optional[str] = None,
        *,
        adamw: Optional[Mapping[str, Any]] = None,
        master: Optional[Literal["split", "fp32"]] = "split",
        moments: Moments = "fp32",
        max_grad_norm: Optional[float] = None,
        sharding: Sharding = None,
        process_group: Optional["torch.distributed.ProcessGroup"] = None,
        chunk_bytes: int = 64 << 20,
        recovery: bool = True,
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}: expected a number above 0, or None not to clip")
        choose("sharding", sharding, (None, "zero1", "zero2"))
        check_arguments("chunked", chunk_bytes, 1.0, master, moments)
        options = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            matrices=None,
        )
        self._options = {True: checked_muon(options), False: checked_adamw(dict(adamw or {}))}
        self._model, self._named = model, list(named_parameters) if named_parameters is not None else None
        self._sharding, self._process_group = sharding, process_group
        self._how = dict(
            chunk_bytes=chunk_bytes, master=master, moments=moments, recovery=recovery, name=name, job=job, socket=socket
        )
        self._together: Optional[OwnedStep] = None  # while the optimizer is open
        self._held: Optional[StateOffload] = None  # as long
        super().__init__(params, {})
        self.max_grad_norm = max_grad_norm
        #: Steps that were not made, because gradients were not finite.
        self.skipped = 0
        #: The norm of all gradients at the last step, before clipping; None where it was not asked for.
        self.last_grad_norm: Optional[float] = None

    # Groups

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a parameter group, as torch does, until the state exists."""
        if self._held is not None:
            raise RuntimeError(
                "add_param_group: the state is already in memory of exactly its size: add all groups before the first step"
            )
        by_muon = bool(param_group.get("use_muon", True))
        given = {k: v for k, v in param_group.items() if k not in ("params", "param_names", "use_muon")}
        options = {**self._options[by_muon], **given}
        checked = checked_muon(options) if by_muon else checked_adamw(options)
        super().add_param_group({**param_group, **checked, "use_muon": by_muon})
        try:
            check_parameters(self.param_groups[-1:], self._names(), self._model)
        except BaseException:
            self.param_groups.pop()
            raise

    def _names(self) -> Dict[torch.Tensor, str]:
        return layout.names_of(self.param_groups, self._named, self._model)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Takes parameter groups from a state_dict, possibly one of torch's own optimizers."""
        for g, (group, now) in enumerate(zip(state.get("param_groups", ()), self.param_groups)):
            if group.setdefault("use_muon", "momentum" in group) != now["use_muon"]:
                raise ValueError(
                    f"parameter group {g} has use_muon={now['use_muon']}, but the state that is loaded was made with the other: give the "
                    "optimizer the groups that the state was saved with"
                )
            flags = {} if now["use_muon"] else flags_of(torch.optim.AdamW)
            for option, value in now.items():
                group.setdefault(option, flags.get(option, value))
        super().__setstate__(state)

    # Opening

    def open(self) -> None:
        """Makes the state from the model's parameters, or goes on from the one that the service has.

        In a job of several ranks all ranks call it, or make their first step, at the same time.
        """
        if self._held is not None:
            return
        names, parameters = self._names(), [p for g in self.param_groups for p in g["params"]]
        mesh = mesh_for(parameters, names, self._sharding, self._process_group, self._model)
        together = OwnedStep(self.param_groups, names, mesh, reduces=self._sharding == "zero2")
        try:
            together.gather_parameters()
            named = [(names[p], together.updated.get(p, p)) for p in parameters]
            update = MuonUpdate(together.own_groups(self.param_groups))
            held = StateOffload(update, named_parameters=named, **self._how)
            held.open()
        except BaseException:
            together.release()
            raise
        self._together, self._held = together, held
        self._release = weakref.finalize(self, together.release)
        if not held.is_torn and held.resumed_step:
            together.publish()

    @property
    def resumed_step(self) -> int:
        """The step that the state was at when it was found: 0 for a new one. Opens the optimizer.

        A program that may have been restarted reads it before its first forward pass, and goes on with the data of the
        next step.
        """
        self.open()
        return self._held.resumed_step

    @property
    def host_bytes(self) -> int:
        """The bytes of this rank's arenas on the host."""
        self.open()
        return self._held.host_bytes

    def close(self) -> None:
        """Ends the session."""
        if self._held is not None:
            self._release()
            self._held.close()
            self._held = self._together = None

    # Steps

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler unscales gradients before the step, except those that are not here: see :meth:`step`."""
        return self._sharding == "zero2"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``sharding="zero2"`` it discards the gradients that were sent to their owners."""
        super().zero_grad(set_to_none)
        if self._together is not None:
            self._together.discard()

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Makes a step, and returns what ``closure`` returned.

        Gradients are clipped to ``max_grad_norm``. If they are not finite then, the step is skipped and counted in
        :attr:`skipped`. As in torch, a parameter without a gradient stays as it is.
        """
        refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._open_for_step()
        prepared = self._together.prepare(self._held, self.max_grad_norm is not None, self._check)
        if not prepared.has_gradients:
            return loss
        self.last_grad_norm = prepared.norm
        if prepared.is_finite:
            prepared.clip(self.max_grad_norm)
            self._take_options()
            with deferred():  # other ranks make the step
                self._together.make(self._held)
        else:
            self.skipped += 1
        self._together.over()
        return loss

    def _open_for_step(self) -> None:
        if hasattr(self, "found_inf"):
            del self.found_inf
            raise RuntimeError(
                "sharding is 'zero2' and a GradScaler makes the step, but each rank has gradients of its own, so the scales of the "
                "ranks would differ: use bf16 without a GradScaler, or sharding='zero1'"
            )
        if self._held is not None:
            return
        if self._sharding == "zero2":
            raise RuntimeError(
                "sharding is 'zero2': call optimizer.open() before the first backward pass, which sends gradients to their owners"
            )
        self.open()
        if self._held.resumed_step:
            raise RuntimeError(
                f"the service has the state of step {self._held.resumed_step}, and gradients of other parameters were given: read "
                "optimizer.resumed_step before the first forward pass"
            )

    def _check(self) -> None:
        self._together.trained.check_groups(self.param_groups)
        self._together.trained.check_frozen()
        self._held.check_step()

    def _take_options(self) -> None:
        """The options may have changed since the last step, as by a scheduler."""
        for own, group in zip(self._held.param_groups, self.param_groups):
            own.update({k: v for k, v in group.items() if k not in ("params", "param_names")})

    # State

    @property
    def state(self) -> Entries:  # type: ignore[override]
        """The state of each parameter, copied from the host's memory on access. It is read-only."""
        return self._entries

    @state.setter
    def state(self, value: Any) -> None:
        if "_entries" in self.__dict__:
            raise RuntimeError("optimizer.state cannot be set: the service holds the state. Use optimizer.load_state_dict")
        self._entries = Entries(self)  # torch's constructor sets it first

    def _has_state(self) -> bool:
        return self._held is not None and self._held._has_state()

    def _readers(self) -> Dict[torch.Tensor, Callable[[], Entry]]:
        return self._held._readers() if self._held is not None and not self._together.is_divided else {}

    def _refuse_full_state(self) -> None:
        if self._together is not None and self._together.is_divided:
            raise RuntimeError("the state is divided among the ranks, so no rank has all of it: save it with optimizer.save(directory)")

    def __reduce__(self) -> Any:
        raise TypeError(
            "Muon of plimsoll is not copied or pickled: its state is the service's, and its parameters are the model's. Copy the "
            "model, make an optimizer of it, and load this one's state_dict() there"
        )

    def state_dict(self) -> Dict[str, Any]:
        """The state in the format of torch.optim.Muon and torch.optim.AdamW, with ``master_weights`` beside it for
        16-bit parameters. Raises RuntimeError if the state is divided among ranks: use :meth:`save`.
        """
        self._refuse_full_state()
        if self._held is None:
            return super().state_dict()
        self._take_options()
        return self._held.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes a state from :meth:`state_dict`, or from torch's optimizers. Raises RuntimeError if the state is divided
        among ranks: use :meth:`load`.
        """
        if state_dict.get("state"):
            self.open()
        self._refuse_full_state()
        groups = self.param_groups
        try:
            super().load_state_dict({**state_dict, "state": {}})
            if self._held is not None:
                self._held.load_state_dict(state_dict)
        except Exception:
            self.param_groups = groups
            raise

    # Checkpoints

    def save(self, directory: Any, training: Any = None) -> int:
        """Begins to save the state to ``directory``, and returns its step. The service writes it while training goes on.

        All ranks call it, and later :meth:`saved`. ``training`` is a JSON document of at most 64 KiB that :meth:`load`
        returns, such as the state of a scheduler.
        """
        self.open()
        return self._held.save(directory, training)

    def saved(self) -> int:
        """Waits until all ranks have written what :meth:`save` began, and makes it a checkpoint. Returns its step."""
        self.open()
        return self._held.saved()

    def load(self, directory: Any) -> Any:
        """Loads a checkpoint of any number of ranks, or the newest in a folder. Returns its training document.

        With ``recovery`` the model gets its parameters, too. Otherwise the program loads the model's of the same step.
        """
        self.open()
        training = self._held.load(directory)
        if self._how["recovery"]:
            self._together.publish()
        return training
