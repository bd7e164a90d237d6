"""Collective operations of several ranks."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import torch
import torch.distributed

from plimsoll.errors import PlimsollError
from plimsoll.torch import layout
from plimsoll.torch.layout import Mesh
from plimsoll.torch.samples import Fingerprint

_Result = TypeVar("_Result")

APART = "the shards of this job are at different steps: a step was interrupted in between; load the last checkpoint"


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Ranks:
    """The ranks of a mesh. All ranks call the same methods in the same order."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    @property
    def are_heard(self) -> bool:
        """Whether there is a process group for messages among the ranks."""
        return bool(self.mesh.groups)

    def gather(self, own: List[Any]) -> List[Any]:
        """The values of all ranks, in the order of ranks."""
        for group in self.mesh.groups:
            every: List[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(every, own, group=group)
            own = [x for of_rank in every for x in of_rank]
        return own

    def reduce(self, total: torch.Tensor) -> None:
        """Adds up over all ranks. The replicas get the same bits if all but one have added zeros."""
        for group in self.mesh.groups:
            torch.distributed.all_reduce(total, group=group)

    def agree(self, what: str, act: Callable[[], _Result]) -> List[_Result]:
        """What ``act`` returns on each rank. If it fails on one rank it fails on all, so that no rank waits for one
        that gave up.
        """
        result, failure = None, None
        try:
            result = act()
        except Exception as error:
            failure = error
        try:
            every = self.gather([(result, None if failure is None else f"{type(failure).__name__}: {failure}")])
        except Exception:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(every) if text is not None]
        if failures:
            raise PlimsollError(f"{what} failed on {len(failures)} of {len(every)} ranks: {'; '.join(failures)}")
        return [result for result, _ in every]


class Vote(NamedTuple):
    """A rank's vote on a step before it is made."""

    failure: Optional[Exception] = None
    has_gradients: bool = False
    loss_scale: float = 1.0
    squares: float = 0.0  # the sum of the squares of its gradients
    fingerprint: Fingerprint = Fingerprint()
    left_alone: int = 0  # tells which parameters have no gradients: of 20 bits

    def to_add_up(self, steps: Sequence[int]) -> List[float]:
        """The vote and the steps of its shards, as numbers. The ranks add them up for :meth:`Count.of`."""
        of_steps = [len(steps), sum(steps), sum(float(s) * s for s in steps)]
        own = [self.squares, self.failure is not None, self.has_gradients, *of_steps, self.loss_scale, self.loss_scale**2]
        own += [self.left_alone, self.left_alone**2]
        return [*own, *self.fingerprint.to_add_up()]


class Count(NamedTuple):
    """The votes of all ranks, added up."""

    squares: float
    failures: float
    having: float  # ranks that have gradients
    shards: float
    of_steps: float
    of_squared_steps: float
    of_scales: float
    of_squared_scales: float
    of_left_alone: float
    of_squared_left_alone: float
    of_fingerprints: Sequence[float]

    @classmethod
    def of(cls, total: Sequence[float]) -> "Count":
        return cls(*total[:10], total[10:])

    @property
    def step(self) -> int:
        """The step that all shards are at."""
        return int(self.of_steps / self.shards)

    def check(self, own: Vote, ranks: int) -> None:
        """Refuses the step if the votes do not agree."""
        if 0 < self.having < ranks:
            raise PlimsollError(
                f"{self.having:.0f} of {ranks} ranks have gradients, and {'this one' if own.has_gradients else 'not this one'}: "
                "expected all or none; call backward on every rank before the step"
            )
        if self.shards * self.of_squared_steps != self.of_steps * self.of_steps:
            raise PlimsollError(APART)
        if ranks * self.of_squared_scales > self.of_scales * self.of_scales * (1 + 1e-9):  # which allows for rounding
            raise PlimsollError(
                f"the GradScalers of the ranks have different scales, {own.loss_scale:g} here: gradients were not finite on "
                "some ranks only, or the first scales differ; give all ranks one scale (scaler.update(new_scale)), and "
                "average the gradients"
            )
        if ranks * self.of_squared_left_alone != self.of_left_alone * self.of_left_alone:
            raise PlimsollError(
                "the ranks have no gradients of different parameters, and a step leaves the same ones alone on all ranks: average the "
                "gradients (DistributedDataParallel with find_unused_parameters, or sharding='zero2'), or count missing ones as "
                "zero (missing_gradients='zero')"
            )
        if self.having and Fingerprint.differ(self.of_fingerprints, ranks):
            raise PlimsollError(
                "the gradients of the ranks differ, so they were not averaged: wrap the model in DistributedDataParallel, "
                "leave its no_sync() for the last backward pass before a step, or use sharding='zero2', which averages "
                "them itself"
            )


def mesh_for(
    parameters: Sequence[torch.Tensor], names: Dict[torch.Tensor, str], sharding: Optional[str], process_group: Any, model: Any
) -> Mesh:
    """The ranks that share the state of parameters, and the ranks that hold copies of it."""
    sharded = [p for p in parameters if layout.is_sharded(p)]
    if sharded:
        if sharding is not None:
            raise ValueError(f"sharding is {sharding!r}, but parameters are sharded already (DTensor): leave it None")
        if len({p.device_mesh for p in sharded}) > 1 or not all(layout.is_sharded(p) for p in parameters if p.requires_grad):
            raise ValueError(
                "parameters are of several meshes, or some are DTensors and others are not: give each kind an optimizer of its own"
            )
        return layout.mesh_of(sharded, names)
    distributed = is_distributed()
    if sharding == "local":
        group = process_group or torch.distributed.group.WORLD if distributed else None
        return Mesh(*_place_in(group), (group,), is_local=True) if group else Mesh(is_local=True)
    if sharding is None:
        group = _replicas_group(process_group, model) if distributed else None
        if group is None:
            return Mesh()
        replica, replicas = _place_in(group)
        return Mesh(groups=(group,), replica=replica, replicas=replicas)
    if not distributed:
        if sharding == "zero2":
            return Mesh()  # gradients are sent to the owners only
        raise ValueError(
            "sharding is 'zero1', but there is no process group: call torch.distributed.init_process_group first, or leave "
            "sharding None"
        )
    group = process_group or torch.distributed.group.WORLD
    return Mesh(*_place_in(group), (group,))


def _replicas_group(process_group: Any, model: Any) -> Any:
    """The ranks that hold copies of the full state, if known: without ``sharding`` a group or the model tells."""
    wrapped = model if isinstance(model, torch.nn.parallel.DistributedDataParallel) else None
    return process_group or getattr(wrapped, "process_group", None)


def _place_in(group: Any) -> Tuple[int, int]:
    """This rank's number in a process group, and how many there are."""
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"process_group does not have this rank, {torch.distributed.get_rank()}: expected the group of ranks that train "
            "these parameters"
        )
    return rank, torch.distributed.get_world_size(group)
