"""The update of a step behind the next forward pass.

``step()`` returns when the update has begun. Hooks of the modules wait for what each is about to read. Whatever else reads
parameters, or changes the state, first waits for all of them.
"""

import contextlib
import functools
import os
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, TypeVar

import torch

from plimsoll.client import Session
from plimsoll.errors import PlimsollError
from plimsoll.protocol import Opened
from plimsoll.torch.arrivals import Arrivals
from plimsoll.torch.embedding_rows import ids_of, ranges_of
from plimsoll.torch.gradients import Gradients
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.signals import uninterrupted
from plimsoll.torch.stale_reads import StaleReads
from plimsoll.torch.uses import Uses

_Result = TypeVar("_Result")

# Their forward reads parameters of their children, whose own forward is not called.
_READ_CHILDREN = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class Serial:
    """Steps that are awaited as a whole: nothing overlaps."""

    #: Whether a step is finished when it returns.
    awaits = True

    def refuse(self, shards: Shards) -> None:
        """Raises ValueError for shards whose steps cannot overlap, before they are opened."""

    def attach(self, shards: Shards) -> None:
        """Begins with the shards of an optimizer that was opened."""

    def detach(self) -> None:
        """Ends with the shards: their optimizer is closed."""

    def remove(self) -> None:
        """Removes the hooks of modules."""

    def synchronize(self) -> None:
        """Waits until the model has all parameters of the last step."""

    def settle(self) -> None:
        """The same, whatever the program has written meanwhile."""

    def forgive(self) -> None:
        """Records that model and state were replaced."""

    def close(self) -> None:
        """Runs before the optimizer is closed."""
        self.settle()

    def refuse_begun(self) -> None:
        """Raises RuntimeError if a step has begun in the backward pass that the program has not asked for yet."""

    #: Sessions beside those of the shards.
    sessions: Sequence[Session] = ()

    def gradients_of(self, shards: Shards, settings: Settings, lock: Any) -> Gradients:
        """What takes gradients from the model to the shards."""
        return Gradients(shards, settings, lock)

    def opened(self, shards: Shards, found: List[Opened]) -> List[Opened]:
        """Opens what is beside the shards, which were opened. Returns what they have found."""
        return found

    def will_step(self) -> None:
        """Runs before a step."""
        self.synchronize()

    def will_zero(self) -> None:
        """Runs before the program writes gradients."""
        self.synchronize()

    def check(self) -> None:
        """Raises RuntimeError if gradients may come from parameters of two steps."""

    def begins(self) -> None:
        """Runs before a step begins."""

    def begun(self) -> None:
        """Runs when a step has begun."""

    def watch(self) -> None:
        """Runs after a step, outside of all that it does: the check mode looks at operations from here on."""

    def discard(self) -> None:
        """Records that all gradients are gone."""

    def over(self) -> None:
        """Records that the gradients belong to a step now, made or skipped."""


class Hook:
    """A hook of a module. Copies of the module, and files that it is pickled to, get one that does nothing."""

    def __init__(self, act: Callable[..., None]):
        # Compiled code breaks its graph here: it must not run before the parameters are there.
        self._act = torch._dynamo.disable(act)

    def __call__(self, *arguments: Any) -> None:
        self._act(*arguments)

    def __reduce__(self) -> Any:
        return _hook_of_a_copy, ()


def _nothing(*_: Any) -> None:
    pass


def _hook_of_a_copy() -> Callable[..., None]:
    return _nothing


