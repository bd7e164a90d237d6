"""For Megatron-LM, and programs above megatron-core: the optimizer service in the place of ``--optimizer-cpu-offload``.

megatron-core's HybridDeviceOptimizer holds a copy of all weights, their gradients and their moments on the host, in fp32.
:func:`install` puts a class of the same interface in its place, whose state the optimizer service holds: 14 bytes a bf16
parameter.
"""

import collections
import collections.abc
import inspect
import itertools
import os
import tempfile
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple

import torch

try:
    import megatron.core.optimizer as factory
    from megatron.core import __version__ as megatron_version
    from megatron.core.fp8_utils import is_float8tensor
    from megatron.core.optimizer import cpu_offloading, distrib_optimizer
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "megatron":
        raise
    raise ModuleNotFoundError(
        "plimsoll.megatron needs megatron-core, which is not installed: pip install megatron-core", name="megatron"
    ) from None

from plimsoll import protocol
from plimsoll.errors import PlimsollError
from plimsoll.torch import AdamW
from plimsoll.torch.shard import Shard
from plimsoll.torch.slot import Slot

__all__ = ["ServiceOptimizer", "install", "resume"]

_BUILD = "_get_megatron_optimizer_based_on_param_groups"
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
_numbers = itertools.count()  # of the optimizers of this process
_STREAMS = {"exp_avg": protocol.FIRST_MOMENT, "exp_avg_sq": protocol.SECOND_MOMENT, "master_param": protocol.MASTER_WEIGHTS}


