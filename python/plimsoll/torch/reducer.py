"""The reduction of gradients to their owners, in one order on all ranks."""

import contextlib
from typing import Callable, Dict, Iterator, List, Sequence, Set

import torch
import torch.distributed

from plimsoll.errors import PlimsollError
from plimsoll.torch.layout import Mesh


class Reducer:
    """Sends gradients to their owners in the same order on all ranks, whatever graphs these run.

    Ranks go through all parameters in rounds. A rank without a gradient for the next parameter keeps the later ones,
    and sends zeros in its place when the step needs the others. Before a round each rank announces that it begins
    one. In the step it announces that it begins no more, and then takes part with zeros for as long as others do.

    ``reduce`` takes the gradient of a parameter away and sends it, or zeros if told that there is none.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], mesh: Mesh, device: torch.device, reduce: Callable[[torch.Tensor, bool], None]
    ):
        self._order = list(reversed(parameters))  # of the backward pass, as far as is known
        self._learned = False
        self._next = len(self._order)  # the place in the round: here between two rounds
        self._mesh, self._device, self._reduce = mesh, device, reduce
        self._waiting: Set[torch.Tensor] = set()  # parameters whose gradients have come and were not sent yet
        self._told: List[_Told] = []
        self._discarded = 0  # how often gradients were discarded
        self._lost = False
        #: Parameters that had a gradient here since the last step, in the order in which these came.
        self.own: Dict[torch.Tensor, None] = {}
        #: Those that had one on any rank: known when :meth:`finish` has returned.
        self.all: Set[torch.Tensor] = set()

    def came(self, parameter: torch.Tensor) -> None:
        """Sends the gradient that has arrived, and those that waited for it; or keeps it until its turn."""
        self.own.setdefault(parameter)
        if self._mesh.world == 1:
            self._reduce(parameter, True)
            return
        self._waiting.add(parameter)
        while self._order[self._next % len(self._order)] in self._waiting:
            if self._next == len(self._order):
                self._tell(True)
            self._send()

    def finish(self) -> None:
        """Sends the remaining gradients. All ranks call it, and then every rank has each gradient that any has.

        Raises PlimsollError, on all ranks, if some have discarded gradients and others have not.
        """
        if self._mesh.world == 1:
            self.all = set(self.own)
            return
        more = True
        while more:
            self._complete()
            more = bool(self._tell(bool(self._waiting)).result()[0])
            if more:
                self._next = 0
        told = [t.result() for t in self._told]
        self._told.clear()
        _, self._discarded, _, *having = told[-1]
        self.all = {p for p, has in zip(self._order, having) if has}
        if any(most != -least for _, most, least, *_ in told):
            raise PlimsollError(
                "some ranks have discarded gradients that others have kept, so gradients of different batches were added "
                "up: call backward and zero_grad equally often on all ranks"
            )
        if self.all and not self._learned:
            self._learn()

    def discard(self) -> None:
        """Discards the gradients since the last step."""
        if self.own:
            self._waiting.clear()
            self._complete()
            self._discarded += 1
        self.over()

    def over(self) -> None:
        """Prepares for the gradients of another step."""
        self.own.clear()
        self.all.clear()

    def _complete(self) -> None:
        while self._next < len(self._order):
            self._send()

    def _send(self) -> None:
        with self._in_place():
            parameter = self._order[self._next]
            self._reduce(parameter, parameter in self._waiting)
            self._waiting.discard(parameter)
            self._next += 1

    def _tell(self, more: bool) -> "_Told":
        """Announces whether this rank begins a round, how often it has discarded gradients, and which it has."""
        said = [more, self._discarded, -self._discarded, *(p in self.own for p in self._order)]
        with self._in_place():
            told = _Told(torch.tensor(said, dtype=torch.int32, device=self._device), self._mesh)
            self._told.append(told)
            if more:
                self._next = 0
        return told

    def _learn(self) -> None:
        """Adopts the order in which the first rank's gradients came. In any other order gradients wait for each
        other, in memory.
        """
        places = {p: i for i, p in enumerate(self._order)}
        came = {places[p]: None for p in self.own}
        order = torch.tensor([*came, *(i for i in range(len(places)) if i not in came)], device=self._device)
        with self._in_place():
            first = torch.distributed.get_global_rank(self._mesh.group, 0)
            torch.distributed.broadcast(order, first, group=self._mesh.group)
            self._order, self._learned = [self._order[i] for i in order.tolist()], True

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Notes whether a send was interrupted: this rank then does not know what the others received."""
        if self._lost:
            raise PlimsollError(
                "this rank was interrupted while it sent gradients to the others, so the ranks' gradients no longer match: "
                "start the job again, from the last checkpoint"
            )
        self._lost = True
        yield
        self._lost = False


class _Told:
    """Numbers that ranks tell each other. Waiting for it gives the maximum of each number over the ranks."""

    def __init__(self, said: torch.Tensor, mesh: Mesh):
        self._most = said
        self._work = torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=mesh.group, async_op=True)

    def result(self) -> List[int]:
        self._work.wait()
        return self._most.tolist()
