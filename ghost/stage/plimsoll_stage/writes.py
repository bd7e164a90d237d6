"""Writes: what a program saves goes nowhere, or to the scratch folder."""

import builtins
import os
from typing import Any, Dict

_REFUSED = "not written, as the program runs to be planned"


def guard(settings: Dict[str, Any], recorder: Any) -> None:
    """Files that the program opens to write outside of the scratch folder are /dev/null. Folders are made nowhere."""
    scratch = os.path.realpath(settings["scratch"])
    really_open, make, makes = builtins.open, os.mkdir, os.makedirs

    def is_ours(path: Any) -> bool:
        full = os.path.realpath(os.fspath(path))
        return full == scratch or full.startswith((scratch + os.sep, "/dev/", "/proc/"))

    def guarded(file, mode="r", *arguments, **options):
        if any(c in mode for c in "wax+") and not isinstance(file, int) and not is_ours(file):
            recorder.note("writes", f"{os.fspath(file)} was {_REFUSED}")
            return really_open(os.devnull, mode.replace("x", "w"), *arguments, **options)
        return really_open(file, mode, *arguments, **options)

    def mkdir(path, *arguments, **options):
        if is_ours(path):
            make(path, *arguments, **options)

    def makedirs(name, mode=0o777, exist_ok=False):
        if is_ours(name):
            makes(name, mode, exist_ok)

    builtins.open, os.mkdir, os.makedirs = guarded, mkdir, makedirs
