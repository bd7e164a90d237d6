"""Operators that libraries compile when they are first used. Here they are never compiled, and compute nothing.

Kernels that are made for a program are compiled once: on a GPU that is not there, none is faster than another.
"""

import functools
import math
import re
import types
from typing import Any, List

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
    """Triton's kernels are compiled until it is known what memory they need. Nobody runs their code, or makes it fast."""
    llvm = compiler.llvm

    class Quick:
        """LLVM without its optimizer and its assembler."""

        def __getattr__(self, name: str) -> Any:
            return getattr(llvm, name)

        @staticmethod
        def optimize_module(*arguments: Any, **options: Any) -> None:
            return None

        @staticmethod
        def translate_to_asm(source: str, *arguments: Any, **options: Any) -> str:
            found = re.search(r"^define [^@\n]*\bptx_kernel void @(\w+)", source, re.M)
            found = found or re.search(r"^define (?!internal|private)[^@\n]*@(\w+)", source, re.M)
            return f".version 8.0\n.target sm_80\n.visible .entry {found[1]}()" if found else ""

    compiler.llvm = Quick()
    compiler.CUDABackend.make_cubin = lambda *arguments: b"no code"


def key_nothing(cache: Any) -> None:
    """Triton reads all of itself for the keys of its cache, which begins empty and serves one run here."""
    if hasattr(cache, "triton_key"):
        cache.triton_key = lambda: "plimsoll"


def compile_first(heuristics: Any) -> None:
    """Inductor's kernels: the first of their configurations that can be compiled, and no search for a faster one."""
    tuner = heuristics.CachingAutotuner
    name = "_precompile_worker" if hasattr(tuner, "_precompile_worker") else "precompile"  # before torch 2.7
    compile_all = getattr(tuner, name)
    no_configs = getattr(heuristics, "NoTritonConfigsError", RuntimeError)

    @functools.wraps(compile_all)
    def compile_one(self, *arguments, **options):
        compiled = getattr(self, "compile_results", None) or getattr(self, "launchers", None)
        for config in self.configs[:-1] if self.configs and not compiled else ():
            others, self.configs = self.configs, [config]
            try:
                return compile_all(self, *arguments, **options)
            except no_configs:
                self.configs = others[1:]
        return compile_all(self, *arguments, **options)

    setattr(tuner, name, compile_one)
    tuner.coordinate_descent_tuning = lambda self, launcher, *arguments, **options: launcher


def choose_first(algorithms: Any) -> None:
    """Inductor's choices among kernels: the one of a library, or the first that can be compiled."""
    cache = algorithms.AlgorithmSelectorCache
    choose = cache.__call__

    @functools.wraps(choose)
    def choose_one(self, name, choices, *arguments, **options):
        return choose(self, name, _usual(algorithms, choices), *arguments, **options)

    cache.__call__ = choose_one


def _usual(algorithms: Any, choices: List[Any]) -> List[Any]:
    if len(choices) < 2:
        return choices
    for choice in choices:
        if isinstance(choice, algorithms.ExternKernelCaller):
            return [choice]
    for choice in choices:
        try:
            choice.precompile()
        except Exception:  # it needs more than the device has
            continue
        return [choice]
    return choices


def tune_nothing(autotuner: Any) -> None:
    """Triton's own choice among configurations: the first that runs."""
    tuner = autotuner.Autotuner
    run, measure = tuner.run, tuner._bench

    @functools.wraps(run)
    def run_first(self, *arguments, **options):
        self._plimsoll_has_run = False
        return run(self, *arguments, **options)

    @functools.wraps(measure)
    def measure_first(self, *arguments, **options):
        if self._plimsoll_has_run:
            return [math.inf] * 3
        took = measure(self, *arguments, **options)
        self._plimsoll_has_run = math.isfinite(took[0] if isinstance(took, (list, tuple)) else took)
        return took

    tuner.run, tuner._bench = run_first, measure_first


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
