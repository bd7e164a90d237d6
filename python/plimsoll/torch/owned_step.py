"""Steps that ranks make together, each of the parameters that it owns."""

import math
from typing import Any, Dict, List, Optional, Sequence

import torch

from plimsoll.torch import layout
from plimsoll.torch.layout import Mesh, Piece
from plimsoll.torch.muon_groups import Group
from plimsoll.torch.muon_update import as_matrices
from plimsoll.torch.owned_gradients import OwnedGradients
from plimsoll.torch.owners import Owners, work_of
from plimsoll.torch.ranks import Count, Ranks, Vote
from plimsoll.torch.samples import Fingerprint
from plimsoll.torch.trained import Trained
from plimsoll.torch.transfer import transfer_for


class OwnedStep:
    """The gradients and parameters of the ranks of a mesh, before and after the update of each rank's own."""

    def __init__(self, groups: Sequence[Group], names: Dict[torch.Tensor, str], mesh: Mesh, *, reduces: bool):
        self.trained, self.ranks = Trained(groups, names), Ranks(mesh)
        self.trained.check_memory()
        work = [_work(p, group) for group in groups for p in group["params"] if p.requires_grad]
        self.owners = Owners(self.trained.parameters, work, mesh)
        self._names, self._device = names, self.trained.device
        self._reduced: Optional[OwnedGradients] = None
        if reduces:
            self._reduced = OwnedGradients(self.owners, names, self._device, transfer_for(self._device))

    def own_groups(self, groups: Sequence[Group]) -> List[Group]:
        """The groups with this rank's own parameters only."""
        return [{**g, "params": [p for p in g["params"] if p.requires_grad and self.owners.is_own(p)]} for g in groups]

    def prepare(self, step: int, with_norm: bool, failure: Optional[Exception]) -> "Prepared":
        """Brings gradients to their owners, and asks all ranks whether they can make the step."""
        has_gradients = self._reduced.finish() if self._reduced else any(p.grad is not None for p in self.trained.parameters)
        own = [p for p in self.owners.parameters if self.owners.is_own(p) and p.grad is not None]
        squares = self._squares(own) if with_norm else []
        if self.ranks.are_heard:
            vote = Vote(failure, has_gradients, 1.0, 0.0, self._fingerprint())
            numbers = vote.to_add_up([step])
            # Replicas have the same squares: one of them says so.
            said = squares if self.ranks.mesh.replica == 0 else [0.0] * len(squares)
            total = torch.tensor([*numbers, *said], dtype=torch.float64, device=self._device)
            self.ranks.reduce(total)
            self._check(step, vote, Count.of(total[: len(numbers)].tolist()))
            squares = total[len(numbers) :].tolist()
        elif failure is not None:
            raise failure
        return Prepared(own, has_gradients, math.sqrt(sum(squares)) if with_norm else None)

    def _check(self, step: int, vote: Vote, count: Count) -> None:
        if count.failures:

            def fail() -> None:
                if vote.failure is not None:
                    raise vote.failure

            self.ranks.agree(f"step {step + 1}", fail)
        count.check(vote, self.ranks.mesh.size)

    def _squares(self, own: Sequence[torch.Tensor]) -> List[float]:
        """The sum of the squares of each gradient, 0 for those of other ranks.

        They are added up in the order of the parameters: any number of ranks finds the same norm to the last bit.
        """
        norms = torch.stack([torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in own]).double().tolist() if own else []
        found = dict(zip(own, norms))
        return [found.get(p, 0.0) ** 2 for p in self.owners.parameters]

    def _fingerprint(self) -> Fingerprint:
        """What tells whether the ranks have the same gradients, where somebody else had to average them."""
        if self._reduced is not None:
            return Fingerprint()
        return Fingerprint.of([Piece(p, self._names[p], tuple(p.shape), 0, False, 0, p.numel(), 0, 0) for p in self.owners.parameters])

    def over(self) -> None:
        if self._reduced is not None:
            self._reduced.over()

    def discard(self) -> None:
        if self._reduced is not None:
            self._reduced.discard()

    def release(self) -> None:
        if self._reduced is not None:
            self._reduced.remove_hooks()


class Prepared:
    """A step that all ranks can make: this rank's gradients of it."""

    def __init__(self, own: Sequence[torch.Tensor], has_gradients: bool, norm: Optional[float]):
        self._own, self.has_gradients, self.norm = own, has_gradients, norm

    @property
    def is_finite(self) -> bool:
        return self.norm is None or math.isfinite(self.norm)

    @torch.no_grad()
    def clip(self, max_norm: Optional[float]) -> None:
        """Clips as torch.nn.utils.clip_grad_norm_ does."""
        if max_norm is not None and self.norm is not None and max_norm / (self.norm + 1e-6) < 1:
            for p in self._own:
                p.grad.mul_(max_norm / (self.norm + 1e-6))


def _work(parameter: torch.Tensor, group: Group) -> int:
    if not group["use_muon"]:
        return work_of(parameter.shape, 10 * parameter.numel(), 0)  # two moments in fp32, and half a master weight
    shape = as_matrices(parameter.detach(), group["matrices"]).shape
    return work_of(shape, 6 * parameter.numel(), group["ns_steps"])  # one
