"""For the Trainer of Hugging Face transformers: checkpoints of the optimizer's state beside the Trainer's own."""

import os
from typing import Any, List, Optional

import transformers

from plimsoll.errors import PlimsollError
from plimsoll.torch.optimizer import Optimizer

_FOLDER = "plimsoll"


class CheckpointCallback(transformers.TrainerCallback):
    """Saves the optimizer's state into every checkpoint of the Trainer, and loads it where training goes on from one.

    ``checkpoint-N/plimsoll`` is a checkpoint as :meth:`Optimizer.save` writes it: any number of ranks can load it, in any format.
    The Trainer's ``optimizer.pt`` then has the parameter groups alone; scheduler, random numbers and model are the Trainer's as
    before. As it removes old checkpoints (``save_total_limit``), it removes these with them.

    ``background``: training goes on while the state is written, and the next save, or the end, waits for it. Where the program
    ends before, that checkpoint has no state, and training goes on from the one before it.

    ``resume_from_checkpoint``: what was given to ``Trainer.train``, where that is not in the Trainer's output folder.
    """

    def __init__(self, background: bool = False, resume_from_checkpoint: Optional[str] = None):
        self.background, self.resume_from_checkpoint = background, resume_from_checkpoint
        self._optimizer: Optional[Optimizer] = None
        self._saving = False

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._optimizer, self._saving = _unwrap(optimizer), False
        self._optimizer.saves_state_apart = True
        if state.global_step > 0:
            self._load(self.resume_from_checkpoint or _checkpoint(args, state))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # What is still being written could be what the Trainer is about to remove.
        if control.should_save:
            self._finish()

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._finish()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._optimizer is not None
        self._finish()
        place = os.path.join(_checkpoint(args, state), _FOLDER)
        self._optimizer.save(place, training={"saved_with": self._optimizer.saved_with(), "trainer_step": state.global_step})
        self._saving = True
        if not self.background:
            self._finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._optimizer is not None
        self._finish()
        self._optimizer.saves_state_apart = False

    def _finish(self) -> None:
        if self._saving:
            self._saving = False
            assert self._optimizer is not None
            self._optimizer.saved()

    def _load(self, checkpoint: str) -> None:
        assert self._optimizer is not None
        place = os.path.join(checkpoint, _FOLDER)
        awaited = self._optimizer.awaits_state
        if not os.path.isdir(place) and awaited is None and self._optimizer.state:
            return  # the Trainer's own checkpoint had the state
        try:
            training = self._optimizer.load(place)
        except PlimsollError as error:
            whole = _whole_checkpoints(os.path.dirname(os.path.abspath(checkpoint)))
            raise PlimsollError(
                f"training cannot go on from {checkpoint}, which has no complete state of the optimizer in {place}: "
                f"{error}. "
                + (
                    f"Give resume_from_checkpoint a checkpoint with a complete state: {', '.join(whole)}"
                    if whole
                    else "No checkpoint beside it has one"
                )
            ) from error
        found = training.get("saved_with") if isinstance(training, dict) else None
        if awaited not in (None, found):
            raise PlimsollError(
                f"the state in {place} was not saved with the checkpoint that the Trainer has loaded: give its folder to "
                "CheckpointCallback(resume_from_checkpoint=...), too"
            )


def _checkpoint(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"{transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _whole_checkpoints(folder: str) -> List[str]:
    """The checkpoints of a Trainer that have a whole state, the newest first."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        place = os.path.join(folder, name, _FOLDER)
        if os.path.isdir(place) and any(entry.startswith("step-") for entry in os.listdir(place)):
            found.append(os.path.join(folder, name))
    return sorted(found, key=os.path.getmtime, reverse=True)


def _unwrap(optimizer: Any) -> Optimizer:
    """The optimizer within what accelerate has made of it."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"CheckpointCallback: the Trainer's optimizer is a {type(optimizer).__name__}: expected one of plimsoll.torch; "
            "give it to the Trainer (optimizers=, or optimizer_cls_and_kwargs=), or leave the callback out"
        )
    return optimizer
