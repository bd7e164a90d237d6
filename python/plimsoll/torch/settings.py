"""The settings of an optimizer's state, from its constructor."""

import os
import re
from typing import Any, NamedTuple, Optional, Sequence, Tuple

from plimsoll.service import find_program
from plimsoll.torch import environment
from plimsoll.torch.algorithm import Algorithm
from plimsoll.torch.modes import Async, ZenFlow


class Settings(NamedTuple):
    state: str
    moments: str
    sharding: Optional[str]
    process_group: Any
    missing_gradients: str
    gradients: str
    overlap: Any
    name: Optional[str]
    job: str
    socket: Optional[str]
    delta: bool = False
    #: The folders of a tier; none without one.
    tier: Tuple[str, ...] = ()
    memory: Optional[str] = None
    #: Whether steps may begin before it is known whether they are clipped.
    clips: bool = False
    #: Why steps cannot be retracted; None if they can.
    unretractable: Optional[str] = None

    @classmethod
    def checked(
        cls,
        algorithm: Algorithm,
        *,
        state: str = "split",
        moments: str = "fp32",
        sharding: Optional[str] = None,
        process_group: Any = None,
        missing_gradients: str = "keep",
        gradients: str = "backward",
        overlap: Any = None,
        name: Optional[str] = None,
        job: Optional[str] = None,
        socket: Optional[str] = None,
        delta: bool = False,
        tier: Any = None,
        memory: Optional[str] = None,
    ) -> "Settings":
        """The given settings, and the environment's where none were given."""
        job, socket = job or environment.job(), socket or environment.socket()
        settings = cls(state, moments, sharding, process_group, missing_gradients, gradients, _overlap_of(overlap), name, job, socket, delta, _folders_of(tier), memory)
        settings = settings._replace(unretractable=_why_unretractable(settings, algorithm))
        choose("state", settings.state, ("split", "fp32", "split24"))
        choose("moments", settings.moments, algorithm.moment_formats)
        choose("sharding", settings.sharding, (None, "zero1", "zero2", "local"))
        choose("missing_gradients", settings.missing_gradients, ("keep", "zero", "refuse"))
        choose("gradients", settings.gradients, ("backward", "step"))
        with_sharding = (None,) if settings.sharding == "local" else (None, "forward")
        if settings.sharding is not None and settings.overlap not in with_sharding:
            raise ValueError(
                f"overlap is {settings.overlap!r}, but sharding is {settings.sharding!r}: expected no sharding with it; leave one of the two None"
            )
        if settings.overlap == "backward" and settings.gradients == "step":
            raise ValueError(
                "overlap is 'backward', which takes gradients in the backward pass, but gradients is 'step': leave gradients at "
                "'backward', or use overlap='forward'"
            )
        if settings.gradients == "step" and settings.sharding == "zero2":
            raise ValueError(
                "gradients is 'step', but sharding is 'zero2', which sends gradients to their owners in the backward pass: "
                "leave gradients at 'backward', or use sharding='zero1'"
            )
        if isinstance(settings.overlap, ZenFlow):
            _check_zenflow(settings, algorithm)
        if settings.name is not None and not re.fullmatch("[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,31}", settings.name):
            raise ValueError(f"name is {settings.name!r}: expected 1 to 32 of a-z A-Z 0-9 . _ -, and no dot at the beginning")
        choose("delta", settings.delta, (False, True))
        _check_tier(settings)
        if settings.socket is None:
            find_program()  # the first step will start it
        return settings

    def clipping(self, max_grad_norm: Optional[float]) -> "Settings":
        """The settings of an optimizer that clips to a norm."""
        if self.overlap == "backward" and max_grad_norm is not None and self.unretractable is not None:
            raise ValueError(
                f"overlap is 'backward', and max_grad_norm is {max_grad_norm}, but {self.unretractable}: then a step cannot be retracted "
                "when its norm is known; leave max_grad_norm None, or use overlap='forward'"
            )
        return self._replace(clips=max_grad_norm is not None)

    def retracts_of(self, dtype: str) -> bool:
        """Whether a shard has a log with which steps can be retracted: where steps are clipped, or a GradScaler may skip them,
        as with any type but bf16.
        """
        return self.overlap == "backward" and self.unretractable is None and (self.clips or dtype != "bf16")

    @property
    def divides(self) -> bool:
        """Whether the optimizer divides the state of each parameter among the ranks."""
        return self.sharding in ("zero1", "zero2")

    def refuse_full_state(self) -> None:
        if self.divides:
            raise RuntimeError(
                f"sharding is {self.sharding!r}, so no rank has the full state: save it with optimizer.save(directory)"
            )


def _why_unretractable(settings: Settings, algorithm: Algorithm) -> Optional[str]:
    """Why steps with these settings cannot be retracted, as the kernels say it. None if they can."""
    if algorithm.moments != ("exp_avg", "exp_avg_sq"):
        return "the optimizer is neither AdamW nor Adam"
    if settings.moments != "fp32":
        return f"moments is {settings.moments!r}"
    return "state is 'split24'" if settings.state == "split24" else None


def _overlap_of(overlap: Any) -> Any:
    """The settings of an overlap, from what the program gave."""
    if overlap == "async":
        return Async()
    if isinstance(overlap, Async) and not overlap.warm_up_steps >= 0:
        raise ValueError(f"warm_up_steps is {overlap.warm_up_steps}: expected 0 or more")
    if overlap not in (None, "forward", "backward") and not isinstance(overlap, (Async, ZenFlow)):
        raise ValueError(f"overlap is {overlap!r}: expected one of None, 'forward', 'backward', 'async', Async(...), ZenFlow(...) of plimsoll.torch")
    return overlap


def _folders_of(tier: Any) -> Tuple[str, ...]:
    """The folders of a tier, from what the program gave."""
    if tier is None:
        return ()
    list_of = [tier] if isinstance(tier, (str, os.PathLike)) else list(tier)
    return tuple(os.path.abspath(os.fspath(folder)) for folder in list_of)


def _check_tier(settings: "Settings") -> None:
    if not settings.tier:
        if settings.memory is not None:
            raise ValueError(f"memory is {settings.memory!r}, and there is no tier: give tier, or leave memory None")
        return
    if settings.socket is not None:
        raise ValueError(
            f"tier is given, but the service at {settings.socket} is another process's: start that with --tier, or plimsoll run with "
            "PLIMSOLL_TIER in its environment"
        )
    if settings.overlap not in (None, "forward"):
        raise ValueError(f"tier is given, and overlap is {settings.overlap!r}: expected None or 'forward' with it; leave one of the two None")
    for folder in settings.tier:
        if "," in folder:
            raise ValueError(f"tier has the folder {folder!r}: expected one without a comma in its path")
        if not os.path.isdir(folder):
            raise ValueError(f"tier has the folder {folder!r}, which does not exist: make it before")


def _check_zenflow(settings: Settings, algorithm: Algorithm) -> None:
    if algorithm.moments != ("exp_avg", "exp_avg_sq"):
        raise ValueError("overlap is ZenFlow(...), which is made for AdamW and Adam: leave overlap None")
    if settings.moments == "int8":
        raise ValueError("overlap is ZenFlow(...), and moments is 'int8': columns cannot leave its blocks; use 'fp32' or 'bf16'")


def choose(name: str, value: Any, among: Sequence[Any]) -> None:
    if value not in among:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(map(repr, among))}")
