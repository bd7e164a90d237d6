"""Steps that ranks make together, each of the parameters that it owns."""

import math
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from plimsoll.torch.layout import Mesh, Piece
from plimsoll.torch.matrix_groups import Group
from plimsoll.torch.muon_update import as_matrices
from plimsoll.torch.owned_gradients import OwnedGradients
from plimsoll.torch.matrix_owners import Owners, work_of
from plimsoll.torch.ranks import Count, Ranks, Vote
from plimsoll.torch.samples import Fingerprint
from plimsoll.torch.state_offload import StateOffload
from plimsoll.torch.trained import Trained
from plimsoll.torch.transfer import transfer_for
from plimsoll.torch.whole_matrices import WholeMatrices


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
        self._whole = WholeMatrices(self.owners, names) if self.trained.are_sharded else None
        own = {p: p for p in self.owners.parameters if self.owners.is_own(p)}
        #: What this rank updates of its own parameters.
        self.updated: Dict[torch.Tensor, torch.Tensor] = self._whole.of if self._whole else own

    def own_groups(self, groups: Sequence[Group]) -> List[Group]:
        """The groups with what this rank updates, and with what nobody does."""

        def own(group: Group) -> List[torch.Tensor]:
            return [self.updated.get(p, p) for p in group["params"] if p in self.updated or not p.requires_grad]

        return [{**group, "params": own(group)} for group in groups]

    @property
    def is_divided(self) -> bool:
        """Whether no rank has the full state."""
        return self._whole is not None or self.owners.mesh.world > 1

    # Opening

    def gather_parameters(self) -> None:
        """Brings whole parameters to their owners: the program may have changed them since the last step."""
        if self._whole is not None:
            self._whole.gather(lambda p: p, lambda whole, values: whole.copy_(values))

    # Steps

    def prepare(self, held: StateOffload, with_norm: bool, check: Callable[[], None]) -> "Prepared":
        """Brings gradients to their owners, and asks all ranks whether they can make the step."""
        failure = None
        try:
            check()
        except Exception as error:
            failure = error
        has_gradients = self._reduced.finish() if self._reduced else any(p.grad is not None for p in self.trained.parameters)
        if self._whole:
            self.gather_parameters()
            self._whole.gather(lambda p: p.grad, lambda whole, values: setattr(whole, "grad", values.to(whole.dtype)))
        squares = self._squares() if with_norm else []
        if self.ranks.are_heard:
            vote = Vote(failure, has_gradients, 1.0, 0.0, self._fingerprint())
            numbers = vote.to_add_up([held.steps] if self.updated else [])
            # Replicas have the same squares: one of them says so.
            said = squares if self.ranks.mesh.replica == 0 else [0.0] * len(squares)
            total = torch.tensor([*numbers, *said], dtype=torch.float64, device=self._device)
            self.ranks.reduce(total)
            self._check(vote, Count.of(total[: len(numbers)].tolist()))
            squares = total[len(numbers) :].tolist()
        elif failure is not None:
            raise failure
        own = [u for u in self.updated.values() if u.grad is not None]
        return Prepared(own, has_gradients, math.sqrt(sum(squares)) if with_norm else None)

    def _check(self, vote: Vote, count: Count) -> None:
        if count.failures:
            self._fail(vote.failure)
        count.check(vote, self.ranks.mesh.size)

    def _fail(self, failure: Optional[Exception]) -> None:
        """Raises on all ranks what has failed on some."""

        def fail() -> None:
            if failure is not None:
                raise failure

        self.ranks.agree("the step", fail)

    def make(self, held: StateOffload) -> None:
        """Updates this rank's own parameters, once all ranks can finish the step, and sends them to the others."""
        if not self.ranks.are_heard:
            held.prepare()
        else:
            failure = None
            try:
                held.prepare(wait=True)
            except Exception as error:
                failure = error
            failures = torch.tensor([float(failure is not None)], device=self._device)
            self.ranks.reduce(failures)
            if failures.item():
                self._fail(failure)
        held.make()
        self.publish()

    def _squares(self) -> List[float]:
        """The sum of the squares of each gradient, 0 for those of other ranks.

        They are added up in the order of the parameters: any number of ranks finds the same norm to the last bit.
        """
        given = {p: u.grad for p, u in self.updated.items() if u.grad is not None}
        norms = {p: torch.linalg.vector_norm(gradient, dtype=torch.float32) for p, gradient in given.items()}
        values = torch.stack(list(norms.values())).double().tolist() if norms else []
        found = dict(zip(norms, values))
        return [found.get(p, 0.0) ** 2 for p in self.owners.parameters]

    def _fingerprint(self) -> Fingerprint:
        """What tells whether the ranks have the same gradients, where somebody else had to average them."""
        if self._reduced is not None or self._whole is not None:
            return Fingerprint()
        whole = [Piece(p, self._names[p], tuple(p.shape), 0, False, 0, p.numel(), 0, 0) for p in self.owners.parameters]
        return Fingerprint.of(whole)

    def publish(self) -> None:
        """Gives all ranks the updated parameters."""
        if self._whole is not None:
            self._whole.scatter()
        else:
            self.owners.publish()

    def over(self) -> None:
        """Takes the gradients away that the ranks have brought to this one."""
        if self._reduced is not None:
            self._reduced.over()
        if self._whole is not None:
            for whole in self._whole.of.values():
                whole.grad = None

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
