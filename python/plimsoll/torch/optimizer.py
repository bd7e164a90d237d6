"""A torch.optim.Optimizer whose state is held and updated by the optimizer service."""

import contextlib
import functools
import math
import operator
import os
import re
import secrets
import sys
import threading
import weakref
from numbers import Real
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type, TypeVar

import torch
import torch.distributed

from plimsoll.errors import PlimsollError
from plimsoll.protocol import Opened
from plimsoll.service import Service, find_program, shared_service
from plimsoll.torch import layout
from plimsoll.torch.layout import Mesh
from plimsoll.torch.entries import Entries, entry_of
from plimsoll.torch.part import Part, Slot
from plimsoll.torch.rounds import Rounds
from plimsoll.torch.samples import Fingerprint
from plimsoll.torch.signals import deferred
from plimsoll.torch.state_dict import check_entries, read_entries, read_entry, take_weights, write_entries
from plimsoll.torch.transfer import transfer_for

_Result = TypeVar("_Result")

_APART_KEY = "plimsoll_state_saved_apart"  # in a state_dict
# What torch's optimizers have and these have not.
_REFUSED = {
    "amsgrad": "it needs a third moment, and the service holds two",
    "differentiable": "autograd cannot follow a step into the service",
}
# Flags of torch, and what they are where a parameter group does not name them.
_FLAGS = {
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
    "maximize": False,
    "amsgrad": False,
    "nesterov": False,
    "decoupled_weight_decay": False,
}
# Arguments that the constructors of torch 2.1 do not have, or check against the devices of parameters.
_UNKNOWN_TO_OLD_TORCH = ("fused", "differentiable", "decoupled_weight_decay")
# The range of fp32, whose smaller numbers the service takes for zeros.
_SMALLEST, _LARGEST = 2.0**-126, torch.finfo(torch.float32).max
_REGROUPED = (
    "when the optimizer was opened, and the state is that of those parameters. Close the optimizer, and make a new one of "
    "the parameters that are to be trained from now on"
)

_APART = "the shards of this job are at different steps: a step was interrupted in between; load the last checkpoint"


