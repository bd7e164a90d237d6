"""Puts the program plimsoll into the wheel: the one that $PLIMSOLL_BINARY names, for the platform $PLIMSOLL_PLATFORM.
The licenses of what the program contains, which $PLIMSOLL_NOTICES names, go beside it, and so does the library that
stands in for CUDA, $PLIMSOLL_GHOST.

Without them the wheel is for every platform, and its users install the program by themselves.
"""

import os
from typing import Any, Dict

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProgramHook(BuildHookInterface):
    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        program = os.environ.get("PLIMSOLL_BINARY")
        if not program:
            return
        build_data["shared_scripts"][os.path.abspath(program)] = "plimsoll"
        build_data["shared_data"][os.path.abspath(os.environ["PLIMSOLL_NOTICES"])] = "share/doc/plimsoll/NOTICES.txt"
        build_data["shared_data"][os.environ["PLIMSOLL_GHOST"]] = "lib/plimsoll/libplimsoll_ghost.so"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + os.environ["PLIMSOLL_PLATFORM"]
