"""The record of a run: when its phases began, what it did not do, how it ended, and PyTorch's own history of its memory."""

import contextlib
import ctypes
import functools
import gc
import inspect
import json
import os
import pickle
import resource
import sys
import time
import traceback
import weakref
from typing import Any, Callable, Dict, Iterator, List

from plimsoll_stage import host, launchers

PART = 100_000  # entries of the history of memory that are kept before they are written: each takes some 2 KB
OFTEN = 64  # calls of modules between two looks at how many there are
PATIENCE = 8  # rounds that the fastest optimizer makes before the others are given up: five, for one critic of a GAN


class Enough(BaseException):
    """Ends the program once it has made its steps."""


class Recorder:
    """Records a program until it has made the steps that are asked for."""

    def __init__(self, settings: Dict[str, Any]):
        self._settings = settings
        self._library = ctypes.CDLL(None)
        self._library.plimsoll_ghost_resident.restype = ctypes.c_size_t
        self._stacks: List[List[List[str]]] = []  # of the lines that asked for memory of the host
        self._kept: List[Any] = []
        self._torch: Any = None
        self._counts: Any = weakref.WeakKeyDictionary()  # steps of each optimizer that is alive
        self._passes = 0  # that have begun
        self._last: Any = weakref.WeakKeyDictionary()  # how many had before the last step of an optimizer
        self._process, self._backwards, self._most = os.getpid(), 0, 0
        self._on_device = False  # whether anything that was trained was there
        self._batches: Any = weakref.WeakKeyDictionary()  # the sizes of the first of each module
        self._first_until = 0  # how many phases there were when the last optimizer made its first step
        self.result: Dict[str, Any] = {
            "schema": "plimsoll.stage/1", "ranks": 1, "phases": [], "notes": [], "known": [], "history": [],
            "host_states": [],
        }  # fmt: skip
        self._noted: set = set()
        self._missing: List[str] = []

    @property
    def library(self) -> Any:
        """The library that stands in for CUDA."""
        return self._library

    def keep(self, x: Any) -> None:
        self._kept.append(x)

    def note(self, kind: str, text: str) -> None:
        """Notes something once."""
        if (kind, text) not in self._noted and len(self._noted) < 1000:
            self._noted.add((kind, text))
            self.result["notes"].append({"kind": kind, "text": text})

    def missing(self, what: str) -> None:
        """Notes data that are not here, which an error may be about."""
        if what not in self._missing:
            self._missing.append(what)

    def phase(self, name: str, step: int) -> None:
        """A phase begins, and another ends."""
        self._measure_host()
        self.result["phases"].append({"name": name, "step": step, "time_us": time.time_ns() // 1000})

    def _measure_host(self) -> None:
        """Writes what the host held in the phase that ends, and devices outside of PyTorch's allocator: when it was most.
        What the process holds is as it is now."""
        library, phases, held, outside, number = self._library, self.result["phases"], [], [], 0
        stack, device, kinds = ctypes.c_char_p(), ctypes.c_int(), (ctypes.c_size_t * 4)()
        while library.plimsoll_ghost_holder(number, ctypes.byref(stack), ctypes.byref(device), kinds):
            if number == len(self._stacks):
                self._stacks.append([line.split("\t") for line in stack.value.decode(errors="replace").split("\n")[:-1]])
            pageable, pinned, managed, taken = kinds
            if taken:
                outside.append({"stack": number, "device": device.value, "bytes": taken})
            elif pageable or pinned or managed:
                held.append({"stack": number, "pageable_bytes": pageable, "pinned_bytes": pinned, "managed_bytes": managed})
            number += 1
        if phases:
            process = max(0, host.resident() - library.plimsoll_ghost_resident())
            phases[-1]["host"] = {"held": held, "process_bytes": process, "children_bytes": host.of_children()}
            phases[-1]["outside"] = outside
        library.plimsoll_ghost_restart()

    @property
    def steps(self) -> int:
        if self._makes_optimizers:
            return self._most
        return self._backwards  # a program that writes its parameters itself

    def install(self, torch: Any) -> None:
        """Follows the steps of all optimizers, and the backward passes."""
        self._torch = torch
        self.result["torch"], self.result["cuda"] = torch.__version__, torch.version.cuda
        self._remember()
        self.phase("load", 0)
        self._follow_optimizers()
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def follow(*arguments, **options):
            if self._is_in_backward:  # reentrant checkpoints go backward through each layer, in threads of autograd
                return backward(*arguments, **options)
            self._enough()
            self.phase("backward", self.steps)
            self._passes += 1
            self._is_in_backward = True
            self._on_device = self._on_device or _is_on_device(arguments, options)
            try:
                return backward(*arguments, **options)
            except Exception as error:
                self._caught(error)
                raise
            finally:
                self._is_in_backward = False
                self._backwards += 1
                self._is_before_forward = True
                self.phase("between", self.steps)

        torch.autograd.backward = follow
        call = torch.nn.Module.__call__

        def enter(module, *arguments, **options):
            self._calls += 1
            if self._calls % OFTEN == 0:
                self._write_part()
            if self._is_before_forward and not self._is_in_backward and os.getpid() == self._process:
                self._enough()  # before an evaluation or a generation, too
            if self._is_before_forward and self._trains(module):
                self._is_before_forward = False
                self._passes += 1
                self.phase("forward", self.steps)
                self._compare(module, arguments, options)
            try:
                return call(module, *arguments, **options)
            except Exception as error:
                self._caught(error)
                raise

        torch.nn.Module.__call__ = enter

    def _remember(self) -> None:
        """Has PyTorch record the history of its memory from now on."""
        options = {"max_entries": 4_000_000, "context": "alloc", "stacks": "python"}
        record = self._torch.cuda.memory._record_memory_history
        if "clear_history" in inspect.signature(record).parameters:
            options["clear_history"] = True
        else:  # before torch 2.8 a recording that ends drops its history
            record(None)
        record(**options)

    def _write_part(self) -> None:
        """Writes the history once it has many entries, and begins it anew. In a backward pass other threads add to it."""
        torch = self._torch
        if self._is_in_backward or os.getpid() != self._process or not torch.cuda.is_initialized():
            return
        counts = torch.cuda.memory_stats()
        entries = counts.get("allocation.all.allocated", 0) + counts.get("allocation.all.freed", 0)
        if entries - self._entries < PART // 2 or self._settings["whole_history"]:  # a free has two entries
            return
        self._entries = entries
        name = f"history-{os.getpid()}-{len(self.result['history'])}.pickle"
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e6)  # no other thread of Python allocates between the two
        with _uncollected():
            history = torch.cuda.memory._snapshot()
        self._remember()
        sys.setswitchinterval(interval)
        history["segments"] = []
        with open(os.path.join(self._settings["scratch"], name), "wb") as file:
            pickle.dump(history, file)
        self.result["history"].append(name)

    _calls = _entries = 0
    _is_before_forward = True
    _is_in_backward = False
    _makes_optimizers = False

    def _caught(self, error: Exception) -> None:
        """Notes an error that the program may catch: if it does, a real run may go another way. Errors whose names begin
        with an underscore are how libraries leave a module."""
        if not type(error).__name__.startswith("_"):
            self.note("errors", f"the program went on after {type(error).__name__}: {str(error)[:200]}")

    def _compare(self, module: Any, arguments: Any, options: Any) -> None:
        """Notes batches whose sizes differ: the largest may come later than the steps that are made."""
        shapes = list(_shapes((arguments, options)))
        first = self._batches.setdefault(module, shapes)
        for one, other in zip(first, shapes) if len(first) == len(shapes) else ():
            if one != other:
                self.note("batches", f"batches differ in size: {one} and {other}, for one; a later one may need more memory")
                self._batches[module] = []  # once
                return

    def _trains(self, module: Any) -> bool:
        """Whether a call of a module begins a forward pass. Transforms of a data set are modules, too, and workers that
        load data are forks of this process.
        """
        if self._is_in_backward or not module.training or not self._torch.is_grad_enabled():
            return False
        return next(module.parameters(), None) is not None and os.getpid() == self._process

    def _follow_optimizers(self) -> None:
        from torch.optim import optimizer

        make = optimizer.Optimizer.__init__

        @functools.wraps(make)
        def count(made, *arguments, **options):
            self._makes_optimizers = True
            self._counts.setdefault(made, 0)
            make(made, *arguments, **options)

        optimizer.Optimizer.__init__ = count
        optimizer.register_optimizer_step_pre_hook(lambda o, a, k: self._steps(o))
        optimizer.register_optimizer_step_post_hook(lambda o, a, k: self._stepped(o))

    def _steps(self, optimizer: Any) -> None:
        if self._has_new_gradients(optimizer):
            self.phase("step", self.steps)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._on_device = self._on_device or parameter.device.type == "cuda"
                if isinstance(parameter, self._torch.nn.Parameter):  # others may be master weights
                    self._know("parameters", parameter)
                self._know("gradients", parameter.grad)

    def _has_new_gradients(self, optimizer: Any) -> bool:
        """Whether a pass has begun since the last step. Other steps are of parts, or make the passes themselves."""
        return self._last.get(optimizer, 0) != self._passes

    def _stepped(self, optimizer: Any) -> None:
        for state in list(optimizer.state.values()):
            for value in state.values() if isinstance(state, dict) else ():
                self._know("optimizer_states", value)
                self._know_on_host(value)
        self._is_before_forward = True
        if not self._has_new_gradients(optimizer):  # before the first pass it makes states alone
            return
        self._last[optimizer] = self._passes
        made = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self._most = max(self._most, made)
        if made == 1:
            self._first_until = len(self.result["phases"])
        self.phase("between", self.steps)

    def _know(self, component: str, value: Any) -> None:
        """Notes what memory of the device is for."""
        for device, address in self._storages(value):
            now = time.time_ns() // 1000
            self.result["known"].append({"component": component, "device": device, "address": address, "time_us": now})

    def _know_on_host(self, value: Any) -> None:
        """Notes the line that made a state of an optimizer on the host, if that is a large block."""
        if isinstance(value, self._torch.Tensor) and value.device.type == "cpu" and value.layout is self._torch.strided:
            number = self._library.plimsoll_ghost_holder_of(ctypes.c_void_p(value.untyped_storage().data_ptr()))
            if number >= 0 and number not in self.result["host_states"]:
                self.result["host_states"].append(number)

    def _storages(self, value: Any) -> Iterator[Any]:
        torch = self._torch
        if not isinstance(value, torch.Tensor):
            return
        if torch.utils._python_dispatch.is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from self._storages(getattr(value, name))
        elif value.device.type == "cuda" and value.layout is torch.strided:
            yield value.device.index, value.untyped_storage().data_ptr()

    def _enough(self) -> None:
        """Ends the program once every optimizer has made its steps. An optimizer that never steps holds up no other."""
        most, wanted = self.steps, self._settings["steps"]
        least = min(self._counts.values(), default=most)
        if most >= wanted and (least >= wanted or most >= PATIENCE * wanted):
            if least < wanted:
                self._note_idle(wanted)
            self.phase("over", most)  # what the program frees as it ends belongs to no phase
            raise Enough

    def _note_idle(self, wanted: int) -> None:
        """Notes optimizers that have parameters and were given up. Wrappers of others have none, or the same."""
        stepped = {id(p) for o, made in self._counts.items() if made >= wanted for g in o.param_groups for p in g["params"]}
        for optimizer, made in self._counts.items():
            own = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"] if id(p) not in stepped]
            if made < wanted and own:
                self.note(
                    "steps", f"{type(optimizer).__name__} of {sum(p.numel() for p in own):,} parameters made {made} steps "
                    f"while another made {self.steps}: the plan lacks what it still allocates"
                )  # fmt: skip

    def run(self, program: Callable[[], None]) -> int:
        """Runs a program, and writes the record whatever becomes of it. Returns the exit status."""
        ended: Dict[str, Any] = {"kind": "ended"}
        try:
            program()
        except Enough:
            ended = {"kind": "enough"}
        except launchers.More as more:
            ended = {"kind": "more", "gpus": more.args[0], "nodes": more.args[1]}
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            ended = {"kind": "ended", "status": stop.code if isinstance(stop.code, int) else int(stop.code is not None)}
        except BaseException as error:
            ended = {"kind": "failed", "type": type(error).__name__, "message": _message(error), "place": _place_of(error),
                     "missing": self._missing[:9]}  # fmt: skip
            traceback.print_exc()
        self.result["end"] = ended
        if self._is_of_interest(ended["kind"]):
            try:
                self._measure()
            except Exception as error:
                if ended["kind"] != "failed":
                    ended = {"kind": "unrecorded", "type": type(error).__name__, "message": _message(error)}
                self.result = {"end": ended}
            with contextlib.suppress(Exception):
                self._write()
        sys.stdout.flush()
        sys.stderr.flush()
        if not self._settings.get("is_started"):
            host.end_children()
        os._exit(0 if ended["kind"] != "failed" else 1)

    def _is_of_interest(self, kind: str) -> bool:
        """Whether this process has more to say than one that it has started, or that has started it."""
        if self.steps > 0 or kind == "more":
            return True
        if os.path.exists(os.path.join(self._settings["scratch"], "record.json")):
            return False
        uses_device = self._torch is not None and self._torch.cuda.is_initialized()
        return not self._settings.get("is_started") or uses_device or kind == "failed"

    def _measure(self) -> None:
        torch, result = self._torch, self.result
        self._measure_host()
        result["host_stacks"] = self._stacks
        result.setdefault("rank", int(os.environ.get("RANK", "0")))
        result["local_ranks"] = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        result["steps"], result["on_device"] = self.steps, self._on_device
        for phase in result["phases"][: self._first_until]:
            phase["step"] = 0
        if self.steps and not self._makes_optimizers:
            self.note("steps", "the program has no optimizer of torch: each backward pass was taken for a step")
        result["time_us"] = time.time_ns() // 1000
        result["resident_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result["waits"] = self._library.plimsoll_ghost_waits()
        result["unmodelled"], result["workspaces"] = self._unmodelled(), self._workspaces()
        self._note_estimates()
        if torch is not None and torch.cuda.is_initialized():
            result["device"] = torch.cuda.current_device()
            stats = torch.cuda.memory_stats()
            for name in ("allocated_bytes", "reserved_bytes"):
                result[name] = stats.get(f"{name}.all.peak", 0)
            result["retries"], result["failures"] = stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)
            with _uncollected():
                torch.cuda.memory._dump_snapshot(os.path.join(self._settings["scratch"], "snapshot.pickle"))

    def _write(self) -> None:
        path = os.path.join(self._settings["scratch"], "record.json")
        with open(path + ".part", "w", encoding="utf-8", errors="replace") as file:  # names may be no text
            json.dump(self.result, file, ensure_ascii=False)
        os.replace(path + ".part", path)

    def _note_estimates(self) -> None:
        ask, number = self._library.plimsoll_ghost_estimate, 0
        ask.restype = ctypes.c_char_p
        while (what := ask(number)) is not None:
            self.note("estimates", f"the size is an estimate of {what.decode()}")
            number += 1

    def _unmodelled(self) -> List[Dict[str, Any]]:
        """The functions of CUDA's libraries that were called and have no model."""
        ask, found, number = self._library.plimsoll_ghost_unmodelled, [], 0
        ask.restype, calls = ctypes.c_char_p, ctypes.c_ulong()
        while (name := ask(number, ctypes.byref(calls))) is not None:
            if calls.value:
                found.append({"name": name.decode(), "calls": calls.value})
            number += 1
        return found

    def _workspaces(self) -> List[Dict[str, int]]:
        """Memory that cuBLAS was given to work in."""
        ask, found = self._library.plimsoll_ghost_workspace, []
        begin, count, when = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_longlong()
        while ask(len(found), *map(ctypes.byref, (begin, count, when))):
            found.append({"address": begin.value, "bytes": count.value, "time_us": when.value})
        return found


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector, which looks through each million of objects again and again while a history is made of them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def compile_nothing(rules: Any) -> None:
    """Dynamo compiles what a module's call does, and compiled this module's own functions anew whenever a count changed."""
    rules.SKIP_DIRS.append(__file__)
    rules._recompile_re()


def _shapes(value: Any) -> Iterator[Any]:
    """The sizes of the tensors of a call, in lists and dictionaries, too."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for x in value:
            yield from _shapes(x)
    elif hasattr(value, "untyped_storage"):
        yield tuple(value.shape)


def _is_on_device(arguments: Any, options: Any) -> bool:
    """Whether a backward pass begins on the device: with tensors, or with edges of the graph and gradients for them."""
    given = [*arguments[:2], options.get("tensors"), options.get("grad_tensors")]
    begins = [x for some in given for x in (some if isinstance(some, (list, tuple)) else [some])]
    return any(x.device.type == "cuda" for x in begins if hasattr(x, "device"))


def _place_of(error: BaseException) -> str:
    """The last line of the program itself that led to an error: its modules in the environment are not its own."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if not _is_foreign(f.filename)]
    return f"{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}" if lines else ""


def _is_foreign(file: str) -> bool:
    return file.startswith(("<", os.path.dirname(__file__), sys.prefix, sys.base_prefix)) or "-packages" in file


def _message(error: BaseException) -> str:
    """What an error says, and the first of those that it was raised from."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    return str(error) if first is error else f"{error} ({type(first).__name__}: {first})"
