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
from plimsoll.protocol import Opened
from plimsoll.torch.arrivals import Arrivals
from plimsoll.torch.embedding_rows import ids_of, ranges_of
from plimsoll.torch.fsdp_groups import groups_of
from plimsoll.torch.gathered import Gathered
from plimsoll.torch.gradients import Gradients
from plimsoll.torch.layout import is_offloaded, is_sharded
from plimsoll.torch.scaling import Scaling
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.signals import deferred, deferred_if_distributed, uninterrupted
from plimsoll.torch.stale_reads import StaleReads
from plimsoll.torch.uses import Uses

_Result = TypeVar("_Result")

# Their forward reads parameters of their children, whose own forward is not called.
_READ_CHILDREN = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class Serial:
    """Steps that are awaited as a whole: nothing overlaps."""

    #: Whether a step is finished when it returns.
    awaits = True
    #: Whether interrupts wait for the end of a step: what was done of it could not be told afterwards.
    defers_interrupts = False

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

    def begun(self, failure: Optional[Exception]) -> None:
        """Runs when a step has begun, or has failed to begin on this rank."""

    def watch(self) -> None:
        """Runs after a step, outside of all that it does: the check mode looks at operations from here on."""

    def learn(self, scaling: Scaling, is_other: bool) -> None:
        """Runs when a step is known: whether it has another factor than the loss scale gives, or is skipped."""

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

    def __init__(self, model: torch.nn.Module, lock: Any, sharding: Optional[str]):
        self._lock, self._owner = lock, os.getpid()
        self._uses = Uses(leave=sharding == "zero2")
        self._has_rows = sharding is None  # whether rows of embeddings may come before others
        self._arrivals: Optional[Arrivals] = None  # while the optimizer is open
        self._reads: Optional[StaleReads] = None  # in check mode, as long
        self._is_ordered = False  # whether the service knows the order of the first step
        self._hooks: List[Any] = []  # of modules
        self._gradient_hooks: Dict[torch.Tensor, List[Any]] = {}  # of parameters
        self._hook(model)
        _alive.add(self)

    # Opening and closing

    def _hook(self, model: torch.nn.Module) -> None:
        groups = groups_of(model)
        self._gathered_by_fsdp = {p for group in groups for p in group.parameters}
        self._hooks += [group.before_gathering(self._before_gathering) for group in groups]
        for module in model.modules():
            if isinstance(module, torch.nn.DataParallel):
                raise ValueError(
                    f"overlap is {self.name!r}, and model has DataParallel, which copies parameters to its replicas before any module reads "
                    "them: use DistributedDataParallel, or leave overlap None"
                )
            if not parameters_read_by(module):
                continue
            before, state = Hook(self._before_forward), Hook(self._before_state)
            self._hooks += [module.register_state_dict_pre_hook(state), module._register_load_state_dict_pre_hook(state)]
            if not self._gathered_by_fsdp.issuperset(parameters_read_by(module)):
                # The first of its hooks: others may read parameters, as those of torch.nn.utils.weight_norm do.
                self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        if not self._hooks:
            raise ValueError(f"overlap is {self.name!r}, and model has no parameters: give the optimizer the model that it trains")

    def refuse(self, shards: Shards) -> None:
        if _gathers(shards) and not torch.distributed.is_gloo_available():
            raise ValueError(
                f"overlap is {self.name!r}, with sharding, and this torch has no gloo, by which the ranks send parameters behind the forward "
                "pass: use a torch with gloo, or leave overlap None"
            )
        fsdp = [p for p in shards.trained.parameters if is_sharded(p) and p not in self._gathered_by_fsdp]
        if fsdp:
            raise ValueError(
                f"overlap is {self.name!r}, and parameters are sharded (DTensor), but not by fully_shard before the optimizer was made, or by "
                "one of a torch whose gathering cannot be awaited: leave overlap None"
            )

    def attach(self, shards: Shards) -> None:
        is_checked = os.environ.get("PLIMSOLL_CHECK_OVERLAP", "") not in ("", "0")
        self._arrivals = (Gathered if _gathers(shards) else Arrivals)(shards, strict=is_checked)
        self._reads = StaleReads(self._arrivals) if is_checked else None
        self._is_ordered = False
        for parameter in self._arrivals.parameters:
            self._hook_gradient(parameter)

    def _hook_gradient(self, parameter: torch.Tensor) -> None:
        if parameter in self._gradient_hooks or not parameter.requires_grad:
            return
        hook = self._gradient_hook(parameter)
        self._gradient_hooks[parameter] = [parameter.register_hook(hook)]
        if is_sharded(parameter) and not is_offloaded(parameter):
            # fully_shard brings gradients past autograd, and calls these hooks. This one comes before that of Gradients.
            after = parameter.register_post_accumulate_grad_hook(lambda _: hook(None))
            self._gradient_hooks[parameter].append(after)

    def detach(self) -> None:
        if self._reads is not None:
            self._reads.end()
        if self._arrivals is not None:
            self._arrivals.end()
        self._arrivals, self._reads = None, None
        self._unhook_gradients()

    def _unhook_gradients(self) -> None:
        for hook in (hook for hooks in self._gradient_hooks.values() for hook in hooks):
            hook.remove()
        self._gradient_hooks.clear()

    def remove(self) -> None:
        self._unhook_gradients()
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
        ids = ids_of(module, arguments, named) if self._has_rows and len(parameters) == 1 else None
        with self._lock:
            if ids is not None and self._uses.reads_rows(parameters[0]):
                self._before_rows(parameters[0], ids)
            else:
                self._uses.read(parameters)
                if self._arrivals is not None and self._arrivals.are_underway:
                    with self._apart():
                        self._arrivals.need(parameters)
            if self._arrivals is not None:
                self._arrivals.catch_up()

    def _before_gathering(self, parameters: List[torch.Tensor]) -> None:
        """Before fully_shard reads the shards of a group, on streams of its own."""
        if os.getpid() != self._owner:
            return
        _refuse_capture(self.name)
        with self._lock:
            self._uses.read(parameters)
            if self._arrivals is not None and self._arrivals.are_underway:
                with self._apart():
                    self._arrivals.need_on_all_streams(parameters)

    def _before_rows(self, parameter: torch.Tensor, ids: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            self._uses.read_rows(parameter, ids)
            self._hook_gradient(parameter)  # others may add their ranks' gradients to it later
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

        def arrives(gradient: Optional[torch.Tensor]) -> None:
            if os.getpid() != self._owner:
                return
            with self._lock:
                self._before_gradient(parameter, gradient)

        return arrives

    def _before_gradient(self, parameter: torch.Tensor, gradient: Optional[torch.Tensor]) -> None:
        is_missing = self._arrivals is not None and self._arrivals.missing(parameter) is not None
        with self._apart():
            self._uses.gradient(parameter, gradient, is_missing)
            if self._arrivals is not None and self._arrivals.are_underway:
                self._arrivals.before_gradient(parameter)

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
        self._arrivals.catch_up()
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

    def begun(self, failure: Optional[Exception]) -> None:
        with self._apart():
            self._arrivals.begun(failure)
            if failure is None:
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


def _gathers(shards: Shards) -> bool:
    """Whether the ranks send each other parameters."""
    return any(shard.parameters.gathers() for shard in shards)


def stepping(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """An uninterrupted method of an optimizer that makes a step. It gets what has failed in the wait for the last one,
    for the vote of the ranks.
    """
    uninterrupted_method = uninterrupted(method)

    @functools.wraps(method)
    def after(self: Any) -> _Result:
        with self._lock, deferred() if self._overlap.defers_interrupts else deferred_if_distributed():
            failure = None
            try:
                self._overlap.will_step()
            except Exception as error:
                failure = error
            result = uninterrupted_method(self, failure)
            self._overlap.watch()
            return result

    return after


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


def together(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """The same, of a method that all ranks call: if one has failed in the last step, all raise."""
    uninterrupted_method = uninterrupted(method)

    @functools.wraps(method)
    def after(self: Any, *arguments: Any, **keywords: Any) -> _Result:
        with self._lock, deferred_if_distributed():
            _on_all_ranks(self, self._overlap.synchronize)
            result = uninterrupted_method(self, *arguments, **keywords)
            self._overlap.watch()
            return result

    return after


def replacing(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """An uninterrupted method of an optimizer that replaces state and model, on all ranks."""
    uninterrupted_method = uninterrupted(method)

    @functools.wraps(method)
    def whole(self: Any, *arguments: Any, **keywords: Any) -> _Result:
        with self._lock, deferred_if_distributed():
            _on_all_ranks(self, self._overlap.settle)
            result = uninterrupted_method(self, *arguments, **keywords)
            self._overlap.forgive()
            return result

    return whole


def _on_all_ranks(optimizer: Any, wait: Callable[[], None]) -> None:
    if optimizer._overlap.awaits or optimizer._shards is None or not optimizer._shards.ranks.are_heard:
        wait()
    else:
        optimizer._shards.ranks.agree("waiting for the last step", wait)


def release(gradients: Gradients, shards: Shards, overlap: Serial, owner: int) -> None:
    """Lets go of what an optimizer held while it was open."""
    if os.getpid() == owner:  # a forked child has nothing to release
        with contextlib.suppress(RuntimeError):  # of a service or a device that has failed: the caller may be raising that
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
