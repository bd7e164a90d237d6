"""Which rank owns which parameter: whole matrices, divided by the time that their updates take."""

import collections
from typing import Any, Deque, Dict, Iterator, List, Sequence, Tuple

import torch
import torch.distributed

from plimsoll.torch.layout import Mesh
from plimsoll.torch.newton_schulz import flops

# What a GPU computes while a byte crosses its link: 600 TFLOPS against PCIe 5 with 55 GB/s.
_FLOPS_A_BYTE = 10_000
_BUCKET_BYTES = 32 << 20  # of parameters in a message
_BUCKETS_IN_FLIGHT = 2


def work_of(shape: Sequence[int], state_bytes: int, newton_schulz_steps: int) -> int:
    """How long the update of a parameter takes, in floating-point operations.

    ``state_bytes`` is what crosses the link in each direction, and ``newton_schulz_steps`` is 0 for AdamW.
    """
    products = flops(shape, newton_schulz_steps) if newton_schulz_steps else 0
    return products + _FLOPS_A_BYTE * state_bytes


def assign(work: Sequence[int], ranks: int) -> List[int]:
    """The owner of each parameter: the longest goes first, to the rank with the least so far (LPT).

    Every rank finds the same: equals go in the order of parameters, and to the lowest rank.
    """
    loads, owners = [0] * ranks, [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        owners[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[i]] += work[i]
    return owners


class Owners:
    """The parameters that ranks share, each with the rank that updates it.

    ``mesh`` is the ranks that divide the parameters among them: of one rank, it owns all.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], work: Sequence[int], mesh: Mesh):
        self.mesh, self.parameters = mesh, list(parameters)
        self._owner_of = dict(zip(self.parameters, assign(work, mesh.world)))

    def is_own(self, parameter: torch.Tensor) -> bool:
        return self._owner_of[parameter] == self.mesh.rank

    def root(self, parameter: torch.Tensor) -> int:
        """The owner's number among all processes, as torch.distributed names the root of a collective."""
        return torch.distributed.get_global_rank(self.mesh.group, self._owner_of[parameter])

    @torch.no_grad()
    def publish(self) -> None:
        """Gives all ranks the parameters of their owners, bucket by bucket."""
        if self.mesh.world == 1:
            return
        sending: Deque[Tuple[Any, torch.Tensor, List[torch.Tensor]]] = collections.deque()
        for bucket in self._buckets():
            is_own, like = self.is_own(bucket[0]), bucket[0]
            flat = torch.cat([p.reshape(-1) for p in bucket]) if is_own else like.new_empty(sum(p.numel() for p in bucket))
            work = torch.distributed.broadcast(flat, self.root(like), group=self.mesh.group, async_op=True)
            sending.append((work, flat, [] if is_own else bucket))
            if len(sending) > _BUCKETS_IN_FLIGHT:
                _receive(*sending.popleft())
        while sending:
            _receive(*sending.popleft())

    def _buckets(self) -> Iterator[List[torch.Tensor]]:
        """Parameters of one owner and type, as many as fill a message. Every rank makes the same buckets."""
        kinds: Dict[Any, List[torch.Tensor]] = {}
        for p in self.parameters:
            kinds.setdefault((self._owner_of[p], p.dtype), []).append(p)
        for parameters in kinds.values():
            bucket: List[torch.Tensor] = []
            for p in parameters:
                if bucket and sum(x.nbytes for x in bucket) + p.nbytes > _BUCKET_BYTES:
                    yield bucket
                    bucket = []
                bucket.append(p)
            yield bucket


def _receive(work: Any, flat: torch.Tensor, parameters: List[torch.Tensor]) -> None:
    work.wait()
    if parameters:
        for parameter, values in zip(parameters, flat.split([p.numel() for p in parameters])):
            parameter.copy_(values.view(parameter.shape))