def _uninterrupted(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """A method that another thread's is not in the middle of; nor is an interrupt, with several ranks.

    All of these call it. One that was taken out of it would leave the others waiting, and lose its place among them.
    """

    @functools.wraps(method)
    def uninterrupted(self: "Optimizer", *arguments: Any, **options: Any) -> _Result:
        # In inference mode, what is made here and becomes a parameter or its gradient could not be trained any more.
        with torch.inference_mode(False), torch.no_grad():
            with self._lock, deferred() if _is_distributed() else contextlib.nullcontext():
                return method(self, *arguments, **options)

    return uninterrupted


class Optimizer(torch.optim.Optimizer):
    """What the optimizers of this package have in common.

    Nothing is allocated until the first step, or :meth:`open`, or whatever else
    needs the state: until then the model may be moved, converted, wrapped and
    loaded as with an optimizer of torch.

    A parameter that has no gradient at a step is an error, unless
    ``missing_gradients="zero"``: then its gradient counts as zero, so that its
    moments and its weight decay as those of all others, where torch would leave
    it alone.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave gradients scaled, and give its scale to the step.

        Lightning asks the same, and understands by it that gradients cannot be unscaled before: it then clips none, even without
        a scaler. They can: GradScaler tells the step when ``unscale_`` was called. So Lightning hears no, and calls it.
        """
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return not asking.startswith(("lightning.", "lightning_fabric.", "pytorch_lightning."))

    # The optimizer of torch whose constructor checks the hyperparameters, and what torch calls the moments.
    _checks: Type[torch.optim.Optimizer]
    _moments: Tuple[str, ...]
    _moment_formats: Tuple[str, ...] = ("fp32", "bf16")
    _counts_steps = True

    def __init__(
        self,
        params: Any,
        defaults: Dict[str, Any],
        *,
        state: str = "split",
        moments: str = "fp32",
        max_grad_norm: Optional[float] = None,
        process_group: Any = None,
        sharding: Optional[str] = None,
        missing_gradients: str = "refuse",
        gradients: str = "backward",
        model: Optional[torch.nn.Module] = None,
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        job: Optional[str] = None,
        name: Optional[str] = None,
        socket: Optional[str] = None,
    ):
        defaults = self._checked(defaults)
        _choose("state", state, ("split", "fp32"))
        _choose("moments", moments, self._moment_formats)
        _choose("sharding", sharding, (None, "zero1", "zero2"))
        _choose("missing_gradients", missing_gradients, ("refuse", "zero"))
        _choose("gradients", gradients, ("backward", "step"))
        if gradients == "step" and sharding == "zero2":
            raise ValueError(
                "gradients is 'step' and sharding is 'zero2', which sends gradients to their owners in the backward pass: "
                "leave gradients at 'backward', or use sharding='zero1'"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}: expected a number above 0, or None not to clip")
        if name is not None and not re.fullmatch("[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,31}", name):
            raise ValueError(f"name is {name!r}: expected 1 to 32 of a-z A-Z 0-9 . _ -, and no dot at the beginning")
        self._parts: Optional[List[Part]] = None
        self._closed = False
        self._model, self._named = model, list(named_parameters) if named_parameters is not None else None
        self._socket = socket or os.environ.get("PLIMSOLL_SOCKET")
        if self._socket is None:
            find_program()  # which the first step will start
        super().__init__(params, defaults)
        self._state, self._moments_format = state, moments
        self._process_group, self._sharding = process_group, sharding
        self._refuses_missing = missing_gradients == "refuse"
        self._takes_gradients_in_step = gradients == "step"
        self._job = job or os.environ.get("PLIMSOLL_JOB") or "job"
        self._name_in_job = name
        self._service: Optional[Service] = None
        self._lock = threading.RLock()  # hooks run on autograd's threads, one for each device
        self.max_grad_norm = max_grad_norm
        #: Steps that were not made, because gradients were not finite.
        self.skipped = 0
        #: The norm of all gradients at the last step, before clipping; None where it was not asked for.
        self.last_grad_norm: Optional[float] = None
        #: Whether :meth:`state_dict` leaves the state out, as :meth:`save` writes it beside. See plimsoll.transformers.
        self.saves_state_apart = False
        #: What tells the state that a state_dict without one was saved with, until it is loaded.
        self.awaits_state: Optional[str] = None
        self._saved_with: Optional[str] = None
        self._resumed_step = 0
        self._counted = 0  # the step of the other ranks, as this one last heard of it
        self._saving: Optional[Tuple[str, int, str]] = None  # directory, step and identity
        self._saves_in_vain = False  # some ranks may be saving what will be no checkpoint

    # Opening

    @_uninterrupted
    def open(self) -> None:
        """Makes the state from the model's parameters, or attaches to the state that the service has.

        In a job of several ranks all of them call it, or make their first step, at the same time. On the CPU the
        parameters' data become views of shared memory; their values stay. After attaching they are those of the state:
        see :attr:`resumed_step`.

        Raises ServiceError where the state does not fit, among others; TypeError and ValueError for parameters that
        cannot be held.
        """
        if self._parts is None:
            self._open(self._agree)

    def _open_unless_closed(self) -> None:
        """Opens for what needs the state. After :meth:`close` the program must say whether it wants a new one."""
        self._check_not_closed()
        self.open()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise RuntimeError(
                "the optimizer is closed: open() attaches to the state where that is still in a service, and else begins with a new one "
                "(moments of zero); load() and load_state_dict() fill it"
            )

    def _open(self, begin: Callable[[List[Opened]], _Result]) -> _Result:
        """Opens the sessions. ``begin`` makes state and model one; where it fails, the model keeps its parameters.

        It is given what the sessions of all ranks found when they were opened.
        """
        names = layout.names_of(self.param_groups, self._named, self._model)
        layout.refuse_inference(self.param_groups, names)
        layout.refuse_fsdp1((p for g in self.param_groups for p in g["params"]), names)
        mesh = self._mesh(names)
        divided = layout.divide(self.param_groups, names, layout.embeddings_of(self._model), mesh)
        device = self._device()
        self._trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        self._frozen = [(names[p], p) for g in self.param_groups for p in g["params"] if not p.requires_grad]
        self._opened_groups = [list(g["params"]) for g in self.param_groups]
        self._collective = mesh
        self._transfer = transfer_for(device)
        shared = self._transfer.shares and self._sharding is None and not any(map(layout.is_sharded, self._trained))
        parts = [Part(name, pieces, mesh, self._transfer, shared) for name, pieces in sorted(divided.items()) if pieces]
        part_of = {piece.parameter: part for part in parts for piece in part.pieces}
        ours = [p for p in self._trained if p in part_of]
        self._rounds = (
            Rounds(ours, mesh, device, lambda p, has_come: part_of[p].reduce(p, has_come))
            if self._sharding == "zero2"
            else None
        )
        self._hooks: List[Any] = []
        own: List[Service] = []
        self._close = weakref.finalize(self, _let_go, parts, self._hooks, self._transfer, own, os.getpid())

        def open_parts() -> List[Opened]:
            layout.check_memory(self._trained, names)
            first_moments = [self._first_moment(group) for group in self.param_groups]
            path, instance = self._socket, 0
            if path is None:
                self._service, instance = shared_service(self._job)
                own.append(self._service)
                path = self._service.socket
            for part in parts:
                part.first_moments = first_moments
                part.announces = self.max_grad_norm is not None
                part.waits = self._takes_gradients_in_step
                part.open(path, {**self._document(part, mesh), "instance": instance})
            return [p.session.opened for p in parts if p.session]

        def open_anew() -> List[Opened]:
            self._transfer.release()
            for part in parts:
                part.open_anew()
            return [p.session.opened for p in parts if p.session]

        try:
            every = self._on_all_ranks("opening the state", open_parts)
            if any(o.attached and not o.initialized for of_rank in every for o in of_rank):
                # Somebody has died before all were whole.
                every = self._on_all_ranks("opening the state anew", open_anew)
            self._parts = parts
            result = begin([o for of_rank in every for o in of_rank])
        except BaseException:
            self._parts = None
            for part in parts:
                part.give_back_if_new()
            self._close()
            self._service = None
            raise
        self._closed = False
        # With zero1, gradients are whole when all of them are there.
        if self._sharding != "zero1":
            self._hook_all()
        return result

    def _mesh(self, names: Dict[torch.Tensor, str]) -> Mesh:
        trained = [p for g in self.param_groups for p in g["params"]]
        sharded = [p for p in trained if layout.is_sharded(p)]
        if sharded:
            if self._sharding is not None:
                raise ValueError(f"sharding is {self._sharding!r}, and parameters are sharded already (DTensor): leave it None")
            if len({p.device_mesh for p in sharded}) > 1 or not all(layout.is_sharded(p) for p in trained if p.requires_grad):
                raise ValueError(
                    "parameters are of several meshes, or some are DTensors and others are not: give each kind an optimizer of its own"
                )
            return layout.mesh_of(sharded, names)
        distributed = _is_distributed()
        if self._sharding is None:
            group = self._replicas_group() if distributed else None
            if group is None:
                return Mesh()
            replica, replicas = _place_in(group)
            return Mesh(groups=(group,), replica=replica, replicas=replicas)
        if not distributed:
            if self._sharding == "zero2":
                return Mesh()  # gradients leave the model, and go nowhere else
            raise ValueError(
                "sharding is 'zero1', and there is no process group: call torch.distributed.init_process_group first, or leave sharding None"
            )
        group = self._process_group or torch.distributed.group.WORLD
        return Mesh(*_place_in(group), (group,))

    def _replicas_group(self) -> Any:
        """The ranks that hold copies of the whole state, where that is known: without ``sharding`` a group says so, or the model."""
        model = self._model if isinstance(self._model, torch.nn.parallel.DistributedDataParallel) else None
        return self._process_group or getattr(model, "process_group", None)

    def _device(self) -> torch.device:
        devices = {layout.local(p).device for g in self.param_groups for p in g["params"] if p.requires_grad}
        if len(devices) > 1:
            raise ValueError(
                f"parameters are on {', '.join(sorted(map(str, devices)))}: expected one device; give each an optimizer of its own"
            )
        return devices.pop() if devices else torch.device("cpu")

    def _document(self, part: Part, mesh: Mesh) -> Dict[str, Any]:
        # Ranks whose states are copies of each other have a session each.
        rank, world = mesh.number, mesh.size
        if not mesh.groups:
            rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
        document = {
            "schema": "plimsoll.open/1",
            "job": self._job,
            "rank": rank,
            "world": world,
            "local_world": min(world, _number("PLIMSOLL_LOCAL_RANKS", _number("LOCAL_WORLD_SIZE", world))),
            "part": f"{self._name_in_job}.{part.name}" if self._name_in_job else part.name,
            "optimizer": self._rule(self.param_groups[0]),
            "state": self._state if part.name == "bf16" else "fp32",
            "moments": self._moments_format,
            "parameter": part.name,
            "gradient": part.name,
            "groups": len(self.param_groups),
            "parameters": [
                {
                    "name": p.name,
                    "shape": list(p.shape),
                    "group": p.group,
                    "moments": layout.moments_of(p, self._moments_format),
                    "first": p.first,
                    "count": p.count,
                }
                for p in part.own
            ],
        }
        cpus = os.environ.get("PLIMSOLL_OPTIMIZER_CPUS")
        if cpus:
            document["cpus"] = _cpu_list(cpus)
        return document

    def _agree(self, found: List[Opened]) -> None:
        """All parts of all ranks begin at one step: new ones from the model, others as they are."""
        last = max((f.step for f in found), default=0)
        if last and not self._collective.groups and _is_distributed() and torch.distributed.get_world_size() > 1:
            raise PlimsollError(
                f"this rank has found its state at step {last}, and does not hear whether that of the others is: give the optimizer "
                "the ranks that hold the same (process_group=torch.distributed.group.WORLD, or model= wrapped by "
                "DistributedDataParallel), or sharding"
            )
        whole = all(f.initialized for f in found)

        def begin() -> None:
            if any(f.step != last for f in found):
                self._catch_up(last, found)
            for part in self._parts if not whole else ():
                part.initialize()

        self._on_all_ranks("opening the state", begin)
        for part in self._parts:
            part.adopt()
        self._resumed_step = self._counted = last

    def _catch_up(self, last: int, found: Sequence[Opened]) -> None:
        """Makes the last step where it was not made: the job ended between two requests for it.

        Every rank finds the same of all. The first request came when all had prepared the step.
        """
        behind = [f for f in found if f.step != last]
        factors = {f.asked_factor for f in found if f.step == last == f.asked_step}
        if len(factors) != 1 or any(f.step != last - 1 or f.prepared_step != last for f in behind):
            steps = ", ".join(map(str, sorted({f.step for f in found})))
            raise PlimsollError(
                f"the shards of this job are at different steps ({steps}), and the last was not prepared by all; "
                "give the job another name (job=, PLIMSOLL_JOB) or the service another start, and load the last checkpoint"
            )
        for part in self._parts:
            if part.session and part.session.step != last:
                part.session.begun(part.session.begin(min(factors), None, wait=True))

    def _hook_all(self) -> None:
        own, owner = weakref.ref(self), os.getpid()
        for part in self._parts:
            for parameter in {p.parameter for p in part.pieces}:
                if layout.is_offloaded(parameter):
                    continue  # some versions of fully_shard call hooks while the gradient is still on its way to the host

                def hook(parameter: torch.Tensor, part: Part = part) -> None:
                    optimizer = own()
                    if optimizer is None or optimizer._parts is None or os.getpid() != owner:
                        return  # in a forked child, gradients are its own
                    if optimizer._transfer.is_capturing():
                        # The step takes the gradients: when the graph is replayed, no hook runs.
                        if optimizer._rounds is None:
                            return
                        raise RuntimeError(
                            "sharding is 'zero2', which takes gradients away in the backward pass, and this one is captured for a CUDA "
                            "graph: leave it out of the graph, or use sharding='zero1'"
                        )
                    if parameter.grad is None:
                        return  # a hook before this one has made the step with it, and taken it away
                    with optimizer._lock:
                        if optimizer._rounds is None:
                            part.accumulated(parameter)
                        else:
                            part.check_dense(parameter)
                            optimizer._rounds.came(parameter)

                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    @property
    def resumed_step(self) -> int:
        """The step that the state was at when it was attached to or loaded: 0 for a new one.

        Opens the optimizer. A program that may have been restarted asks for it before its first forward pass, and
        goes on with the data of the step after it.
        """
        self._open_unless_closed()
        return self._resumed_step

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a parameter group, as torch does, until the state is there."""
        if self._parts is not None:
            raise RuntimeError(
                "add_param_group: the state is made already, in memory of exactly its size: add all groups before the first step"
            )
        super().add_param_group(param_group)
        try:
            self._check_options(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise

    # Options

    def _checked(self, options: Dict[str, Any]) -> Dict[str, Any]:
        """The options of a parameter group, as torch has them. Raises what torch's constructor raises, and ValueError."""
        if options.get("fused") and options.get("foreach"):
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self._check_flags(options)
        given = {name: value for name, value in options.items() if name not in _UNKNOWN_TO_OLD_TORCH}
        taken = self._checks([torch.zeros(1, device="cpu")], **given).defaults
        options = {**options, **{name: taken[name] for name in given}}
        for name, value in options.items():
            for number in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(number, (Real, torch.Tensor)):
                    _check_number(name, float(number))
        return options

    def _check_options(self, g: int) -> None:
        """Refuses a parameter group that no step could be made of."""
        group = self.param_groups[g]
        try:
            self._checked({name: group[name] for name in self.defaults})
        except ValueError as error:
            raise ValueError(f"parameter group {g}: {error}") from None
        self._check_agreement(self.param_groups)
        for p in group["params"]:
            if p.requires_grad and p.dtype not in layout.TYPES:
                layout.refuse_type(p, layout.names_of(self.param_groups, self._named, self._model)[p])

    def _check_flags(self, group: Dict[str, Any]) -> None:
        for flag, reason in _REFUSED.items():
            if group.get(flag):
                raise ValueError(
                    f"{flag} is {group[flag]}, and there is no {flag} in {type(self).__name__} here: {reason}. Leave it False, or "
                    "give these parameters an optimizer of torch"
                )

    def _check_agreement(self, groups: Sequence[Dict[str, Any]]) -> None:
        """Refuses parameter groups whose steps are of different kinds, or of another kind than the state."""
        for option in ("maximize", "decoupled_weight_decay"):
            if len({bool(group.get(option)) for group in groups}) > 1:
                raise ValueError(
                    f"{option} is True in some parameter groups and False in others: expected one value, as one step is made of all "
                    "groups; give each kind an optimizer of its own (name=)"
                )
        rule = self._rule(groups[0])
        opened = {part.session.document["optimizer"] for part in self._parts or () if part.session}
        if opened - {rule}:
            raise ValueError(
                f"the parameter groups say {rule} now, and the state is one of {opened.pop()}: decoupled_weight_decay was changed. "
                "Give it to the constructor"
            )

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Takes parameter groups from a state_dict, which an older release of torch may have saved."""
        for group in state["param_groups"]:
            for flag, value in _FLAGS.items():
                if flag in self.defaults:
                    group.setdefault(flag, value)
            self._check_flags(group)
        self._check_agreement(state["param_groups"])
        super().__setstate__(state)

    # Steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``sharding="zero2"`` it discards the gradients that have gone to their owners."""
        super().zero_grad(set_to_none)
        if self._parts is not None and self._rounds is not None:
            with self._lock:
                self._rounds.discard()
                self._forget()

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Makes a step, and returns what ``closure`` returned.

        Gradients are clipped to ``max_grad_norm``; where they are not finite the step is skipped and counted in
        :attr:`skipped`. Without any gradient nothing happens. Raises RuntimeError for a parameter without one.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step: a CUDA graph is being captured, and the service makes steps outside of any: capture forward and backward pass alone"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        except BaseException:
            # GradScaler takes them away only after a step that succeeds, and multiplies its scale with one that is there.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise
        return loss

    def _open_for_step(self) -> None:
        if self._parts is not None:
            return
        if self._sharding == "zero2" and not self._closed:
            raise RuntimeError(
                "sharding is 'zero2': call optimizer.open() before the first backward pass, from which gradients go to their owners"
            )
        self._open_unless_closed()
        if self._resumed_step > 0:
            raise RuntimeError(
                f"the service has the state of step {self._resumed_step} of job {self._job}, and these gradients were computed without it: "
                "read optimizer.resumed_step before the first forward pass and go on from there, or give the job another name"
            )

    def _check_gradients(self) -> bool:
        """Whether there are gradients. Raises where some are missing that must not."""
        self._check_groups()
        for part in self._parts:
            part.check()
        thawed = sorted(name for name, p in self._frozen if p.requires_grad and p.grad is not None)
        if thawed:
            raise RuntimeError(
                f"{len(thawed)} parameters have a gradient and were frozen when the optimizer was opened, {thawed[0]} among them: there is no state "
                "for them. Close it, and make a new one of all that are trained now; state_dict() takes the state of the others along"
            )
        # All ranks must find the same, whatever shards they have.
        given = {p for p in self._trained if p.grad is not None}
        if not given and not (self._rounds is not None and self._rounds.own):
            return False
        having = given if self._rounds is None else self._rounds.all
        names = sorted({x.name for part in self._parts for x in part.pieces if x.parameter not in having})
        if names and self._refuses_missing:
            raise RuntimeError(
                f"{len(names)} parameters have no gradient, {names[0]} among them: every step updates all parameters. Freeze them before the "
                "optimizer is made (requires_grad_(False)), or count their gradients as zero (missing_gradients='zero'), which lets their "
                "moments and weights decay"
            )
        return True

    @_uninterrupted
    def _step(self) -> None:
        self._check_awaited()
        self._open_for_step()
        if self._transfer.is_capturing():
            raise RuntimeError(
                "optimizer.step() was called while a CUDA graph is captured: the update is made on the host, and is no part of a graph; "
                "capture forward and backward pass alone, and call step() after each replay()"
            )
        numbers: Optional[Dict[Part, Any]] = None
        scale, squares, failure, fingerprint = 1.0, 0.0, None, Fingerprint()
        try:
            if self._rounds is not None:
                self._rounds.finish()
            scale = self._scale()
            if self._check_gradients():
                numbers = self._prepare()
                squares = self._squares()
                fingerprint = self._fingerprint()
        except Exception as error:
            failure = error
        squares = self._sum_over_ranks(squares, scale, numbers is not None, failure, fingerprint)
        if numbers is None:
            return
        factor = self._factor(squares, scale)
        if factor is None:
            self.skipped += 1
        else:
            self._make(factor, numbers)
        self._forget()

    def _prepare(self) -> Dict[Part, Any]:
        """Brings all gradients to the shards. What each of these is to be sent with the step."""
        self._check_steps()
        take_weights(self._parts)
        anew = self._takes_gradients_in_step or self._was_unscaled()
        for part in self._parts:
            part.collect(self._rounds is not None, anew)
        parts = [p for p in self._parts if p.session]
        numbers: Dict[Part, Any] = dict.fromkeys(parts, self._numbers())
        if len(parts) > 1 or self._collective.groups:
            # A step of several shards is one of all or of none: see the protocol.
            for part in parts:
                part.session.prepare(numbers[part])
            numbers = dict.fromkeys(parts)
        return numbers

    def _make(self, factor: float, numbers: Dict[Part, Any]) -> None:
        """Makes the step of every shard, and brings the parameters of all into the model. Also where it is interrupted."""
        step = self._counted = 1 + self._step_number()
        for part in self._parts:
            part.will_change()

        def make(parts: List[Part]) -> None:
            for part in numbers:
                part.session.drain()
            rest = [p for p in numbers if p.session.step < step]
            begun = [(p.session, p.session.begin(factor, numbers[p], wait=p.shared)) for p in rest]
            for session, request in begun:
                session.begun(request)
            for part in parts:
                part.pull(after_step=True)

        try:
            make(self._parts)
        except KeyboardInterrupt:
            # Other ranks send what they have once.
            make([p for p in self._parts if not p.gathers()])
            raise

    def _check_groups(self) -> None:
        """Refuses parameter groups that have other parameters than when the state was made."""
        if len(self.param_groups) != len(self._opened_groups):
            raise RuntimeError(
                f"there are {len(self.param_groups)} parameter groups; there were {len(self._opened_groups)} {_REGROUPED}"
            )
        for g, (group, opened) in enumerate(zip(self.param_groups, self._opened_groups)):
            if len(group["params"]) != len(opened) or any(map(operator.is_not, group["params"], opened)):
                raise RuntimeError(f"parameter group {g} has not the parameters that it had {_REGROUPED}")

    def _check_steps(self) -> None:
        """Refuses to go on where a step was interrupted between two parts, or a load."""
        for part in self._parts:
            if part.session:
                part.session.drain()
                if not part.session.initialized:
                    raise PlimsollError(
                        f"the {part.name} state of a checkpoint was loaded, and that of others was not: load again before anything else"
                    )
        steps = {p.name: p.session.step for p in self._parts if p.session}
        if len(set(steps.values())) > 1:
            found = ", ".join(f"{name}: {step}" for name, step in steps.items())
            raise PlimsollError(
                f"the parameters are at different steps ({found}): a step was interrupted in between; load the last checkpoint"
            )

    def _scale(self) -> float:
        """What the loss was multiplied by."""
        tensor = getattr(self, "grad_scale", None)
        scale = 1.0 if tensor is None else float(tensor)
        if not _SMALLEST / 2 <= scale <= 1 / _SMALLEST:
            raise ValueError(
                f"the scale of the GradScaler is {scale:g}: expected {_SMALLEST / 2:.3g} to {1 / _SMALLEST:.3g}, by which fp32 can divide; "
                "a scale falls that far where gradients are never finite"
            )
        return scale

    def _was_unscaled(self) -> bool:
        """Whether GradScaler.unscale_ has divided the gradients in place: its operator counts no version of them."""
        return getattr(self, "found_inf", None) is not None and getattr(self, "grad_scale", None) is None

    def _asks_norm(self) -> bool:
        return self.max_grad_norm is not None or getattr(self, "found_inf", None) is not None

    def _squares(self) -> float:
        """The sum of the squares of this rank's gradients, 0 where nobody asks for it. Not finite where they are not."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and self._rounds is not None:
            raise RuntimeError(
                "sharding is 'zero2', whose gradients a GradScaler cannot see: use bfloat16, or sharding='zero1'"
            )
        sessions = [p.session for p in self._parts if p.session]
        squares = 0.0
        if self._asks_norm():
            asked = [(session, session.norm()) for session in sessions]
            squares = sum(session.norm_result(request) for session, request in asked)
        for session in sessions:
            session.drain()  # what was prepared is
        if found_inf is not None and float(found_inf) != 0:
            return math.inf
        if self._collective.replica and math.isfinite(squares):
            return 0.0  # replicas have the same gradients, and the first counts them
        return squares

    def _factor(self, squares: float, scale: float) -> Optional[float]:
        """What gradients are multiplied by; None where they are not finite."""
        self.last_grad_norm, clip = None, 1.0
        if self._asks_norm():
            self.last_grad_norm = norm = math.sqrt(squares) / scale
            if not math.isfinite(norm):
                return None
            if self.max_grad_norm is not None:
                clip = min(1.0, self.max_grad_norm / (norm + 1e-6))
        factor = clip / scale
        if factor < _SMALLEST:
            self._discard_gradients()
            raise ValueError(
                f"the norm of all gradients is {self.last_grad_norm:g}, and max_grad_norm is {self.max_grad_norm:g}: fp32 cannot hold the "
                f"factor {factor:g} that clips them; give a larger max_grad_norm, or look for what makes gradients so large"
            )
        return -factor if self.param_groups[0].get("maximize") else factor

    def _fingerprint(self) -> Fingerprint:
        """What this rank's gradients are like, where those of all ranks must be the same: nobody averages them here."""
        if not self._collective.groups or self._rounds is not None or any(map(layout.is_sharded, self._trained)):
            return Fingerprint()
        return Fingerprint.of([piece for part in self._parts for piece in part.pieces])

    def _sum_over_ranks(
        self, squares: float, scale: float, has_gradients: bool, failure: Optional[Exception], fingerprint: Fingerprint
    ) -> float:
        """The sum of the squares of every rank. When it is there, all shards have prepared the step.

        Refuses the step on all ranks where one has failed, where not all have gradients, where their shards are not all
        at the same step, where their losses had different scales, or where gradients differ that were to be averaged.
        """
        if not self._collective.groups:
            if failure is not None:
                raise failure
            return squares
        steps = [float(p.session.step) for p in self._parts if p.session]
        sums = [squares, failure is not None, has_gradients, len(steps), sum(steps), sum(s * s for s in steps), scale, scale**2]
        total = torch.tensor(sums + fingerprint.to_add_up(), dtype=torch.float64, device=self._device())
        try:
            self._reduce(total)
        except Exception as error:
            # Others may have the sum, and make the step: what was prepared here stays, for this rank to catch up.
            raise failure or error
        squares, failures, having, count, of_steps, of_squares, of_scales, of_scale_squares, *prints = total.tolist()
        try:
            if failures:
                self._on_all_ranks(f"step {self._step_number() + 1}", lambda: _raise(failure))
            if 0 < having < self._collective.size:
                raise PlimsollError(
                    f"{having:.0f} of {self._collective.size} ranks have gradients, and {'this one' if has_gradients else 'not this one'}: "
                    "expected all or none; call backward on every rank before the step"
                )
            if count * of_squares != of_steps * of_steps:
                raise PlimsollError(_APART)
            if self._collective.size * of_scale_squares > of_scales * of_scales * (1 + 1e-9):  # which allows for rounding
                raise PlimsollError(
                    f"the GradScalers of the ranks have different scales, {scale:g} here: gradients were not finite on some ranks only, or "
                    "the first scales differ; give all ranks one scale (scaler.update(new_scale)), and gradients that are averaged"
                )
            if having and Fingerprint.differ(prints, self._collective.size):
                raise PlimsollError(
                    "the gradients of the ranks differ, and nobody has averaged them: wrap the model in DistributedDataParallel, leave its "
                    "no_sync() for the last backward pass before a step, or use sharding='zero2', which averages them itself"
                )
        except Exception:
            self._discard_gradients()
            raise
        if having:
            self._counted = int(of_steps / count)
        return squares

    def _discard_gradients(self) -> None:
        """Takes back what was prepared: these gradients are of no step."""
        self._forget()
        for part in self._parts:
            if part.session:
                # By a request that changes no gradient: after an interrupt it is sent again, and others may be there.
                with contextlib.suppress(PlimsollError):  # what has failed is being raised
                    part.session.ready(0, 1)
                    part.session.drain()

    def _forget(self) -> None:
        """The next gradients are those of another step."""
        if self._rounds is not None:
            self._rounds.over()
        for part in self._parts:
            part.forget()

    def _on_all_ranks(self, what: str, act: Callable[[], _Result]) -> List[_Result]:
        """What ``act`` returns on each rank. Where it fails on one it fails on all, so that none waits for one that has given up."""
        result, failure = None, None
        try:
            result = act()
        except Exception as error:
            failure = error
        try:
            every = self._gather([(result, None if failure is None else f"{type(failure).__name__}: {failure}")])
        except Exception:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(every) if text is not None]
        if failures:
            raise PlimsollError(f"{what} failed on {len(failures)} of {len(every)} ranks: {'; '.join(failures)}")
        return [result for result, _ in every]

    def _gather(self, own: List[Any]) -> List[Any]:
        """What all ranks have, in their order."""
        for group in self._collective.groups:
            every: List[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(every, own, group=group)
            own = [x for of_rank in every for x in of_rank]
        return own

    def _reduce(self, total: torch.Tensor) -> None:
        """Adds up over all ranks. The replicas hear the same bits where all but one have added zeros."""
        for group in self._collective.groups:
            torch.distributed.all_reduce(total, group=group)

    def _numbers(self) -> List[Sequence[float]]:
        for group in self.param_groups:
            self._check_flags(group)
        self._check_agreement(self.param_groups)
        return [[float(x) for x in self._hyperparameters(group)] for group in self.param_groups]

    def _rule(self, group: Dict[str, Any]) -> str:
        """What the protocol calls the optimizer that a group has."""
        raise NotImplementedError

    def _hyperparameters(self, group: Dict[str, Any]) -> Sequence[float]:
        """The seven numbers of a group in a step, as the protocol orders them."""
        raise NotImplementedError

    def _first_moment(self, group: Dict[str, Any]) -> float:
        """What the first moment begins with."""
        return 0.0

    # State

    @property
    def state(self) -> Entries:  # type: ignore[override]
        """The state of each parameter, fetched from the service when it is looked at: ``optimizer.state[p]["exp_avg"]``.

        It is for reading: what would write to it raises RuntimeError.
        """
        return self._entries

    @state.setter
    def state(self, value: Any) -> None:
        if "_entries" in self.__dict__:
            raise RuntimeError(
                "optimizer.state cannot be set: the state is the service's. Use optimizer.load_state_dict, or make a new optimizer "
                "to begin with moments of zero"
            )
        self._entries = Entries(self)  # torch's constructor sets it first

    def _has_state(self) -> bool:
        return self._parts is not None and self._step_number() > 0

    def _readers(self) -> Dict[torch.Tensor, Callable[[], Any]]:
        """The parameters whose state is here, and what reads it."""
        if not self._has_state() or self._sharding is not None:
            return {}

        def reader(part: Part, slot: Slot) -> Callable[[], Any]:
            return lambda: entry_of(read_entry(part, slot, self._moments, self._counts_steps))

        return {p: reader(part, slot) for part in self._parts for p, slot in part.slots.items()}

    def _refuse_where_divided(self) -> None:
        if self._sharding is not None:
            raise RuntimeError(
                f"sharding is {self._sharding!r}, and no rank has the whole state: save it with optimizer.save(directory)"
            )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} of plimsoll is not copied or pickled: its state is the service's, and its parameters are the model's. "
            "Copy the model, make an optimizer of it, and load this one's state_dict() there"
        )

    @_uninterrupted
    def state_dict(self) -> Dict[str, Any]:
        """The state in torch's format, as fp32 tensors on the CPU: 8 bytes a parameter and more.

        Parameters in 16 bits have ``master_weights`` beside torch's entries. Before anything was opened there is no
        state, as in torch. Raises RuntimeError with ``sharding``: no rank has it all; use :meth:`save`.
        """
        if self.saves_state_apart:
            self._saved_with = secrets.token_hex(16)
            with self.state.showing({}):
                return {**super().state_dict(), _APART_KEY: self._saved_with}
        if self._parts is None:
            self._check_not_closed()
            return super().state_dict()
        self._refuse_where_divided()
        self._check_groups()
        entries: Dict[torch.Tensor, Any] = {}
        if self._step_number():
            self._check_steps()
            take_weights(self._parts)
            entries = read_entries(self._parts, self._moments, self._counts_steps)
        with self.state.showing(entries):
            return super().state_dict()

    @_uninterrupted
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes a state from :meth:`state_dict`, or from the optimizer of torch with this one's name.

        Opens the optimizer where there is any state. With ``sharding`` every rank gives the whole. Raises ValueError
        where shapes, names or steps do not fit, and PlimsollError where they do not on another rank: then nothing has
        changed.
        """
        load, entries = super().load_state_dict, state_dict.get("state", {})
        apart = state_dict.get(_APART_KEY)
        if apart is not None:
            load({**state_dict, "state": {}})
            self.awaits_state = apart
            return
        if self._parts is None and not entries:
            load(state_dict)
            return
        self.open()
        groups, given = self.param_groups, {}

        def fit() -> int:
            self._check_groups()
            load({**state_dict, "state": {}})
            ids = [i for g in state_dict["param_groups"] for i in g["params"]]
            parameters = [p for g in self.param_groups for p in g["params"]]
            trained = set(self._trained)  # others may be at other steps, since they were frozen
            given.update((p, entries.get(i)) for i, p in zip(ids, parameters) if p in trained)
            return check_entries(self._parts, self._moments, self._counts_steps, given)

        try:
            steps = self._on_all_ranks("load_state_dict", fit)
            if len(set(steps)) > 1:
                raise PlimsollError(f"load_state_dict: the ranks have states of different steps, {steps}: give all ranks one")
        except Exception:
            self.param_groups = groups
            raise
        for part in self._parts:
            part.will_change()
        self._on_all_ranks("load_state_dict", lambda: write_entries(self._parts, self._moments, given))
        self._on_all_ranks("load_state_dict", lambda: self._set_step(steps[0]))
        self._resumed_step = self._counted = steps[0]
        self.awaits_state = None
        for part in self._parts:
            part.pull(after_step=False)

    def _set_step(self, step: int) -> None:
        """Says that the state is that of the step, when all parts of all ranks are: else they are a mixture, which one of them tells."""
        for part in self._parts:
            if part.session:
                part.session.set_step(step)

    def _step_number(self) -> int:
        return max((p.session.step for p in self._parts if p.session), default=self._counted)

    # Checkpoints

    def saved_with(self) -> Optional[str]:
        """What tells the last state_dict without a state from any other, on all ranks that of the first."""
        self.open()
        return self._gather([self._saved_with])[0]

    def _check_awaited(self) -> None:
        if self.awaits_state is not None:
            raise RuntimeError(
                "this optimizer has loaded a state_dict that plimsoll.transformers.CheckpointCallback has saved, whose state is in the folder "
                "plimsoll beside it: give the Trainer that callback, or call optimizer.load(folder)"
            )

    @_uninterrupted
    def save(self, directory: Any, training: Any = None) -> int:
        """Begins to save the state to ``directory``, in the background; training may go on. The step that is saved.

        All ranks call it, and later :meth:`saved`. ``training`` is a JSON document of at most 64 KiB that :meth:`load`
        gives back, such as the state of a scheduler.
        """
        self._check_awaited()
        self._open_unless_closed()
        if not self._collective.groups and _number("WORLD_SIZE", 1) > 1:
            raise RuntimeError(
                "every rank has all of the state, and does not hear of the others: save needs these (process_group=), or sharding, or one rank alone"
            )
        directory = os.path.abspath(directory)  # wherever the program goes meanwhile
        mesh, sessions = self._collective, [p.session for p in self._parts if p.session]
        if self._saves_in_vain:
            for session in sessions:
                with contextlib.suppress(PlimsollError):  # which nobody has asked for
                    session.saved()
        self._saving, self._saves_in_vain = None, True
        identity = self._gather([secrets.token_hex(16)])[0]  # the first rank's, for the files of all

        def begin() -> List[int]:
            self._check_groups()
            self._check_steps()
            take_weights(self._parts)
            os.makedirs(directory, exist_ok=True)
            of_all = mesh.replica, mesh.replicas
            return [session.save(directory, training, *of_all, identity=identity) for session in sessions]

        begun = self._on_all_ranks(f"saving to {directory}", begin)
        steps = {step for of_rank in begun for step in of_rank}
        if len(steps) > 1:
            raise PlimsollError(_APART)
        step = steps.pop()
        self._saving, self._saves_in_vain = (directory, step, identity), False
        return step

    @_uninterrupted
    def saved(self) -> int:
        """Waits until all ranks have written what :meth:`save` began, and makes it a checkpoint. Its step.

        Raises ServiceError where a file could not be written, PlimsollError where another rank failed, or where the
        service was started again meanwhile: then call save again.
        """
        self._check_not_closed()
        if self._saving is None:
            raise RuntimeError("saved: nothing is being saved: call save first")
        (directory, step, identity), self._saving = self._saving, None
        sessions = [p.session for p in self._parts if p.session]
        saves = f"saving step {step} to {directory}"

        def wait() -> bool:
            # All are asked, whatever the first says: the next save begins anew.
            found, failure = [], None
            for session in sessions:
                try:
                    found.append(session.saved())
                except PlimsollError as error:
                    failure = error
            if failure is not None:
                raise failure
            if any(f != step for f in found):
                raise PlimsollError(
                    f"step {step} was not saved to {directory}: the service was started again while it was; call save again"
                )
            return bool(sessions)

        def commit() -> None:
            # Of a model that has not enough for all ranks, the first may have nothing.
            if self._collective.number == having.index(True):
                without = [rank for rank, has in enumerate(having) if not has]
                sessions[0].commit(directory, step, without, identity=identity)

        having = self._on_all_ranks(saves, wait)
        self._on_all_ranks(saves, commit)
        return step

    @_uninterrupted
    def load(self, directory: Any) -> Any:
        """Loads a checkpoint, or the newest in a folder of them, into the state and the model. Its training document.

        All ranks call it. See :attr:`resumed_step` for the step. An optimizer that was not opened need not be, and is
        not filled from the model first. A rank without any state gets the document of another. Where it fails on one
        rank it fails on all, and the states of some may have been overwritten: then steps are refused until all have loaded.
        """
        if self._parts is None:
            return self._open(lambda opened: self._load(directory))
        return self._load(directory)

    def _load(self, directory: Any) -> Any:
        sessions = [p.session for p in self._parts if p.session]
        several = len(sessions) > 1 or bool(self._collective.groups)
        loads = f"loading {directory}"
        for part in self._parts:
            part.will_change()
        every = self._on_all_ranks(loads, lambda: [s.load(os.fspath(directory), several=several) for s in sessions])
        loaded = [x for of_rank in every for x in of_rank]
        steps = {step for step, _ in loaded}
        if len(steps) > 1:
            raise PlimsollError(
                f"the ranks or parts have loaded different steps from {directory}: {', '.join(map(str, sorted(steps)))}; "
                "load one checkpoint by its name, such as step-00000300"
            )
        own = every[self._collective.number]
        step, training = own[0] if own else loaded[0]
        if several:
            self._on_all_ranks(loads, lambda: self._set_step(step))
        self._resumed_step = self._counted = step
        self.awaits_state = None
        for part in self._parts:
            part.adopt()
        return training

    def close(self, *, give_back: bool = False) -> None:
        """Ends the sessions. State in a service that is not this process's own stays, unless it is given back.

        Parameters keep their values. Afterwards :meth:`open`, :meth:`load` or :meth:`load_state_dict` open the optimizer
        again. All else that needs the state raises RuntimeError, so that no training goes on with a new state by accident.
        """
        if self._parts is None:
            return
        for part in self._parts:
            if self._service is None and not give_back:
                part.depart()
            if part.session:
                # A service of this process's own may have other optimizers, which need the memory.
                part.session.close(give_back=give_back or self._service is not None)
        self._close()
        self._parts, self._closed, self._saving = None, True, None
        self._service = None


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _place_in(group: Any) -> Tuple[int, int]:
    """This rank's number in a process group, and how many there are."""
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"process_group is one of other ranks than this, {torch.distributed.get_rank()}: expected that of the ranks which train these parameters"
        )
    return rank, torch.distributed.get_world_size(group)


