"""Updates that a model gets later than the step that made them."""

import os
from typing import Any, List, Optional

import torch

from plimsoll.torch.overlap import Hook, Serial
from plimsoll.torch.ranks import is_distributed
from plimsoll.torch.shards import Shards


class Behind(Serial):
    """Steps whose update a model with parameters of its own gets later. Modules that are saved or loaded get it first."""

    awaits = False
    defers_interrupts = True

    def __init__(self, mode: Any, model: Optional[torch.nn.Module], lock: Any):
        if model is None:
            raise ValueError(f"overlap is {mode}, but model is None: give the model, whose state_dict() waits for updates")
        self._mode, self._lock, self._owner = mode, lock, os.getpid()
        self._shards: Optional[Shards] = None  # while the optimizer is open
        hook = Hook(self._before_state)
        self._hooks: List[Any] = []
        for module in model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(hook))
            self._hooks.append(module._register_load_state_dict_pre_hook(hook))

    def _before_state(self, *_: Any) -> None:
        if os.getpid() == self._owner:
            with torch.inference_mode(False), torch.no_grad(), self._lock:
                self.synchronize()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def refuse(self, shards: Shards) -> None:
        several = is_distributed() and torch.distributed.get_world_size() > 1
        if shards.ranks.mesh.groups or shards.trained.are_sharded or several:
            raise ValueError(
                f"overlap is {self._mode}, and several ranks train: expected one rank with the full state; leave overlap None with zero1, "
                "zero2, FSDP and DistributedDataParallel"
            )

    def attach(self, shards: Shards) -> None:
        self._shards = shards

    def detach(self) -> None:
        self._shards = None

    def will_zero(self) -> None:
        """The gradients in the model are no longer those that an update reads."""
