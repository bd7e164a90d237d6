"""Whole matrices of parameters that are sharded by rows, each on the rank that owns it."""

import collections
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed

from plimsoll.torch.layout import is_offloaded, local
from plimsoll.torch.matrix_owners import Owners

_What = Callable[[torch.Tensor], Optional[torch.Tensor]]
_Store = Callable[[torch.Tensor, torch.Tensor], None]

_IN_FLIGHT_BYTES = 64 << 20


class WholeMatrices:
    """The owner of a parameter has all rows of it beside its own shard. A step gathers parameter and gradient there,
    and scatters the updated parameter.

    Rows are divided as ``fully_shard`` does: equally, and the last ranks may have fewer or none.
    """

    def __init__(self, owners: Owners, names: Dict[torch.Tensor, str]):
        for p in owners.parameters:
            if is_offloaded(p):
                raise ValueError(
                    f"parameter {names[p]} is a shard on the host (CPUOffloadPolicy): expected shards on the device, which gathers "
                    "whole matrices for Muon; leave the policy out"
                )
        self._owners = owners
        #: The parameters that this rank updates.
        self.of: Dict[torch.Tensor, torch.Tensor] = {
            p: torch.nn.Parameter(local(p).new_empty(p.shape)) for p in owners.parameters if owners.is_own(p)
        }
        self._moving: Deque[Tuple[int, Any, Callable[[], None]]] = collections.deque()

    @torch.no_grad()
    def gather(self, what: _What, store: _Store) -> None:
        """Brings ``what(parameter)`` of all ranks to each owner, and has it stored as (parameter, values).

        Where no rank has anything of a parameter, it is left out.
        """
        shards = [what(p) for p in self._owners.parameters]
        for p, shard, is_there in zip(self._owners.parameters, shards, self._which(shards)):
            if is_there:
                self._gather(p, shard, store)
        self._finish(0)

    def _which(self, shards: List[Optional[torch.Tensor]]) -> List[bool]:
        device = local(self._owners.parameters[0]).device
        there = torch.tensor([s is not None for s in shards], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX, group=self._owners.mesh.group)
        return [bool(x) for x in there.tolist()]

    def _gather(self, parameter: torch.Tensor, shard: Optional[torch.Tensor], store: _Store) -> None:
        own, like = self.of.get(parameter), local(parameter if shard is None else shard)
        sent = like.new_zeros(self._count(parameter))
        if shard is not None:
            sent[: like.numel()] = like.reshape(-1)
        parts = list(sent.new_empty(self._owners.mesh.world, len(sent))) if own is not None else None
        work = torch.distributed.gather(
            sent, parts, self._owners.root(parameter), group=self._owners.mesh.group, async_op=True
        )

        def arrived() -> None:
            if parts is not None:
                store(own, torch.cat(parts)[: own.numel()].view(own.shape))

        self._move(sent.nbytes * self._owners.mesh.world, work, arrived)

    @torch.no_grad()
    def scatter(self) -> None:
        """Gives each rank its rows of the updated parameters."""
        for p in self._owners.parameters:
            self._scatter(p)
        self._finish(0)

    def _scatter(self, parameter: torch.Tensor) -> None:
        own, target, count = self.of.get(parameter), local(parameter), self._count(parameter)
        received, parts = target.new_empty(count), None
        if own is not None:
            padded = target.new_zeros(self._owners.mesh.world * count)
            padded[: own.numel()] = own.detach().reshape(-1)
            parts = list(padded.split(count))
        work = torch.distributed.scatter(
            received, parts, self._owners.root(parameter), group=self._owners.mesh.group, async_op=True
        )
        self._move(received.nbytes, work, lambda: target.copy_(received[: target.numel()].view(target.shape)))

    def _count(self, parameter: torch.Tensor) -> int:
        """The elements of the largest shard."""
        rows = parameter.shape[0]
        return -(-rows // self._owners.mesh.world) * (parameter.numel() // rows)

    def _move(self, size: int, work: Any, arrived: Callable[[], None]) -> None:
        self._moving.append((size, work, arrived))
        self._finish(_IN_FLIGHT_BYTES)

    def _finish(self, leave_bytes: int) -> None:
        while self._moving and sum(size for size, _, _ in self._moving) > leave_bytes:
            _, work, arrived = self._moving.popleft()
            work.wait()
            arrived()
