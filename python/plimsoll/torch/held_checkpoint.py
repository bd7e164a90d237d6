"""Checkpoints of a held state: the service writes and reads them, and the device has no part in it."""

import json
import os
import secrets
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from plimsoll.errors import PlimsollError
from plimsoll.held import HeldStates
from plimsoll.torch.layout import Mesh
from plimsoll.torch.ranks import APART, Ranks, is_distributed


def all_ranks() -> Ranks:
    """The ranks of the job, each of which has a session of its own."""
    if not is_distributed():
        return Ranks(Mesh())
    world = torch.distributed.group.WORLD
    return Ranks(Mesh(torch.distributed.get_rank(), torch.distributed.get_world_size(), (world,)))


class Saved(NamedTuple):
    """The document of a checkpoint: the program's own, and what the optimizer has beside the state of its parameters."""

    training: Any
    optimizer: Optional[Dict[str, Any]]

    @classmethod
    def of(cls, document: Any) -> "Saved":
        if isinstance(document, dict) and document.get("schema") == _SCHEMA:
            return cls(document["training"], document["optimizer"])
        return cls(document, None)  # of an earlier release

    def document(self) -> Dict[str, Any]:
        return {"schema": _SCHEMA, "training": self.training, "optimizer": self.optimizer}


_SCHEMA = "plimsoll.state-offload/1"
_LARGEST = 60 << 10  # a message of 64 KiB also has the directory


class HeldSaver:
    """Saves and loads, and keeps track of the save under way."""

    def __init__(self, session: Optional[HeldStates]):
        self._sessions = [session] if session is not None else []  # a rank without elements has none
        self._saving: Optional[Tuple[str, int, str]] = None  # directory, step and identity

    def save(self, directory: Any, step: int, optimizer: Dict[str, Any], training: Any) -> int:
        """Begins to save the state of a step, which the next steps may follow at once."""
        document = Saved(training, optimizer).document()
        size, own = len(json.dumps(document)), len(json.dumps(optimizer))
        if size > _LARGEST:
            raise ValueError(
                f"save: training has {size - own} bytes, and the options of the optimizer {own}: expected at most {_LARGEST} together; keep "
                "larger things in files of their own"
            )
        ranks, directory = all_ranks(), os.path.abspath(directory)
        identity = ranks.gather([secrets.token_hex(16)])[0]

        def begin() -> Tuple[int, bool]:
            os.makedirs(directory, exist_ok=True)
            for session in self._sessions:
                session.save(directory, step, document, identity=identity)
            return step, bool(self._sessions)

        begun = ranks.agree(f"saving to {directory}", begin)
        if len({step for step, _ in begun}) > 1:
            raise PlimsollError(APART)
        if not any(has for _, has in begun):
            raise RuntimeError(
                "save: there is nothing to save, as the optimizer has no state, and without recovery there are no parameters: keep its "
                "state_dict(), or give StateOffload recovery=True"
            )
        self._saving = directory, step, identity
        return step

    def saved(self) -> int:
        """Waits until all ranks have written the save under way, and makes it a checkpoint. Returns its step."""
        if self._saving is None:
            raise RuntimeError("saved: no save is in progress: call save first")
        (directory, step, identity), self._saving = self._saving, None
        ranks, saves = all_ranks(), f"saving step {step} to {directory}"

        def wait() -> bool:
            if any(session.saved() != step for session in self._sessions):
                raise PlimsollError(f"step {step} was not saved to {directory}: the service was started again; call save again")
            return bool(self._sessions)

        having: List[bool] = ranks.agree(saves, wait)

        def commit() -> None:
            if ranks.mesh.number == having.index(True):
                without = [rank for rank, has in enumerate(having) if not has]
                self._sessions[0].commit(directory, step, without, identity=identity)

        ranks.agree(saves, commit)
        return step

    def load(self, directory: Any, take: Callable[[Saved], None]) -> Saved:
        """Loads a checkpoint, or the newest in a folder. ``take`` gets what it has beside the state of parameters."""
        ranks, loads = all_ranks(), f"loading {directory}"
        several = ranks.are_heard
        every = ranks.agree(loads, lambda: [s.load(os.fspath(directory), several=several) for s in self._sessions])
        loaded = [x for of_rank in every for x in of_rank]
        if len({step for step, _ in loaded}) != 1:
            raise PlimsollError(f"{loads}: the ranks have loaded different steps: load one checkpoint by its name, such as step-00000300")
        own = every[ranks.mesh.number]
        step, document = own[0] if own else loaded[0]
        saved = Saved.of(document)
        ranks.agree(loads, lambda: take(saved))
        if several:
            ranks.agree(loads, lambda: [session.set_step(step) for session in self._sessions])
        return saved
