"""Hooks on the modules of a model whose parameters are those of an earlier step for a while."""

import weakref
from typing import Any, Callable, List

import torch


class ModelHooks:
    """Calls ``synchronize`` before the parameters of any module are saved or loaded, until removed."""

    def __init__(self, model: torch.nn.Module, synchronize: Callable[[], None]):
        call = weakref.WeakMethod(synchronize)

        def hook(*_: Any) -> None:
            method = call()
            if method is not None:
                method()

        self._handles: List[Any] = []
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(hook))
            self._handles.append(module._register_load_state_dict_pre_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
