"""Operators that libraries compile when they are first used. Here they are never compiled, and compute nothing."""

import types
from typing import Any

# Operators that only move tensors, and are done by torch.
_UTILS = ("flatten", "unflatten")


def install(builder: Any, recorder: Any) -> None:
    """Replaces what DeepSpeed's builders load."""

    def load(self, verbose: Any = None) -> Any:
        recorder.note("operators", f"DeepSpeed's {self.name} was not compiled, and computes nothing")
        return _Module(self.name)

    builder.OpBuilder.load = load
    builder.OpBuilder.jit_load = load
    builder.OpBuilder.is_compatible = lambda self, verbose=False: True


def assemble_nothing(compiler: Any) -> None:
    """Triton's kernels are compiled until their assembly, which says what they need. Nobody runs their machine code."""
    compiler.CUDABackend.make_cubin = lambda *arguments: b"no code"


class _Module(types.ModuleType):
    """A module of operators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _UTILS:
            return getattr(_torch_utils(), f"_{name}_dense_tensors")
        return _nothing


def _torch_utils() -> Any:
    import torch._utils

    return torch._utils


def _nothing(*arguments: Any, **options: Any) -> int:
    return 0
