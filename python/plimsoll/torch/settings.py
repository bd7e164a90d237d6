"""The settings of an optimizer's state, from its constructor."""

import re
from typing import Any, NamedTuple, Optional, Sequence

from plimsoll.service import find_program
from plimsoll.torch import environment


class Settings(NamedTuple):
    state: str
    moments: str
    sharding: Optional[str]
    process_group: Any
    missing_gradients: str
    gradients: str
    overlap: Optional[str]
    name: Optional[str]
    job: str
    socket: Optional[str]

    @classmethod
    def checked(
        cls,
        moment_formats: Sequence[str],
        *,
        state: str = "split",
        moments: str = "fp32",
        sharding: Optional[str] = None,
        process_group: Any = None,
        missing_gradients: str = "refuse",
        gradients: str = "backward",
        overlap: Optional[str] = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
    ) -> "Settings":
        """The given settings, and the environment's where none were given."""
        job, socket = job or environment.job(), socket or environment.socket()
        settings = cls(state, moments, sharding, process_group, missing_gradients, gradients, overlap, name, job, socket)
        _choose("state", settings.state, ("split", "fp32"))
        _choose("moments", settings.moments, moment_formats)
        _choose("sharding", settings.sharding, (None, "zero1", "zero2"))
        _choose("missing_gradients", settings.missing_gradients, ("refuse", "zero"))
        _choose("gradients", settings.gradients, ("backward", "step"))
        _choose("overlap", settings.overlap, (None, "forward"))
        if settings.overlap is not None and settings.sharding is not None:
            raise ValueError(
                f"overlap is {settings.overlap!r}, but sharding is {settings.sharding!r}: expected no sharding with it; leave one of the two None"
            )
        if settings.gradients == "step" and settings.sharding == "zero2":
            raise ValueError(
                "gradients is 'step', but sharding is 'zero2', which sends gradients to their owners in the backward pass: "
                "leave gradients at 'backward', or use sharding='zero1'"
            )
        if settings.name is not None and not re.fullmatch("[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,31}", settings.name):
            raise ValueError(f"name is {settings.name!r}: expected 1 to 32 of a-z A-Z 0-9 . _ -, and no dot at the beginning")
        if settings.socket is None:
            find_program()  # the first step will start it
        return settings

    def refuse_full_state(self) -> None:
        if self.sharding is not None:
            raise RuntimeError(
                f"sharding is {self.sharding!r}, so no rank has the full state: save it with optimizer.save(directory)"
            )


def _choose(name: str, value: Any, among: Sequence[Any]) -> None:
    if value not in among:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(map(repr, among))}")
