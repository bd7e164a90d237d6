"""For the Trainer of Hugging Face transformers, and for those that are made from it: the optimizer's state on the host, and
checkpoints of it beside the Trainer's own.
"""

import os
from typing import Any, Dict, List, Optional, Type

import torch
import transformers

import plimsoll.torch
from plimsoll.errors import PlimsollError
from plimsoll.torch.optimizer import Optimizer

_FOLDER = "plimsoll"

#: Our optimizers, by those that ``TrainingArguments.optim`` names.
_OURS: Dict[Type[torch.optim.Optimizer], Type[Optimizer]] = {
    torch.optim.AdamW: plimsoll.torch.AdamW,
    torch.optim.SGD: plimsoll.torch.SGD,
    torch.optim.Adagrad: plimsoll.torch.Adagrad,
}

#: What ``TrainingArguments.optim_args`` may say of them.
_OPTIONS = ("state", "moments", "overlap", "sharding", "missing_gradients", "gradients", "name", "job", "socket")


class TrainerMixin:
    """Goes before the Trainer among the bases of a class. The optimizer that ``TrainingArguments`` ask for then has its state
    on the host, as ``plimsoll.torch`` holds it:

        class SFTTrainer(plimsoll.transformers.TrainerMixin, trl.SFTTrainer):
            pass

    ``optim`` is "adamw_torch", "adamw_torch_fused", "sgd" or "adagrad". ``optim_args`` takes options of
    :class:`plimsoll.torch.AdamW` in the Trainer's form, as ``"moments=int8,overlap=none"``.

    * The step clips by ``max_grad_norm``, and the logs have its norm: nothing passes over the gradients a second time.
    * Where each parameter is read by its own module alone, the update goes on behind the next forward pass
      (``overlap="forward"``). That holds for models, losses and callbacks of transformers. Those of somebody else might do
      otherwise: ``optim_args="overlap=forward"`` says that they do not.
    * Under DistributedDataParallel each rank holds the state of its part of the parameters (``sharding="zero1"``).
    * Each checkpoint has the state, as :class:`CheckpointCallback` writes it.
    """

    def create_optimizer(self, *arguments: Any, **named: Any) -> torch.optim.Optimizer:
        asked = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            model = (arguments or (named.get("model"),))[0] or self.model
            self.optimizer_cls_and_kwargs = (self._on_the_host(model), {})
        try:
            created = super().create_optimizer(*arguments, **named)
        finally:
            self.optimizer_cls_and_kwargs = asked
        if isinstance(self.optimizer, Optimizer):
            # The Trainer clips and takes the norm here. Both are the step's: None has the Trainer go on without a norm.
            self.accelerator.clip_grad_norm_ = lambda *_, **__: None
            if not any(isinstance(c, CheckpointCallback) for c in self.callback_handler.callbacks):
                self.add_callback(CheckpointCallback(resume_from_checkpoint=self._resume_from))
        return created

    _resume_from: Optional[str] = None

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        self._resume_from = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        return super().train(resume_from_checkpoint, *arguments, **named)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *arguments: Any, **named: Any) -> None:
        optimizer = _within(self.optimizer)
        if isinstance(optimizer, Optimizer):
            grad_norm = optimizer.last_grad_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **named)

    def _on_the_host(self, model: torch.nn.Module) -> Type[Optimizer]:
        """A class of optimizers that need no argument but the parameters. An argument ``model`` would be for another class: the
        Trainer takes it for the parameters.
        """
        options = _options(self.args.optim_args)
        if options.get("sharding") == "zero2" and self._is_distributed:
            raise ValueError(
                "optim_args has 'sharding=zero2', but the Trainer's DistributedDataParallel averages gradients itself: leave "
                "sharding out, which is zero1 then"
            )
        if self.optimizer_cls_and_kwargs is not None:
            asked, given = self.optimizer_cls_and_kwargs
        else:
            asked, given = self.get_optimizer_cls_and_kwargs(self.args, model)
        ours = _OURS.get(asked)
        if ours is None:
            raise ValueError(
                f"optim is {self.args.optim!r}, which is {asked.__name__}: expected adamw_torch, adamw_torch_fused, sgd or adagrad, "
                "which plimsoll.torch has; for moments of 8 bits give optim_args='moments=int8'"
            )
        if self.is_deepspeed_enabled:
            raise ValueError("DeepSpeed updates the parameters itself: give no DeepSpeed configuration, or use transformers.Trainer")
        limit = self.args.max_grad_norm
        # The Trainer logs the norm also where it does not clip.
        norm = limit if limit and limit > 0 else float("inf")
        given = {**given, **self._defaults(model), "model": model, "max_grad_norm": norm, **options}
        return type(ours.__name__, (ours,), {"__init__": lambda self, params: ours.__init__(self, params, **given)})

    def _defaults(self, model: torch.nn.Module) -> Dict[str, Any]:
        """The options of the optimizer that optim_args does not give."""
        options: Dict[str, Any] = {"overlap": "forward" if self._reads_no_parameters(model) else None}
        if self._is_distributed and not self.is_fsdp_enabled:
            options.update(sharding="zero1", process_group=torch.distributed.group.WORLD)
        return options

    @property
    def _is_distributed(self) -> bool:
        return self.args.parallel_mode == transformers.training_args.ParallelMode.DISTRIBUTED

    def _reads_no_parameters(self, model: torch.nn.Module) -> bool:
        """Whether all that runs between a step and the next forward pass, and in it, is known to read parameters in the forward
        passes of their own modules alone. Liger's fused loss does not: it reads the weight of a head that it does not call.
        """
        if getattr(self, "compute_loss_func", None) is not None or self.args.n_gpu > 1:
            return False  # DataParallel copies all parameters to other GPUs before the forward pass
        homes = {type(c).__module__ for c in self.callback_handler.callbacks}
        homes |= {getattr(type(self), name).__module__ for name in ("compute_loss", "training_step")}
        for module in model.modules():
            homes |= {type(module).__module__, getattr(module.forward, "__module__", "")}
        return {home.partition(".")[0] for home in homes} <= {"torch", "transformers", "peft", "plimsoll"}


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers.Trainer with its optimizer's state on the host: see :class:`TrainerMixin`."""


def _options(text: Optional[str]) -> Dict[str, Any]:
    """Options of our optimizers, from optim_args of the Trainer."""
    options: Dict[str, Any] = {}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        name, is_given, value = part.partition("=")
        if name not in _OPTIONS or not is_given:
            raise ValueError(f"optim_args has {part!r}: expected NAME=VALUE with one of {', '.join(_OPTIONS)}")
        options[name] = None if value.lower() == "none" else value
    return options


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


def _within(optimizer: Any) -> Any:
    """The optimizer within what accelerate has made of it."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _unwrap(optimizer: Any) -> Optimizer:
    optimizer = _within(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"CheckpointCallback: the Trainer's optimizer is a {type(optimizer).__name__}: expected one of plimsoll.torch; "
            "give it to the Trainer (optimizers=, or optimizer_cls_and_kwargs=), or leave the callback out"
        )
    return optimizer