def _raise(failure: Optional[Exception]) -> None:
    if failure is not None:
        raise failure


def _let_go(parts: List[Part], hooks: List[Any], transfer: Any, own: List[Service], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has nothing to let go of
    for hook in hooks:
        hook.remove()  # the model would hold the parts, and all that they have mapped
    with contextlib.suppress(RuntimeError):  # of a device that has failed: who called may be raising that
        transfer.release()
    for part in parts:
        if part.session:
            if any(service.process.poll() is None for service in own):
                with contextlib.suppress(PlimsollError, OSError):  # nobody waits for this
                    part.session.close(give_back=True)  # who else is in the service needs the memory
            part.session.abandon()


def _choose(name: str, value: Any, among: Sequence[Any]) -> None:
    if value not in among:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(map(repr, among))}")


def _check_number(name: str, value: float) -> None:
    """Refuses a hyperparameter that is no number in fp32, in which the service makes steps."""
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{name} is {value:g}: steps are made in fp32: expected a magnitude of at most {_LARGEST:.3g}")
    if name == "eps" and 0 < value < _SMALLEST:
        raise ValueError(f"eps is {value:g}: steps are made in fp32: expected 0, or at least {_SMALLEST:.3g}")


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "").strip()
    if not text:
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the variable {variable} is {text!r}: expected a whole number") from None


def _cpu_list(text: str) -> List[int]:
    """The CPUs in a list such as "0-3,8"."""
    cpus: List[int] = []
    try:
        for stretch in text.split(","):
            first, _, last = stretch.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ValueError(f"the variable PLIMSOLL_OPTIMIZER_CPUS is {text!r}: expected a list such as 0-3,8") from None
    return cpus
