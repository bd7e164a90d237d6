"""The important columns of a shard, in a session of their own."""

from typing import Any, Dict, Optional

import numpy as np
import torch

from plimsoll import protocol
from plimsoll.client import Arena, Session
from plimsoll.torch.layout import DTYPES
from plimsoll.torch.shard import Shard
from plimsoll.torch.slot import Slot

_BLOCK = 1 << 20  # elements of a matrix that are moved at once
# The second moment before the first, as everywhere.
_STREAMS = (protocol.SECOND_MOMENT, protocol.FIRST_MOMENT, protocol.MASTER_WEIGHTS)


class Matrix:
    """A parameter as a matrix, and the place of its important columns in their session: a matrix of all rows.

    What is no matrix, such as a bias, has a single column, which is always important.
    """

    def __init__(self, slot: Slot, ratio: float, offset: int):
        self.slot, self.offset = slot, offset
        shape = slot.piece.shape
        self.is_matrix = len(shape) > 1
        self.rows = shape[0] if self.is_matrix else slot.piece.count
        self.columns = slot.piece.count // self.rows
        self.kept = max(1, int(self.columns * ratio)) if self.is_matrix else 1
        self.important: Optional[torch.Tensor] = None  # columns, on the device of the parameter
        self.selected: Optional[torch.Tensor] = None  # the same on the host
        self.gradient: torch.Tensor  # of important columns, in the arena
        self.weight: torch.Tensor  # their parameters, in the arena
        self.score: Optional[torch.Tensor] = None  # the sum of the magnitudes of each column's gradients in this step

    @property
    def count(self) -> int:
        return self.rows * self.kept

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of all elements, as a matrix."""
        return tensor.view(self.rows, self.columns)

    def measure(self, gradient: torch.Tensor) -> None:
        """Adds a gradient to the scores of the columns."""
        sums = torch.linalg.vector_norm(self.whole(gradient), 1, dim=0, dtype=torch.float32)
        self.score = sums if self.score is None else self.score + sums

    def choose(self) -> torch.Tensor:
        """The columns with the largest scores, in their order."""
        return self.score.topk(self.kept).indices.sort().values


class Important:
    """The session of important columns, beside that of the shard, which has the state of all other columns.

    At home, all columns are in the shard. Moving them loses no bit.
    """

    def __init__(self, shard: Shard, ratio: float):
        self._shard, offset = shard, 0
        self.matrices: Dict[torch.Tensor, Matrix] = {}
        for parameter, slot in shard.slots.items():
            matrix = self.matrices[parameter] = Matrix(slot, ratio, offset)
            offset += matrix.count
        self.session = Session(shard.session.path, self._document())
        self._place()

    def _document(self) -> Dict[str, Any]:
        document = dict(self._shard.session.document)
        parameters = []
        for piece, matrix in zip(document["parameters"], self.matrices.values()):
            shape = [matrix.rows, matrix.kept] if matrix.is_matrix else piece["shape"]
            parameters.append({**piece, "shape": shape, "first": 0, "count": matrix.count})
        part = document["part"].rsplit(".", 1)[0]
        return {**document, "part": f"{part}.important", "parameters": parameters}

    def _place(self) -> None:
        group = self._shard.group
        for arena in (self.session.parameters, self.session.gradients):
            group.transfer.register(arena)
        for matrix in self.matrices.values():
            matrix.gradient = _tensor(self.session.gradients, matrix)
            matrix.weight = _tensor(self.session.parameters, matrix)

    @property
    def are_away(self) -> bool:
        """Whether some columns are in this session."""
        return any(m.selected is not None for m in self.matrices.values())

    # Gradients

    def take(self, matrix: Matrix, gradient: torch.Tensor, adds: bool) -> Any:
        """Takes the important columns of a gradient, beside those that were taken in this step."""
        transfer = self._shard.group.transfer
        columns = self._columns(matrix, matrix.whole(gradient), matrix.important)
        return (transfer.add if adds else transfer.store)(matrix.gradient, columns.reshape(-1))

    def take_from_sums(self) -> None:
        """Takes the gradients of columns that were selected just now from the sums, which have this step alone."""
        for matrix in self.matrices.values():
            columns = self._columns(matrix, matrix.whole(matrix.slot.gradient), matrix.selected)
            matrix.gradient.copy_(columns.reshape(-1))

    def clear_sums(self) -> None:
        """Takes the important columns out of the sums of the others."""
        for matrix in self.matrices.values():
            if matrix.kept == matrix.columns:
                matrix.slot.gradient.zero_()
            else:
                matrix.whole(matrix.slot.gradient).index_fill_(1, matrix.selected, 0)

    @staticmethod
    def _columns(matrix: Matrix, whole: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return whole if matrix.kept == matrix.columns else whole.index_select(1, which)

    # Parameters

    def bring(self) -> None:
        """Brings the parameters of important columns into the model."""
        transfer = self._shard.group.transfer
        arrived = {p: m.weight for p, m in self.matrices.items()}
        if not transfer.shares:
            arrived = {p: torch.empty_like(w, device=p.device) for p, w in arrived.items()}
            transfer.begin()
            for parameter, matrix in self.matrices.items():
                transfer.fetch(arrived[parameter], matrix.weight)
            transfer.join()
        for parameter, matrix in self.matrices.items():
            whole, values = matrix.whole(parameter.detach()), arrived[parameter].view(matrix.rows, matrix.kept)
            if matrix.kept == matrix.columns:
                whole.copy_(values)
            else:
                whole.index_copy_(1, matrix.important, values)
        self._shard.parameters.taken([m.slot for m in self.matrices.values()])

    # Moves

    def select(self, steps: int) -> None:
        """Moves the columns with the largest scores here, and all others home. The state here is then of ``steps``."""
        # One wait for the device, whatever the number of matrices.
        chosen = [matrix.choose() for matrix in self.matrices.values()]
        on_host = torch.cat(chosen).cpu().split([len(c) for c in chosen])
        for matrix, important, selected in zip(self.matrices.values(), chosen, on_host):
            self._move(matrix, selected)
            matrix.important, matrix.selected = important, selected
        self._shard.session.set_step(self._shard.session.step)
        self.session.set_step(steps)

    def move_home(self, steps: int) -> None:
        """Moves all columns home. The state of the shard is then of ``steps``."""
        for matrix in self.matrices.values():
            self._move(matrix, None)
            matrix.important = matrix.selected = None
        self._shard.session.set_step(steps)
        # A state that is written and has no step counts as none: nobody will go on from it.
        self.session.write(protocol.MASTER_WEIGHTS, 0, self.session.read(protocol.MASTER_WEIGHTS, 0, 1))

    def _move(self, matrix: Matrix, to: Optional[torch.Tensor]) -> None:
        """Moves columns home that are away, and those in ``to`` here."""
        before = matrix.selected
        if before is not None and to is not None and torch.equal(before, to):
            return
        home, step = self._shard.session, max(1, _BLOCK // matrix.columns)
        for stream in _STREAMS:
            for row in range(0, matrix.rows, step):
                rows = min(step, matrix.rows - row)
                at, here = matrix.slot.piece.offset + row * matrix.columns, matrix.offset + row * matrix.kept
                whole = home.read(stream, at, rows * matrix.columns).reshape(rows, matrix.columns)
                if before is not None:
                    whole[:, before.numpy()] = self.session.read(stream, here, rows * matrix.kept).reshape(rows, matrix.kept)
                    home.write(stream, at, whole.reshape(-1))
                if to is not None:
                    self.session.write(stream, here, np.ascontiguousarray(whole[:, to.numpy()]).reshape(-1))


def _tensor(arena: Arena, matrix: Matrix) -> torch.Tensor:
    dtype = DTYPES[arena.type]
    return torch.frombuffer(arena.memory, dtype=dtype, count=matrix.count, offset=matrix.offset * dtype.itemsize)