class Forward(Serial):
    """Steps whose update goes on while the next forward pass runs."""

    awaits = False
    name = "forward"

    def __init__(self, model: torch.nn.Module, lock: Any):
        self._lock, self._owner = lock, os.getpid()
        self._uses = Uses()
        self._arrivals: Optional[Arrivals] = None  # while the optimizer is open
        self._reads: Optional[StaleReads] = None  # in check mode, as long
        self._is_ordered = False  # whether the service knows the order of the first step
        self._hooks: List[Any] = []  # of modules
        self._gradient_hooks: List[Any] = []  # of parameters, while the optimizer is open
        self._hook(model)
        _alive.add(self)

    # Opening and closing

    def _hook(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.DataParallel):
                raise ValueError(
                    f"overlap is {self.name!r}, and model has DataParallel, which copies parameters to its replicas before any module reads "
                    "them: use DistributedDataParallel, or leave overlap None"
                )
            if not parameters_read_by(module):
                continue
            before, state = Hook(self._before_forward), Hook(self._before_state)
            self._hooks += [
                # The first of its hooks: others may read parameters, as those of torch.nn.utils.weight_norm do.
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_state_dict_pre_hook(state),
                module._register_load_state_dict_pre_hook(state),
            ]
        if not self._hooks:
            raise ValueError(f"overlap is {self.name!r}, and model has no parameters: give the optimizer the model that it trains")

    def refuse(self, shards: Shards) -> None:
        if shards.ranks.mesh.size > 1 or shards.trained.are_sharded:
            raise ValueError(
                f"overlap is {self.name!r}, but several ranks hold the state, or a part of it: expected one rank alone; leave overlap None"
            )

    def attach(self, shards: Shards) -> None:
        is_checked = os.environ.get("PLIMSOLL_CHECK_OVERLAP", "") not in ("", "0")
        self._arrivals = Arrivals(shards, strict=is_checked)
        self._reads = StaleReads(self._arrivals) if is_checked else None
        self._is_ordered = False
        self._gradient_hooks = [p.register_hook(self._gradient_hook(p)) for p in self._arrivals.parameters]

    def detach(self) -> None:
        if self._reads is not None:
            self._reads.end()
        for hook in self._gradient_hooks:
            hook.remove()
        self._arrivals, self._reads, self._gradient_hooks = None, None, []

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # Hooks

    def _before_forward(self, module: torch.nn.Module, arguments: Tuple[Any, ...], named: Dict[str, Any]) -> None:
        if os.getpid() != self._owner:
            return  # a forked child has parameters of its own, or none
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                f"overlap is {self.name!r}, and this module is a replica of DataParallel, which has copied parameters before their update "
                "was awaited: use DistributedDataParallel, or leave overlap None"
            )
        _refuse_capture(self.name)
        parameters = parameters_read_by(module)
        ids = ids_of(module, arguments, named) if len(parameters) == 1 else None
        with self._lock:
            if ids is not None and self._uses.reads_rows(parameters[0]):
                self._before_rows(parameters[0], ids)
                return
            self._uses.read(parameters)
            if self._arrivals is not None and self._arrivals.are_underway:
                with self._apart():
                    self._arrivals.need(parameters)

    def _before_rows(self, parameter: torch.Tensor, ids: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            self._uses.read_rows(parameter, ids)
        slot = self._arrivals.missing(parameter) if self._arrivals is not None else None
        if slot is None:
            return
        with self._apart():
            ranges = ranges_of(ids, parameter.shape) if slot.contiguous else None
            if ranges is None:
                self._arrivals.need([parameter])
                return
            self._arrivals.need_ranges(parameter, ranges)
            if self._reads is not None:
                self._reads.allow_rows(parameter, ids)

    def _before_state(self, *_: Any) -> None:
        if os.getpid() == self._owner:
            with self._lock:
                self.synchronize()

    def _gradient_hook(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """A hook that runs before a gradient is accumulated, which the update under way may still read."""

        def arrives(_: torch.Tensor) -> None:
            if os.getpid() != self._owner or self._arrivals is None:
                return
            with self._lock:
                self._before_gradient(parameter)

        return arrives

    def _before_gradient(self, parameter: torch.Tensor) -> None:
        is_missing = self._arrivals.missing(parameter) is not None
        self._uses.gradient(parameter, is_missing)
        if is_missing:
            with self._apart():
                self._arrivals.need([parameter])

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Work on parameters that autograd and the check mode do not see."""
        with torch.inference_mode(False), torch.no_grad(), self._reads.paused() if self._reads else contextlib.nullcontext():
            yield

    # What waits for everything

    def synchronize(self) -> None:
        self.settle()
        if self._arrivals is not None:
            self._arrivals.check()

    def settle(self) -> None:
        if self._arrivals is None or os.getpid() != self._owner:
            return
        if self._arrivals.are_underway:
            with self._apart():
                self._arrivals.need_all()
        if self._reads is not None:
            self._reads.end()

    def forgive(self) -> None:
        if self._arrivals is not None:
            self._arrivals.forgive()

    # Steps

    def check(self) -> None:
        self._uses.check(self._arrivals.parameters, self._arrivals.name)

    def begins(self) -> None:
        self._arrivals.begin()
        if not self._is_ordered:
            self._arrivals.order(self._uses.in_order)
            self._is_ordered = True

    def begun(self) -> None:
        with self._apart():
            self._arrivals.need(self._uses.at_step)

    def watch(self) -> None:
        if self._reads is not None and self._arrivals.are_underway:
            self._reads.begin()

    def discard(self) -> None:
        self._uses.discard()

    def over(self) -> None:
        self._uses.over()


def _refuse_capture(name: str) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"overlap is {name!r}, and a CUDA graph is being captured, whose replays run no hooks that wait for parameters: leave "
            "overlap None, or run the model without graphs"
        )


def parameters_read_by(module: torch.nn.Module) -> List[torch.Tensor]:
    """The parameters that a module's forward reads by itself."""
    if isinstance(module, _READ_CHILDREN):
        return list(module.parameters())
    return [p for p in module._parameters.values() if p is not None]


def synchronized(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """An uninterrupted method of an optimizer that needs all of the last step."""
    uninterrupted_method = uninterrupted(method)

    @functools.wraps(method)
    def after(self: Any, *arguments: Any, **keywords: Any) -> _Result:
        with self._lock:
            self._overlap.synchronize()
            result = uninterrupted_method(self, *arguments, **keywords)
            self._overlap.watch()
            return result

    return after


def replacing(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """An uninterrupted method of an optimizer that replaces state and model."""
    uninterrupted_method = uninterrupted(method)

    @functools.wraps(method)
    def whole(self: Any, *arguments: Any, **keywords: Any) -> _Result:
        with self._lock:
            self._overlap.settle()
            result = uninterrupted_method(self, *arguments, **keywords)
            self._overlap.forgive()
            return result

    return whole


def release(gradients: Gradients, shards: Shards, overlap: Serial, owner: int) -> None:
    """Lets go of what an optimizer held while it was open."""
    if os.getpid() == owner:  # a forked child has nothing to release
        with contextlib.suppress(PlimsollError):  # of a service that has failed: the caller may be raising that
            overlap.settle()
        overlap.detach()
        gradients.remove_hooks()
        shards.release()


_alive: "weakref.WeakSet[Forward]" = weakref.WeakSet()


def _before_fork() -> None:
    """A child may use the parameters as they are at the fork."""
    for overlap in list(_alive):
        with overlap._lock, contextlib.suppress(Exception):  # the child's use is an error then, and the parent's next step
            overlap.synchronize()


os.register_at_fork(before=_before_fork)
