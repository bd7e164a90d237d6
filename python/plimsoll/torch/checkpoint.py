"""Checkpoints and state_dicts, to and from the shards of all ranks."""

import contextlib
import os
import secrets
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from plimsoll.errors import PlimsollError
from plimsoll.torch import environment
from plimsoll.torch.algorithm import Algorithm
from plimsoll.torch.ranks import APART
from plimsoll.torch.shards import Shards
from plimsoll.torch.state_dict import check_entries, write_entries


class Saver:
    """Saves and loads checkpoints, and keeps track of the save under way."""

    def __init__(self) -> None:
        self._saving: Optional[Tuple[str, int, str]] = None  # directory, step and identity
        self._saves_in_vain = False  # some ranks may be writing files that become no checkpoint

    def save(self, shards: Shards, directory: Any, training: Any, check: Callable[[], None]) -> int:
        """Begins to save, unless ``check`` fails on a rank. Returns the step that is saved."""
        ranks, sessions = shards.ranks, shards.sessions
        _refuse_local(shards)
        if not ranks.are_heard and environment.world() > 1:
            raise RuntimeError(
                "every rank has the full state and does not communicate with the others: give the optimizer the ranks "
                "(process_group=), or sharding, or save with one rank alone"
            )
        directory = os.path.abspath(directory)  # the program may change its directory meanwhile
        if self._saves_in_vain:
            for session in sessions:
                with contextlib.suppress(PlimsollError):  # nobody has asked for its result
                    session.saved()
        self._saving, self._saves_in_vain = None, True
        identity = ranks.gather([secrets.token_hex(16)])[0]  # the first rank's, for the files of all

        def begin() -> List[int]:
            check()
            shards.take_weights()
            os.makedirs(directory, exist_ok=True)
            of_all = ranks.mesh.replica, ranks.mesh.replicas
            return [session.save(directory, training, *of_all, identity=identity) for session in sessions]

        begun = ranks.agree(f"saving to {directory}", begin)
        steps = {step for of_rank in begun for step in of_rank}
        if len(steps) > 1:
            raise PlimsollError(APART)
        step = steps.pop()
        self._saving, self._saves_in_vain = (directory, step, identity), False
        return step

    def saved(self, shards: Shards) -> int:
        """Waits until all ranks have written the save under way, and makes it a checkpoint. Returns its step."""
        if self._saving is None:
            raise RuntimeError("saved: no save is in progress: call save first")
        (directory, step, identity), self._saving = self._saving, None
        ranks, sessions = shards.ranks, shards.sessions
        saves = f"saving step {step} to {directory}"

        def wait() -> bool:
            # Ask all, whatever the first says: the next save begins anew.
            found, failure = [], None
            for session in sessions:
                try:
                    found.append(session.saved())
                except PlimsollError as error:
                    failure = error
            if failure is not None:
                raise failure
            if any(f != step for f in found):
                raise PlimsollError(
                    f"step {step} was not saved to {directory}: the service was started again during the save; call save "
                    "again"
                )
            return bool(sessions)

        def commit() -> None:
            # If a model is too small for all ranks, the first rank may have nothing.
            if ranks.mesh.number == having.index(True):
                without = [rank for rank, has in enumerate(having) if not has]
                sessions[0].commit(directory, step, without, identity=identity)

        having = ranks.agree(saves, wait)
        ranks.agree(saves, commit)
        return step

    def forget(self) -> None:
        """Leaves the save under way to the service, as the optimizer is closed."""
        self._saving = None

    def load(self, shards: Shards, directory: Any) -> Any:
        """Loads a checkpoint into the state and the model. Returns its training document."""
        _refuse_local(shards)
        ranks, sessions = shards.ranks, shards.sessions
        several = len(sessions) > 1 or ranks.are_heard
        loads = f"loading {directory}"
        shards.will_change()
        every = ranks.agree(loads, lambda: [s.load(os.fspath(directory), several=several) for s in sessions])
        loaded = [x for of_rank in every for x in of_rank]
        steps = {step for step, _ in loaded}
        if len(steps) > 1:
            raise PlimsollError(
                f"the ranks or parts have loaded different steps from {directory}: {', '.join(map(str, sorted(steps)))}; "
                "load one checkpoint by its name, such as step-00000300"
            )
        own = every[ranks.mesh.number]
        step, training = own[0] if own else loaded[0]
        if several:
            shards.set_step(loads, step)
        shards.adopt(step)
        return training


def _refuse_local(shards: Shards) -> None:
    """Refuses a checkpoint of parameters that have the same places in the states of several ranks."""
    if shards.ranks.mesh.is_local and shards.ranks.mesh.world > 1:
        raise RuntimeError(
            "sharding is 'local', so nobody knows which parameters of the ranks belong together: expected the program's own "
            "checkpoints, of each rank's state_dict()"
        )


def fit_entries(
    shards: Shards, algorithm: Algorithm, entries: Callable[[], Dict[torch.Tensor, Any]]
) -> Tuple[int, Dict[torch.Tensor, Any]]:
    """The step of a state_dict's entries, and this rank's entries. Raises if they do not fit on some rank."""
    given: Dict[torch.Tensor, Any] = {}

    def fit() -> int:
        found = entries()
        # Others may be at other steps, since they were frozen.
        given.update((p, found[p]) for p in shards.trained.parameters if p in found)
        return check_entries(shards, algorithm, given)

    steps = shards.ranks.agree("load_state_dict", fit)
    if len(set(steps)) > 1:
        raise PlimsollError(f"load_state_dict: the ranks have states of different steps, {steps}: give all ranks the same one")
    return steps[0], given


def replace_state(shards: Shards, algorithm: Algorithm, step: int, entries: Dict[torch.Tensor, Any]) -> None:
    """Replaces the state by entries that fit."""
    shards.will_change()
    shards.ranks.agree("load_state_dict", lambda: write_entries(shards, algorithm, entries))
    shards.set_step("load_state_dict", step)
    shards.resume(step)
    for shard in shards:
        shard.parameters.pull(after_step=False)
