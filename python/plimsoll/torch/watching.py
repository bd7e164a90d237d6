"""Marks the phases of a training loop by hooks of PyTorch: plimsoll.torch.watch."""

import functools
import warnings
import weakref
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Union

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plimsoll import marks
from plimsoll.torch import holdings, temporaries
from plimsoll.torch.backward_peak import BackwardPeak
from plimsoll.torch.meter import Meter
from plimsoll.torch.out_of_memory import Snapshots
from plimsoll.torch.saved import CAN_READ, Graph
from plimsoll.torch.storages import Tally, storages, tensors

# torch 2.1 has it elsewhere.
_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling

_BETWEEN = "between steps"
_EVALUATION = "evaluation"


def watch(
    model: torch.nn.Module, optimizer: Union[None, torch.optim.Optimizer, Iterable[torch.optim.Optimizer]] = None
) -> "Watch":
    """Marks the phases of a training loop from now on, for ``plimsoll run --record``.

    Call it when the model and its optimizer have been made. The time before is the phase load, and the time from then to
    the first forward pass is initialize. Forward and backward passes, steps of the optimizer and ``model.state_dict()``
    (checkpoint) mark themselves. A forward pass without gradients is an evaluation.

    Without ``optimizer``, every optimizer that has parameters of the model counts, also one that is made later. If
    ``torch.compile`` returns another module, watch that one.

    Each mark measures the phase that ends there. That resets the peak of resident memory (VmHWM) of the process.

    Where PyTorch finds no memory on a GPU, it writes a memory snapshot beside the recording, which ``plimsoll explain``
    reads. For this the Python lines of allocations are kept, which takes a few microseconds each.

    Returns a handle: ``remove()``, or the end of a ``with`` block, ends the watch. So does the end of the model. Without
    ``plimsoll run --record`` nothing is watched. ``watch`` may be called for several models.
    """
    recorder = marks.recorder()
    found = Watch(model, _unwrapped(model, optimizer))
    if recorder is not None:
        _loop_of(recorder).add(found)
    return found


class Watch:
    """A model that is watched, and its optimizers."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]):
        self._given = bool(optimizers)
        self.model = weakref.ref(model, lambda _: self.remove())
        self.optimizers = weakref.WeakSet(optimizers)
        #: Whether one of the optimizers has made a step.
        self.stepped = False
        self.handles: List[Any] = []

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is an optimizer of the model."""
        if optimizer in self.optimizers:
            return True
        model = self.model()
        if self._given or model is None:
            return False
        parameters = set(map(id, model.parameters()))
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
            self.optimizers.add(optimizer)
            return True
        return False

    def remove(self) -> None:
        """Ends the watch."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if _loop is not None:
            _loop.discard(self)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def _unwrapped(model: torch.nn.Module, given: Any) -> List[torch.optim.Optimizer]:
    """The optimizers of torch within those that DeepSpeed, accelerate and Lightning make of them."""
    if given is None:
        given = getattr(model, "optimizer", None)  # of a DeepSpeed engine
        given = given if hasattr(given, "param_groups") else None
    several = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    found = []
    for optimizer in several:
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"watch: expected an optimizer, or a list of optimizers, found a {type(optimizer).__name__}")
        found.append(optimizer)
    return found


class _Hook:
    """A hook on a module. A copy of the module, or a pickled one, has a hook that does nothing."""

    def __init__(self, function: Optional[Callable[..., None]]):
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        if self._function is not None and not _is_compiling():
            self._function(*arguments)

    def __reduce__(self) -> Any:
        return _Hook, (None,)


def _entries(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that a program calls: the model, and those in a LightningModule, which calls them itself."""
    yield module
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) or hasattr(module, "training_step"):
        for child in module.children():
            yield from _entries(child)


