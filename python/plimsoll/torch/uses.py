"""How a program uses parameters between two steps. What overlaps with the forward pass is learned from the first."""

from typing import Callable, Dict, Iterable, List, Optional, Sequence, Set

import torch

from plimsoll.torch.embedding_rows import has_others

_UNAWAITED = (
    "got a gradient, but no forward pass of a module that owns it has waited for its update: it may have been read before. This step is "
    "refused, and its gradients are of no use: call optimizer.zero_grad() and go on, from the next step on it is awaited in "
    "optimizer.step(). Or call optimizer.synchronize() before it is read"
)

_UNREAD = (
    "was read by no forward pass of a module that owns it since the last step: it has no gradient, or was read before its update was "
    "awaited. The backward pass is refused before the step has begun: call optimizer.zero_grad() and go on"
)


class Uses:
    """The uses of parameters, by round: all forward and backward passes up to a step.

    ``leave`` means that gradients leave the parameters in the backward pass.
    """

    def __init__(self, *, leave: bool) -> None:
        self._leave = leave
        self._round = 0
        self._is_learned = False
        self._read: Dict[torch.Tensor, int] = {}  # the last round in which a module has read a parameter, as a hook told
        self._rows: Dict[torch.Tensor, List[torch.Tensor]] = {}  # ids of this round, of parameters that were read by rows only
        self._order: Dict[torch.Tensor, None] = {}  # what was read as a whole, in the order of the first round
        self._at_step: Set[torch.Tensor] = set()  # what is read without a hook
        self._unused: Set[torch.Tensor] = set()  # what was not used when this was learned
        self._unawaited: Set[torch.Tensor] = set()  # whose gradients of this round may be wrong
        self._left: Set[torch.Tensor] = set()  # whose gradients of this round have left
        self._whole: Set[torch.Tensor] = set()  # read by rows, but the gradient of this round has others

    @property
    def at_step(self) -> Set[torch.Tensor]:
        """The parameters that the step must wait for."""
        return self._at_step | self._unused

    def read(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records that a module is about to read parameters."""
        for parameter in parameters:
            self._read[parameter] = self._round
            self._rows.pop(parameter, None)
            if not self._is_learned:
                self._order.setdefault(parameter)

    def reads_rows(self, parameter: torch.Tensor) -> bool:
        """Whether the look-ups of an embedding may wait for their rows only."""
        return parameter not in self._at_step

    def read_rows(self, parameter: torch.Tensor, ids: torch.Tensor) -> None:
        """Records that a module is about to read rows, for a backward pass."""
        if self._read.get(parameter) == self._round and parameter not in self._rows:
            return  # it was read as a whole
        self._read[parameter] = self._round
        self._rows.setdefault(parameter, []).append(ids)

    def gradient(self, parameter: torch.Tensor, gradient: Optional[torch.Tensor], is_missing: bool) -> None:
        """Records that a gradient arrives, of a parameter that may be missing. The gradient is this rank's alone, where
        it is known.
        """
        if self._leave:
            self._left.add(parameter)
        elif parameter.grad is None:
            self._unawaited.discard(parameter)  # what was accumulated before is gone
            self._whole.discard(parameter)
        ids = self._rows.get(parameter)
        if ids is not None and gradient is not None and has_others(gradient, ids):
            self._whole.add(parameter)
        if not self._is_learned:
            return
        if self._read.get(parameter) == self._round:
            self._unused.discard(parameter)
        elif parameter not in self._at_step and parameter not in self._unused or is_missing:
            self._unawaited.add(parameter)

    def _has_gradient(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is not None or parameter in self._left

    def check(self, parameters: Sequence[torch.Tensor], name: Callable[[torch.Tensor], str]) -> None:
        """Learns from the first gradients. Raises RuntimeError if later ones may come from parameters of two steps."""
        given = set(parameters)
        whole = {p for p in self._whole & given if self._has_gradient(p)}
        if not self._is_learned:
            self._learn(parameters, whole)
            return
        bad = {p for p in self._unawaited & given if self._has_gradient(p)} | (whole - self._at_step)
        self._unawaited |= bad
        self._refuse(bad, name, _UNAWAITED)

    def check_read(self, parameters: Iterable[torch.Tensor], name: Callable[[torch.Tensor], str]) -> None:
        """Raises RuntimeError if one of these parameters, which will get gradients, was read by no module."""
        self._refuse(self.unread(parameters), name, _UNREAD)

    def unread(self, parameters: Iterable[torch.Tensor]) -> Set[torch.Tensor]:
        """Those of some parameters that no module has read since the last step."""
        return {p for p in parameters if self._read.get(p) != self._round and p not in self.at_step}

    def _refuse(self, bad: Set[torch.Tensor], name: Callable[[torch.Tensor], str], why: str) -> None:
        if bad:
            self._at_step |= bad
            names = sorted(map(name, bad))
            raise RuntimeError(f"parameter {names[0]} {f'(and {len(names) - 1} more) ' if names[1:] else ''}{why}")

    def _learn(self, parameters: Sequence[torch.Tensor], whole: Set[torch.Tensor]) -> None:
        self._unused = {p for p in parameters if not self._has_gradient(p)}
        self._at_step = whole | {p for p in parameters if self._has_gradient(p) and self._read.get(p) != self._round}
        self._is_learned = True

    def in_order(self, parameters: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Parameters in the order in which they are needed: in the step, by the forward pass, and those read by rows."""
        first = self.at_step
        place = {p: i for i, p in enumerate(self._order)}
        return sorted(parameters, key=lambda p: -1 if p in first else place.get(p, len(place)))

    def discard(self) -> None:
        """Records that all gradients are gone."""
        self._unawaited.clear()
        self._left.clear()
        self._whole.clear()

    def over(self) -> None:
        """Begins the next round, after a step."""
        self._round += 1
        self._rows.clear()
        self.discard()
