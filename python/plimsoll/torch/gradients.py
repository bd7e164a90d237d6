"""The gradients of a model, from autograd's hooks to the shards."""

import os
import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set

import torch

from plimsoll.torch import layout
from plimsoll.torch.modes import ZenFlow
from plimsoll.torch.reducer import Reducer
from plimsoll.torch.samples import Fingerprint
from plimsoll.torch.settings import Settings
from plimsoll.torch.shard import Shard
from plimsoll.torch.shards import Shards
from plimsoll.torch.slot import Slot


class LeftAlone(NamedTuple):
    """Parameters that a step leaves alone: their names and, by shard, the places of those that this rank has."""

    names: Sequence[str] = ()
    places: Dict[str, List[int]] = {}

    def number(self) -> int:
        """A number that tells whether ranks leave the same parameters alone. Squares of it are added up exactly."""
        return zlib.crc32("\n".join(self.names).encode()) & 0xFFFFF if self.names else 0


def _places_without(shard: Shard, having: Set[torch.Tensor]) -> List[int]:
    return [place for place, piece in enumerate(shard.group.own) if piece.parameter not in having]


class Gradients:
    """Takes gradients to the shards as autograd makes them, and checks whether a step can be made of them.

    A hook holds ``lock`` while it runs: hooks run on autograd's threads, one for each device.
    """

    def __init__(self, shards: Shards, settings: Settings, lock: Any):
        self._settings, self._lock = settings, lock
        self._shards, self._trained, self._ranks, self._transfer = list(shards), shards.trained, shards.ranks, shards.transfer
        self._reducer: Optional[Reducer] = None
        if settings.sharding == "zero2":
            shard_of = {piece.parameter: shard for shard in shards for piece in shard.group.pieces}
            ours = [p for p in shards.trained.parameters if p in shard_of]

            def reduce(parameter: torch.Tensor, has_come: bool) -> None:
                shard_of[parameter].gradients.reduce(parameter, has_come)

            self._reducer = Reducer(ours, shards.ranks.mesh, shards.trained.device, reduce)
        self._hooks: List[Any] = []
        #: The parameters that the step leaves alone, as they have no gradients: known when :meth:`check` has returned.
        self.left_alone = LeftAlone()

    @property
    def are_reduced(self) -> bool:
        """Whether gradients are sent to their owners during the backward pass."""
        return self._reducer is not None

    def hook(self) -> None:
        """Puts a hook on every parameter. It runs when autograd has accumulated the parameter's gradient."""
        if self._settings.sharding == "zero1":
            return  # gradients are averaged once all of them are there
        for shard in self._shards:
            for parameter in {p.parameter for p in shard.group.pieces}:
                if layout.is_offloaded(parameter):
                    continue  # some versions of fully_shard call hooks while the gradient is still in flight to the host
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook_of(shard)))

    def _hook_of(self, shard: Shard) -> Callable[[torch.Tensor], None]:
        owner = os.getpid()

        def hook(parameter: torch.Tensor) -> None:
            if os.getpid() == owner:  # in a forked child, gradients are its own
                self._accumulated(parameter, shard)

        return hook

    def _accumulated(self, parameter: torch.Tensor, shard: Shard) -> None:
        if self._transfer.is_capturing():
            # The step takes the gradients, because no hook runs when the graph is replayed.
            if self._reducer is None:
                return
            raise RuntimeError(
                "sharding is 'zero2', which takes gradients away in the backward pass, but this backward pass is captured "
                "for a CUDA graph: leave it out of the graph, or use sharding='zero1'"
            )
        if parameter.grad is None:
            return  # an earlier hook has made the step with it, and removed it
        with self._lock:
            if self._reducer is None:
                shard.gradients.accumulated(parameter)
            else:
                shard.gradients.check_dense(parameter)
                self._reducer.came(parameter)

    def remove_hooks(self) -> None:
        """Removes the hooks. Through them the model would keep the shards, and all that they have mapped."""
        for hook in self._hooks:
            hook.remove()

    def finish_reducing(self) -> None:
        """Waits until this rank has every gradient that any rank has."""
        if self._reducer is not None:
            self._reducer.finish()

    def check(self) -> bool:
        """Whether there are gradients. Raises if a required gradient is missing, or if these cannot belong to one
        step.
        """
        self.check_model()
        return self.check_all()

    def check_model(self) -> None:
        """Raises if the model is not the one that the state was made for."""
        for shard in self._shards:
            shard.parameters.check()
        self._trained.check_frozen()

    @property
    def must_be_all(self) -> bool:
        """Whether a step needs the gradient of every parameter."""
        return self._settings.missing_gradients == "refuse" or self._adds_up and self._settings.missing_gradients == "keep"

    @property
    def may_lack(self) -> bool:
        """Whether a step leaves parameters alone that have no gradients."""
        return self._settings.missing_gradients == "keep" and not self._adds_up

    @property
    def _adds_up(self) -> bool:
        """Whether gradients of several steps are added up: then no step can leave a parameter alone."""
        return isinstance(self._settings.overlap, ZenFlow)

    def check_all(self) -> bool:
        """Whether there are gradients. Raises if a required gradient is missing."""
        # All ranks must find the same, whatever shards they have.
        having: Set[torch.Tensor] = {p for p in self._trained.parameters if p.grad is not None}
        if not having and not (self._reducer is not None and self._reducer.own):
            return False
        if self._reducer is not None:
            having = self._reducer.all
        names = sorted({x.name for shard in self._shards for x in shard.group.pieces if x.parameter not in having})
        if names:
            self._refuse_missing(names)
        if self.may_lack:
            self.left_alone = LeftAlone(names, {shard.name: _places_without(shard, having) for shard in self._shards})
        return True

    def _refuse_missing(self, names: List[str]) -> None:
        """Raises RuntimeError unless missing gradients count as zero."""
        if self.must_be_all:
            raise RuntimeError(
                f"{len(names)} parameters have no gradient, {names[0]} among them: every step updates all parameters. Freeze them before the "
                "optimizer is made (requires_grad_(False)), or count their gradients as zero (missing_gradients='zero'), which lets their "
                "moments and weights decay. A weight that was tied to another, or replaced, after the optimizer was made never gets one: "
                "make the optimizer after that" + ("" if self._adds_up else ". Or leave them alone (missing_gradients='keep')")
            )

    def collect(self, *, anew: bool) -> None:
        """Brings missing gradients to the arenas: all gradients with ``anew``."""
        for shard in self._shards:
            shard.gradients.collect(self.are_reduced, anew or self._settings.gradients == "step")

    def left_alone_number(self) -> int:
        """A number that ranks with the same parameters must agree on."""
        return 0 if self._ranks.mesh.is_local else self.left_alone.number()

    def leave_missing(self) -> None:
        """Leaves the parameters without gradients alone in a step that was begun before its gradients were there."""
        for shard in self._shards:
            for place in self.left_alone.places.get(shard.name, ()):
                piece = shard.group.own[place]
                shard.gradients.clear(shard.slots[piece.parameter])  # the norm counts them as zero
                shard.session.missing(piece.offset, piece.count)

    def fingerprint(self) -> Fingerprint:
        """A fingerprint of this rank's gradients, if all ranks must have the same: the optimizer does not average
        them here.
        """
        if not self._ranks.are_heard or self._ranks.mesh.is_local or self.are_reduced or self._trained.are_sharded:
            return Fingerprint()
        return Fingerprint.of([piece for shard in self._shards for piece in shard.group.pieces])

    def discard(self) -> None:
        """Discards the gradients that have left the model."""
        if self._reducer is not None:
            with self._lock:
                self._reducer.discard()
                self.forget()

    def changed(self, slots: Sequence[Slot]) -> List[Slot]:
        """The slots whose gradients are not what autograd left."""
        accumulated = [(slot, slot.piece.parameter.grad) for slot in slots if slot.accumulated is not None]
        return [slot for slot, gradient in accumulated if gradient is not None and not slot.is_as_left(gradient)]

    def give_up(self) -> None:
        """Discards all gradients, as the step that waited for them is given up."""
        for shard in self._shards:
            shard.gradients.give_up()

    def forget(self) -> None:
        """Prepares for the gradients of another step."""
        if self._reducer is not None:
            self._reducer.over()
        for shard in self._shards:
            shard.gradients.forget()
