"""Actions after the import of a module."""

import importlib.abc
import importlib.util
import sys
from typing import Any, Callable


class _After(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[Any], Any]):
        self._name, self._action, self._is_finding = name, action, False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name or self._is_finding:
            return None
        self._is_finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_finding = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: Any) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def after(name: str, action: Callable[[Any], Any]) -> None:
    """Calls ``action`` with a module as soon as the program has imported it."""
    sys.meta_path.insert(0, _After(name, action))