class ServiceOptimizer(HybridDeviceOptimizer):
    """AdamW with the interface of HybridDeviceOptimizer. The optimizer service holds and updates the state.

    megatron-core makes one of the model's parameters, and then another of this rank's shards of them. Neither has a
    state before the first step, or before a checkpoint asks for it.
    """

    def __init__(self, params: Any, **defaults: Any):
        # Not the constructor of HybridDeviceOptimizer, which copies all parameters to the host.
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.inner_param_to_orig_param: Dict[torch.Tensor, torch.Tensor] = {}  # of the sub-optimizers, which there are none of
        self._states = _States(self)
        self._options: Dict[str, Any] = {}
        self._names: Dict[torch.Tensor, str] = {}
        self._gradients: Dict[torch.Tensor, torch.dtype] = {}  # types in which they are held
        self._held: Optional[AdamW] = None
        self._slots: Dict[torch.Tensor, Tuple[Shard, Slot]] = {}
        self._scratch: Optional[str] = None  # a folder for copies of the state
        self._written = False  # whether the state has been written since the service heard of a step
        self._step = 0  # of what was written

    def serve(self, of_shards: Dict[torch.Tensor, Tuple[str, torch.Tensor]], options: Dict[str, Any]) -> None:
        """Prepares the optimizer of the shards: the name and the parameter of each, and options of
        :class:`plimsoll.torch.AdamW`. With the option ``gradients="bf16"`` gradients of bf16 parameters are rounded on
        their way to the host. Otherwise they have the type that megatron-core has added them up in.
        """
        self._options = dict(options)
        rounds = self._options.pop("gradients", None) == "bf16"
        self._scratch = self._options.pop("scratch", None)
        self._names = {shard: name for shard, (name, _) in of_shards.items()}
        self._gradients = {s: p.main_grad.dtype for s, (_, p) in of_shards.items() if not (rounds and s.dtype is torch.bfloat16)}
        self._held = self._new()

    # What holds the state

    def _new(self) -> AdamW:
        # A shard is a view of a parameter that autograd knows. What is trained here is another tensor of the same memory.
        groups, named = [], []
        for group in self.param_groups:
            own = [self._held_parameter(shard) for shard in group["params"]]
            groups.append({"params": own, **{key: group[key] for key in _HYPERPARAMETERS}})
            named += [(self._names[shard], p) for shard, p in zip(group["params"], own)]
        return AdamW(
            groups,
            sharding="local",
            gradients="step",
            missing_gradients="refuse",
            named_parameters=named,
            **self._options,
        )

    def _held_parameter(self, shard: torch.Tensor) -> torch.Tensor:
        held, dtype = shard.detach().requires_grad_(), self._gradients.get(shard)
        if dtype is not None and hasattr(held, "grad_dtype"):  # in late releases of torch
            held.grad_dtype = dtype
        return held

    @property
    def _service(self) -> AdamW:
        if self._held is None:
            raise RuntimeError(
                "this optimizer has no state: megatron-core made it of the model's parameters, before the distributed optimizer "
                "had shards of them; use the one that get_megatron_optimizer returned"
            )
        return self._held

    def _pairs(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        """The shards of megatron-core, and the parameters of the service's optimizer in the same memory."""
        for group, held in zip(self.param_groups, self._service.param_groups):
            yield from zip(group["params"], held["params"])

    def open(self) -> None:
        """Makes the state, or attaches to the one that the service has. All ranks call it together."""
        self._service.open()
        if not self._slots:
            of_held = {p: (shard, slot) for shard in self._service._shards for p, slot in shard.slots.items()}
            self._slots = {shard: of_held[held] for shard, held in self._pairs()}

    @property
    def _is_open(self) -> bool:
        return self._service._shards is not None

    @property
    def resumed_step(self) -> int:
        """The step of the state that the service had when it was opened: 0 for a new one."""
        self.open()
        return self._service.resumed_step

    def close(self) -> None:
        """Ends the sessions of the service. The parameters keep their values."""
        if self._held is not None:
            self._settle()
            self._held.close()
            self._slots = {}

    # Steps

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> None:
        """Makes a step of the gradients that megatron-core has reduced, unscaled and clipped."""
        self._settle()
        for group, held in zip(self.param_groups, self._service.param_groups):
            held.update((key, group[key]) for key in _HYPERPARAMETERS)
        pairs = list(self._pairs())
        try:
            for shard, held in pairs:
                held.grad = _gradient(shard, held)
            self._service.step()
        finally:
            for _, held in pairs:
                held.grad = None  # it is a part of megatron-core's buffer

    def dummy_step(self) -> None:
        """Makes the state that a checkpoint is loaded into. HybridDeviceOptimizer makes a step of random gradients."""
        self.open()

    @property
    def sub_optimizers(self) -> List[torch.optim.Optimizer]:
        """None, so programs that move the states of sub-optimizers between devices move nothing."""
        return []

    # The state

    @property
    def state(self) -> "_States":  # type: ignore[override]
        return self._states

    @state.setter
    def state(self, value: Any) -> None:
        if value:
            raise RuntimeError("optimizer.state cannot be set: the optimizer service holds the state; set optimizer.state[p][name]")

    def current_step(self) -> int:
        if self._written:
            return self._step
        return self._service._shards.step if self._is_open else 0

    def set_current_step(self, step: int) -> None:
        if step != self.current_step():
            self.open()
            self._step, self._written = step, True

    def read(self, shard: torch.Tensor, name: str) -> torch.Tensor:
        self.open()
        session, piece = self._slots[shard][0].session, self._slots[shard][1].piece
        values = torch.from_numpy(session.read(_STREAMS[name], piece.offset, piece.count))
        return (values if self._scratch is None else _in_file(values, self._scratch)).view(shard.shape)

    def write(self, shard: torch.Tensor, name: str, values: torch.Tensor) -> None:
        step = self.current_step()
        self.open()
        session, piece = self._slots[shard][0].session, self._slots[shard][1].piece
        if values.numel() != piece.count:
            raise ValueError(f"{name} of {piece.name} has {values.numel()} elements: expected {piece.count}")
        session.write(_STREAMS[name], piece.offset, values.detach().reshape(-1).to("cpu", torch.float32).numpy())
        self._step, self._written = step, True

    def _settle(self) -> None:
        """Tells the service that the state is whole again, and brings its weights into the model."""
        if not self._written:
            return
        shards = self._service._shards
        for session in shards.sessions:
            session.set_step(self._step)
        shards.adopt(self._step)
        self._written = False

    def state_dict(self) -> Dict[str, Any]:
        """Parameter groups, and entries that fetch the state where they are read."""
        result = super().state_dict()
        for group in result["param_groups"]:
            # HybridDeviceOptimizer keeps classes in its groups, and torch.load refuses to make those of a checkpoint.
            for name in [name for name, value in group.items() if isinstance(value, type)]:
                del group[name]
            group["step"] = self.current_step()
        return result

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes the parameter groups. The state comes by ``state[p][name]``, as megatron-core loads it."""
        given = state_dict["param_groups"]
        if [len(g["params"]) for g in given] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the parameter groups of the state_dict do not have the parameters of this optimizer's")
        for group in given:
            if group.get("step") is not None:
                self.set_current_step(int(group["step"]))
        for own, group in zip(self.param_groups, given):
            own.update((k, v) for k, v in group.items() if k not in ("params", "step") and not isinstance(v, type))

    def update_fp32_param_by_new_param(self) -> None:
        """Makes the model's parameters the master weights, as megatron-core does after it has loaded a model alone."""
        if self._is_open:  # else the state will be made of the parameters
            for shard, held in self._pairs():
                self.write(shard, "master_param", held)
            self._settle()

    # HybridDeviceOptimizer has its state twice. This has it once.

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        self._settle()

    def _sync_sub_optimizers_state_to_hdo(self) -> None:
        pass

    def _sync_hdo_param_groups_to_sub_optimizers(self) -> None:
        pass


def _in_file(values: torch.Tensor, folder: str) -> torch.Tensor:
    """The same numbers in a file that has no name any more: the kernel writes them out where memory is short."""
    descriptor, path = tempfile.mkstemp(prefix="plimsoll-", dir=folder)
    os.close(descriptor)
    try:
        copy = torch.from_file(path, shared=True, size=values.numel(), dtype=values.dtype)
    finally:
        os.unlink(path)
    return copy.copy_(values)


def _gradient(shard: torch.Tensor, held: torch.Tensor) -> Optional[torch.Tensor]:
    """The gradient of a shard, in the type that ``held.grad`` takes."""
    gradient = getattr(shard, "decoupled_grad", None)
    return None if gradient is None else gradient.to(getattr(held, "grad_dtype", None) or held.dtype)


class _States(collections.abc.MutableMapping):
    """The entries of all shards, by shard. They are always there: the first that is read or written makes the state."""

    def __init__(self, optimizer: ServiceOptimizer):
        self._optimizer = optimizer

    def __getitem__(self, shard: torch.Tensor) -> "_Entry":
        return _Entry(self._optimizer, shard)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (shard for group in self._optimizer.param_groups for shard in group["params"])

    def __len__(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)

    def __setitem__(self, shard: torch.Tensor, entry: Any) -> NoReturn:
        raise RuntimeError("optimizer.state[p] cannot be set: the optimizer service holds the state; set optimizer.state[p][name]")

    def __delitem__(self, shard: torch.Tensor) -> NoReturn:
        raise RuntimeError("optimizer.state[p] cannot be removed: the optimizer service holds the state")


class _Entry(collections.abc.MutableMapping):
    """The state of a shard: what is read is a copy, and what is set is written into the service's state."""

    def __init__(self, optimizer: ServiceOptimizer, shard: torch.Tensor):
        self._optimizer, self._shard = optimizer, shard

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "step":
            return torch.tensor(float(self._optimizer.current_step()))
        if name not in _STREAMS:
            raise KeyError(name)
        return self._optimizer.read(self._shard, name)

    def __setitem__(self, name: str, value: Any) -> None:
        # The step comes with the parameter groups. What megatron-core sets here after them is the step before it loaded, in
        # the format "dp_reshardable", which also says which ranges are padding.
        if name in _STREAMS:
            self._optimizer.write(self._shard, name, value)
        elif name not in ("step", "padding"):
            raise KeyError(f"the state has no {name}: expected step, {', '.join(_STREAMS)}")

    def __delitem__(self, name: str) -> NoReturn:
        raise RuntimeError(f"{name} cannot be removed: the optimizer service holds the state")

    def __reduce__(self) -> Any:
        items = itertools.chain([("step", self["step"])], self.items())
        return collections.OrderedDict, (), None, None, items  # torch.load takes these with weights_only

    # Without the step: "dp_reshardable" of megatron-core before 0.16 takes each entry for one of the shard's shape.

    def __iter__(self) -> Iterator[str]:
        return iter(_STREAMS)

    def __len__(self) -> int:
        return len(_STREAMS)


# What is refused


def _refusals(config: Any, ddp: Any, groups: Sequence[Dict[str, Any]]) -> Iterator[Tuple[bool, str]]:
    """What the optimizer cannot do, and what to change."""
    parameters = [p for group in groups for p in group["params"]]
    yield not config.optimizer_cpu_offload, "optimizer_cpu_offload is off: add --optimizer-cpu-offload, or leave install() out"
    yield config.optimizer != "adam", f"optimizer is {config.optimizer!r}: expected 'adam' (--optimizer adam)"
    yield (
        config.optimizer_offload_fraction < 1,
        f"optimizer_offload_fraction is {config.optimizer_offload_fraction:g}, and all of the state is on the host: add "
        "--optimizer-offload-fraction 1.0",
    )
    yield ddp.use_megatron_fsdp, "use_megatron_fsdp is on: expected the distributed optimizer; leave --use-megatron-fsdp out"
    yield not config.use_distributed_optimizer, "use_distributed_optimizer is off: add --use-distributed-optimizer"
    yield (
        not config.use_precision_aware_optimizer,
        "use_precision_aware_optimizer is off, so megatron-core would hold fp32 weights on the GPU: add "
        "--use-precision-aware-optimizer",
    )
    for name in "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype":
        dtype = getattr(config, name)
        yield dtype is not torch.float32, f"{name} is {dtype}: expected torch.float32; leave --{name.replace('_', '-')} out"
    yield config.fp16, "fp16 is on, and was not tested: expected bf16 (--bf16)"
    yield any(map(is_float8tensor, parameters)), "parameters are in fp8, and were not tested: leave --fp8-param-gather out"
    yield (
        getattr(config, "overlap_param_gather_with_optimizer_step", False),
        "overlap_param_gather_with_optimizer_step is on, which makes two optimizers: leave it out",
    )
    instances = getattr(ddp, "num_distributed_optimizer_instances", 1)
    yield instances > 1, f"num_distributed_optimizer_instances is {instances}, and was not tested: expected 1"
    yield not parameters, "this rank trains no parameter, and all ranks make each step together: train some on every rank"
    yield (
        any(p.dtype not in (torch.bfloat16, torch.float32) for p in parameters),
        "parameters are neither bfloat16 nor float32: expected a model in bf16 (--bf16)",
    )


def _check(config: Any, ddp: Any, groups: Sequence[Dict[str, Any]]) -> None:
    for is_so, what in _refusals(config, ddp, groups):
        if is_so:
            raise ValueError(f"plimsoll.megatron: {what}")


# The way in


def _of_shards(made: Any) -> Dict[torch.Tensor, Tuple[str, torch.Tensor]]:
    """The parameters that the shards of a distributed optimizer are of, and their names."""
    found = {}
    for chunk, model in enumerate(made.model_chunks):
        prefix = f"chunk{chunk}." if len(made.model_chunks) > 1 else ""
        for name, parameter in model.named_parameters():
            if parameter in made.model_param_group_index_map:
                group, place = made.model_param_group_index_map[parameter]
                found[made.optimizer.param_groups[group]["params"][place]] = prefix + name, parameter
    return found


def install(**options: Any) -> None:
    """Has ``get_megatron_optimizer`` make optimizers whose state the optimizer service holds.

    Call it before the model is set up, on every rank. ``options`` are those of :class:`plimsoll.torch.AdamW` for the
    state: ``state``, ``moments``, ``job``, ``socket``; and ``gradients="bf16"``, which rounds fp32 gradients of bf16
    parameters on their way to the host: 2 bytes a parameter less. ``scratch`` is a folder on a disk, where copies of the
    state lie while a checkpoint is written or read: without it they are in memory, 12 bytes a parameter. Raises ImportError for a megatron-core that is made otherwise.
    What cannot be trained so is refused with a ValueError when the optimizer is made, before anything is allocated.
    """
    unknown = sorted(set(options) - {"state", "moments", "gradients", "scratch", "job", "socket"})
    if unknown:
        raise TypeError(
            f"install() has no option {', '.join(unknown)}: expected state, moments, gradients, scratch, job or socket"
        )
    if options.get("scratch") is not None and not os.path.isdir(options["scratch"]):
        raise ValueError(f"scratch is {options['scratch']!r}, which is no folder: expected one on a disk of this host")
    for name, values in {"gradients": (None, "bf16"), "moments": ("fp32", "bf16"), "state": ("split", "fp32", "split24")}.items():
        if name in options and options[name] not in values:
            raise ValueError(f"{name} is {options[name]!r}: expected one of {', '.join(map(repr, values))}")
    build = getattr(factory, _BUILD, None)
    if build is None or not hasattr(distrib_optimizer, "HybridDeviceOptimizer"):
        raise ImportError(
            f"megatron-core {megatron_version} has no {_BUILD}, or a distributed optimizer without HybridDeviceOptimizer: expected a "
            "release like 0.16"
        )
    build = getattr(build, "_plimsoll_replaces", build)
    parameters = inspect.signature(build)

    def build_with_service(*arguments: Any, **named: Any) -> Any:
        given = parameters.bind(*arguments, **named).arguments
        _check(given["config"], given["model_chunks"][0].ddp_config, given["param_groups"])
        made = build(*arguments, **named)
        if not isinstance(made, distrib_optimizer.DistributedOptimizer):
            raise TypeError(f"plimsoll.megatron: megatron-core made a {type(made).__name__}: expected a DistributedOptimizer")
        made.optimizer.serve(_of_shards(made), {"name": f"megatron{next(_numbers)}", **options})
        return made

    build_with_service._plimsoll_replaces = build  # type: ignore[attr-defined]
    setattr(factory, _BUILD, build_with_service)
    for module in factory, distrib_optimizer, cpu_offloading:
        module.HybridDeviceOptimizer = ServiceOptimizer


def resume(optimizer: Any) -> int:
    """Goes on with the state that the service has of a trainer that died: the model gets its parameters, and the step is
    returned. It is 0 for a new state.

    All ranks call it, before the first forward pass. A program that goes on from a checkpoint of megatron-core need not.
    Raises PlimsollError where the trainer died between the steps of two optimizers, as of experts and the rest.
    """
    made = getattr(optimizer, "chained_optimizers", [optimizer])
    steps = {one.optimizer.resumed_step for one in made}
    if len(steps) > 1:
        raise PlimsollError(
            f"the optimizers of this model are at steps {' and '.join(map(str, sorted(steps)))}: the trainer died between them. Start the "
            "service again, or give the job another name (PLIMSOLL_JOB), and load the last checkpoint"
        )
    (step,) = steps
    for chunk in made[0].model_chunks if step else ():
        chunk.start_param_sync(force_sync=True)
    return step