def _never_failing(method: Callable[..., None]) -> Callable[..., None]:
    """Training goes on where measuring it fails."""

    @functools.wraps(method)
    def guarded(self: "_Loop", *arguments: Any) -> None:
        if self.failed or self.recorder.is_forked:
            return
        try:
            method(self, *arguments)
        except Exception as error:
            self.failed, self.recorder.measure = True, marks.measure
            warnings.warn(f"plimsoll: the training is no longer watched, as measuring it failed: {error!r}", stacklevel=2)

    return guarded


class _Loop:
    """Where the training loop of this process is."""

    def __init__(self, recorder: marks.Recorder):
        self.recorder = recorder
        self.failed = False
        self._watches: List[Watch] = []
        self._current: Optional[Watch] = None  # whose forward pass was the last
        self._passes = 0  # backward passes under way, one within the other
        self._stepping: Optional[torch.optim.Optimizer] = None
        self._has_closure = False  # whether the step under way makes forward and backward passes
        self._meter: Optional[Meter] = None
        self._peak: Optional[BackwardPeak] = None
        self._inputs: List[Any] = []  # weak references to tensors of the last forward pass
        self._outputs: List[Any] = []
        self._returned: List[Any] = []  # those of the last forward pass, with their bytes
        self._handles: List[Any] = []
        self._snapshots = Snapshots(marks.rank())

    def add(self, watch: Watch) -> None:
        model = watch.model()
        assert model is not None
        for module in dict.fromkeys(_entries(model)):
            before, after = _Hook(functools.partial(self.forward_begins, watch)), _Hook(self.forward_ends)
            watch.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            watch.handles.append(module.register_forward_hook(after))
        watch.handles.append(model.register_state_dict_pre_hook(_Hook(self.checkpoint)))
        self._watches.append(watch)
        if len(self._watches) > 1:
            return
        self._handles = [
            register_optimizer_step_pre_hook(self.step_begins),
            register_optimizer_step_post_hook(self.step_ends),
        ]
        _patch_backward()
        self._meter = Meter(self._count)
        self.recorder.measure = self._meter.measure
        self.recorder.begin("initialize")
        self._listen()

    def discard(self, watch: Watch) -> None:
        if watch not in self._watches:
            return
        last = len(self._watches) == 1
        if last:
            if watch.model() is None:  # nothing is left to count
                self.recorder.measure = marks.measure
            self._end()
        self._watches.remove(watch)
        if last:
            for handle in self._handles:
                handle.remove()
            _restore_backward()
            self._snapshots.end()
            self.recorder.measure = marks.measure

    def _count(self) -> Tally:
        models = [model for model in (w.model() for w in self._watches) if model is not None]
        tally = holdings.count(models, {id(o): o for w in self._watches for o in w.optimizers}.values())
        for component, references in (("batch", self._inputs), ("logits_and_loss", self._outputs)):
            for tensor in _alive(references):
                tally.add(component, tensor)
        return tally

    def _begin(self, phase: str, name: str = "", advance: bool = True) -> None:
        place = self.recorder.place
        if (place.phase, place.name) != (phase, name):
            first = not self._current.stepped if self._current is not None else None
            self.recorder.begin(phase, name, first=first, advance=advance)
            self._meter.begin_step(self.recorder.step)

    # Hooks

    @_never_failing
    def _listen(self) -> None:
        self._snapshots.begin()

    @_never_failing
    def _end(self) -> None:
        self.recorder.begin("")

    @_never_failing
    def forward_begins(self, watch: Watch, _: Any, positional: Any, named: Any) -> None:
        phase = self.recorder.place.phase
        if self._passes or (phase == "forward" and not torch.is_grad_enabled()):
            return  # computed again for the backward pass, or a part of the forward pass under way
        if not torch.is_grad_enabled():
            self._begin("", _EVALUATION)
            return
        if not self._has_closure:
            self._stepping = None
        if phase != "forward":
            self._snapshots.begin()
            self._current = watch
            self._begin("forward")
            # Those of the step before may live on.
            self._inputs, self._outputs = (_living(references) for references in (self._inputs, self._outputs))
        # A view of a larger tensor is a part of the data set, which the process had before.
        own = (t for t in tensors([list(positional), named]) if all(s.nbytes() == t.nbytes for s in storages(t)))
        self._inputs += map(weakref.ref, own)

    @_never_failing
    def forward_ends(self, _: Any, __: Any, output: Any) -> None:
        if self._passes or not torch.is_grad_enabled():
            return
        found = [t for t in tensors(output) if t.grad_fn is not None]
        self._outputs += map(weakref.ref, found)
        self._returned = [(weakref.ref(t), t.nbytes) for t in found]

    def backward(self, roots: Any, run: Callable[[], Any]) -> Any:
        """Runs a backward pass."""
        outermost = self._passes == 0
        if outermost:
            self._backward_begins(roots)
        self._passes += 1
        try:
            return run()
        finally:
            self._passes -= 1
            if outermost:
                self._backward_ends()

    @_never_failing
    def _backward_begins(self, roots: Any) -> None:
        graph = None
        if self._meter.counts and CAN_READ:
            graph, tally = Graph(list(tensors(roots)), _alive(self._outputs)), self._count()
            parameters = [p for w in self._watches if w.model() is not None for p in w.model().parameters()]
            self._peak = BackwardPeak(tally, parameters, self._meter.instant)
            self._peak.add(graph, _alive(self._inputs), _alive(self._outputs))
            self._meter.counted = tally
            self._meter.dropped = sum(size for reference, size in self._returned if reference() is None)
        self._begin("backward")
        if graph is not None:
            self._peak.begin(graph)

    @_never_failing
    def _backward_ends(self) -> None:
        if self._peak is not None:
            self._meter.found_peak(self._peak.end())
            self._peak = None
        if self._has_closure:
            self._begin("step", advance=False)

    @_never_failing
    def step_begins(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        owners = [w for w in self._watches if w.owns(optimizer)]
        if self._stepping not in (None, optimizer) or not owners or _is_compiling():
            return
        self._stepping, self._current = optimizer, owners[0]
        self._has_closure = any(callable(a) for a in (*arguments[1:], named.get("closure")))
        if not self._has_closure:
            self._begin("step", advance=False)
        self._meter.temporaries = temporaries.of_step(optimizer) if self._meter.counts else None

    @_never_failing
    def step_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is not self._stepping:
            return
        self._stepping, self._has_closure = None, False
        self._begin("", _BETWEEN)
        self.recorder.stepped = True
        for watch in self._watches:
            watch.stepped = watch.stepped or optimizer in watch.optimizers

    @_never_failing
    def checkpoint(self, *_: Any) -> None:
        if self.recorder.step and self.recorder.place.phase == "":
            self._begin("checkpoint")


def _living(references: List[Any]) -> List[Any]:
    return [reference for reference in references if reference() is not None]


def _alive(references: List[Any]) -> List[torch.Tensor]:
    return [t for t in (reference() for reference in references) if t is not None]


_loop: Optional[_Loop] = None


def _loop_of(recorder: marks.Recorder) -> _Loop:
    global _loop
    if _loop is None or _loop.recorder is not recorder:
        _loop = _Loop(recorder)
    return _loop


# torch has no hook for the beginning of a backward pass. Tensor.backward looks this function up at every call.
_backward_of_torch: Any = None


def _patch_backward() -> None:
    global _backward_of_torch
    original = _backward_of_torch = torch.autograd.backward

    @functools.wraps(original)
    def backward(*arguments: Any, **named: Any) -> Any:
        if _loop is None or _backward_of_torch is None or _is_compiling():
            return original(*arguments, **named)
        roots = arguments[0] if arguments else named.get("tensors")
        return _loop.backward(roots, lambda: original(*arguments, **named))

    backward.of_plimsoll = True
    torch.autograd.backward = backward


def _restore_backward() -> None:
    """Puts torch's function back, unless another program has wrapped it since: then the wrapped one does nothing more."""
    global _backward_of_torch
    if getattr(torch.autograd.backward, "of_plimsoll", False):
        torch.autograd.backward = _backward_of_torch
    _backward_of_torch = None
