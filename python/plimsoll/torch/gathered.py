"""The parameters of all ranks' shards, as the ranks send them to each other behind the forward pass."""

import collections
import itertools
import threading
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed

from plimsoll.client import Request
from plimsoll.errors import PlimsollError
from plimsoll.torch.arrivals import Arrivals
from plimsoll.torch.layout import Piece
from plimsoll.torch.shard import Shard
from plimsoll.torch.shards import Shards

_IN_FLIGHT = 4  # blocks


class Coming(NamedTuple):
    """A parameter that has not arrived."""

    piece: Piece
    shown: None = None
    contiguous: bool = False  # its rows do not come apart


class Block(NamedTuple):
    """Elements of a shard, and the pieces that they are: (piece, first in its parameter, count)."""

    shard: Shard
    owner: int
    first: int
    pieces: Sequence[Tuple[Piece, int, int]]

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.pieces)


class Gathered(Arrivals):
    """Waits for parameters that a thread of each rank sends and takes, block by block.

    The threads make the same broadcasts in one order, whatever the programs of the ranks do meanwhile: the ranks may
    use parameters in different orders, and communicate. A rank that cannot send marks its blocks, and goes on, so that
    no other waits. The blocks are in host memory, and have a process group of their own.
    """

    def __init__(self, shards: Shards, *, strict: bool):
        super().__init__(shards, strict=strict)
        self._pieces = {piece.parameter: piece for shard in shards for piece in shard.group.pieces}
        self._shard_of = {p: shard for shard in shards for p in shard.group.pieces_of()}
        self._order = list(self._shard_of)
        self._mesh, self._transfer = shards.ranks.mesh, shards.transfer
        self._ranks = torch.distributed.get_process_group_ranks(self._mesh.group)
        self._group = torch.distributed.new_group(self._ranks, backend="gloo", use_local_synchronization=True)
        self._coming: Dict[torch.Tensor, Coming] = {}  # what this rank's program has not waited for
        self._versions: Dict[torch.Tensor, int] = {}  # of the parameters, as the thread has left them
        # What the thread changes:
        self._progress = threading.Condition()
        self._left: Dict[torch.Tensor, int] = {}  # the elements of each parameter that have not arrived
        self._is_over = True
        self._failure: Optional[str] = None

    def end(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)

    def begin(self) -> None:
        super().begin()
        self._coming.clear()

    def order(self, order: Callable[[List[torch.Tensor]], List[torch.Tensor]]) -> None:
        """All ranks take the order of the first."""
        parameters = list(self._shard_of)
        places = {p: i for i, p in enumerate(parameters)}
        first = torch.tensor([places[p] for p in order(parameters)])
        torch.distributed.broadcast(first, self._ranks[0], group=self._group)
        self._order = [parameters[i] for i in first.tolist()]

        def of_all(own: List[torch.Tensor]) -> List[torch.Tensor]:
            wanted = set(own)
            return [p for p in self._order if p in wanted]

        super().order(of_all)

    def begun(self, failure: Optional[Exception]) -> None:
        for shard in self._shards:
            if shard.parameters.missing is None:
                shard.parameters.expect()
        self._versions = {p: p._version for p in self._order}
        self._coming = {p: Coming(self._pieces[p]) for p in self._order}
        self._left = {p: p.numel() for p in self._order}
        self._is_over, self._failure = False, None
        threading.Thread(target=self._run, args=(failure,), name="plimsoll-gather", daemon=True).start()

    # The thread

    def _run(self, failure: Optional[Exception]) -> None:
        try:
            with torch.no_grad():
                self._exchange(failure)
        except Exception as error:  # of a broadcast: another rank has ended
            self._refuse(f"{type(error).__name__}: {error}")
        with self._progress:
            self._is_over = True
            self._progress.notify_all()

    def _exchange(self, failure: Optional[Exception]) -> None:
        blocks = list(self._blocks())
        updated = self._updated([block for block in blocks if block.owner == self._mesh.rank], failure)
        moving: Deque[Tuple[List[Any], torch.Tensor, torch.Tensor, Block]] = collections.deque()
        whole = {p: torch.empty(p.numel(), dtype=p.dtype) for p in self._order if not p.is_contiguous()}
        for block in blocks:
            if block.owner == self._mesh.rank:
                is_there, values = torch.tensor([next(updated)]), block.shard.parameters.elements(block.first, block.count)
            else:
                is_there, values = torch.tensor([False]), torch.empty(block.count, dtype=block.shard.group.dtype)
            source = self._ranks[block.owner]
            # As bytes: gloo of torch 2.1 does not know bf16.
            sent = [t.view(torch.uint8) for t in (values, is_there)]
            works = [torch.distributed.broadcast(t, source, group=self._group, async_op=True) for t in sent]
            moving.append((works, values, is_there, block))
            if len(moving) >= _IN_FLIGHT:
                self._take(*moving.popleft(), whole)
        while moving:
            self._take(*moving.popleft(), whole)

    def _blocks(self) -> Iterator[Block]:
        """All shards, in the order in which parameters are needed."""
        pieces_of = {p: pieces for shard in self._shards for p, pieces in shard.group.pieces_of().items()}
        for shard, parameters in itertools.groupby(self._order, key=lambda p: self._shard_of[p]):
            pieces = [piece for p in parameters for piece in pieces_of[p]]
            for owner, first, cut in shard.parameters.cut(pieces):
                yield Block(shard, owner, first, cut)

    def _updated(self, blocks: Sequence[Block], failure: Optional[Exception]) -> Iterator[bool]:
        """For each of this rank's blocks: whether it has had its update. It waits for that."""
        asked: Deque[Request] = collections.deque()
        ahead = iter(blocks)
        for block in blocks:
            try:
                if failure is not None:
                    raise failure
                for b in itertools.islice(ahead, _IN_FLIGHT - len(asked)):
                    asked.append(b.shard.session.wait(b.first, b.count))
                block.shard.session.waited(asked.popleft())
            except Exception as error:
                failure = error
                self._refuse(f"{type(error).__name__}: {error}")
            yield failure is None

    def _take(
        self,
        works: List[Any],
        values: torch.Tensor,
        is_there: torch.Tensor,
        block: Block,
        whole: Dict[torch.Tensor, torch.Tensor],
    ) -> None:
        for work in works:
            work.wait()
        if not is_there:
            self._refuse(f"rank {block.owner} did not have them")
            return
        try:
            self._place(values, block, whole)
        except Exception as error:  # of this rank's device
            self._refuse(f"{type(error).__name__}: {error}")

    def _place(self, values: torch.Tensor, block: Block, whole: Dict[torch.Tensor, torch.Tensor]) -> None:
        for (piece, first, count), part in zip(block.pieces, values.split([count for _, _, count in block.pieces])):
            parameter = piece.parameter
            if parameter._version != self._versions[parameter]:
                self._fail_of(piece, "parameter")
            target = whole.get(parameter)
            is_last = self._left[parameter] == count
            if target is None:
                self._transfer.fetch(parameter.detach().view(-1)[first : first + count], part)
            else:
                target[first : first + count] = part
                if is_last:
                    self._transfer.fetch(parameter.detach(), target.view(parameter.shape))
            self._versions[parameter] = parameter._version
            with self._progress:
                self._left[parameter] -= count
                if is_last:
                    del self._left[parameter]
                    self._progress.notify_all()

    def _refuse(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason

    # The program

    def name(self, parameter: torch.Tensor) -> str:
        return self._pieces[parameter].name

    def missing(self, parameter: torch.Tensor) -> Optional[Coming]:
        return self._coming.get(parameter) if self._strict or parameter in self._left else None

    def all_missing(self) -> List[Coming]:
        return list(self._coming.values())

    def need(self, parameters: Iterable[torch.Tensor]) -> None:
        wanted = [p for p in parameters if p in self._coming]
        if wanted:
            self._wait_for(lambda: not any(p in self._left for p in wanted))
            for parameter in wanted:
                del self._coming[parameter]
        self._finish()
        self.check()

    def need_all(self) -> None:
        """As in the base, but what has failed is raised by :meth:`check`: other ranks may wait for this one."""
        self._wait_for(lambda: False)
        self._coming.clear()
        self._finish()

    def before_gradient(self, parameter: torch.Tensor) -> None:
        """Gradients go to the arenas of other ranks, too, whose update may not be over."""
        self.need_all()

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._is_over or is_there())
        self._transfer.join()

    def _finish(self) -> None:
        """Records the end of the step, once the thread has ended."""
        if not self.are_underway or not self._is_over or self._failure is not None or self._strict and self._coming:
            return
        self._transfer.join()
        self._coming.clear()
        for shard in self._shards:
            for parameter, slot in shard.slots.items():
                slot.left = self._versions[parameter], 0
            shard.parameters.complete()

    def check(self) -> None:
        super().check()
        if self._failure is not None:
            raise PlimsollError(
                f"parameters of the last step have not arrived from the ranks that hold them: {self._failure}; load the last checkpoint, "
                "or close the optimizers of all ranks and open them again"
            )

    def forgive(self) -> None:
        super().forgive()
        self._failure = None
        self._coming.clear()
