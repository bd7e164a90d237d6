"""Values: large tensors of the host are never touched, and small tensors of the device keep what integers and booleans say.

The device's memory is memory of this process, so that a small tensor is computed on the host, in place. Kernels write
nothing. A result that hangs on numbers which nobody has computed is a guess, and is noted as one.
"""

import contextlib
import ctypes
import functools
import importlib
import math
import warnings
from typing import Any, Callable, Dict, List

LARGE = 1 << 20  # bytes of a tensor of the host that is not computed
SMALL = 1 << 18  # elements of a tensor of the device that is
SMALL_OF_INTEGERS = 1 << 23  # the same of integers and booleans: masks of experts, for one

# Operations whose results are computed on the host, whatever the types are: they make integers and booleans.
_COMPUTED = """
    fill_.Scalar fill_.Tensor zero_ arange.start_out eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor gt.Scalar
    gt.Tensor le.Scalar le.Tensor ge.Scalar ge.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_not logical_and logical_or
    logical_not cumsum index_put_ scatter_.value where.self masked_fill_.Scalar any all max min clamp clamp_min
    isin.Tensor_Tensor remainder.Scalar floor_divide sort sort.stable topk prod.dim_int prod searchsorted.Tensor argsort amax
    amin histc _to_copy
""".split()
# Operations that are computed for integers and booleans alone.
_OF_INTEGERS = """
    add.Tensor sub.Tensor mul.Tensor sum sum.dim_IntList gather index.Tensor index_select cat copy_ div.Tensor_mode
    neg argmax _foreach_copy_
""".split()

# Comparisons of numbers, of which those that nobody has computed may be no numbers, and so unequal to themselves.
_COMPARING = ("eq", "ne", "lt", "gt", "le", "ge")

# The attribute of truth values that nobody has computed.
_UNKNOWN = "_plimsoll_unknown"

# Operations that choose among numbers which nobody has computed, and where the choice is in their results. It is balanced:
# each place is chosen equally often.
_CHOOSING = {"topk": 1, "sort": 1, "sort.stable": 1, "max.dim": 1, "min.dim": 1, "argmax": 0, "argmin": 0, "multinomial": 0}


def install(torch: Any, recorder: Any) -> None:
    # What ``with torch.device(...)`` gives a device is known by identity: it is listed before any is replaced.
    importlib.import_module("torch.utils._device")._device_constructors()
    _leave_large(torch)
    _compute_small(torch, recorder)
    _sizes_by_value(torch, recorder)
    _believe(torch)
    _tell_scripts(torch)


def _tell_scripts(torch: Any) -> None:
    """TorchScript knows torch's functions by their identity: those that were replaced stand for the same operators."""
    from torch.jit import _builtins

    for name in dir(torch):
        function = getattr(torch, name)
        operator = _builtins._find_builtin(getattr(function, "__wrapped__", None))
        if operator is not None:
            _builtins._register_builtin(function, operator)


def _believe(torch: Any) -> None:
    """Distributions check that numbers of the device are valid, which nobody has computed."""
    really = torch._is_all_true

    def is_all_true(x):
        checked = really(x)
        return checked if x.device.type != "cuda" else torch.ones((), dtype=torch.bool)

    torch._is_all_true = is_all_true
    if hasattr(torch.library, "get_kernel"):  # what the kernel asks is computed
        return
    _draw_unchecked(torch)
    draw = torch.normal

    def normal(mean, std=None, *arguments, **options):
        if not isinstance(std, torch.Tensor) or std.device.type != "cuda":
            return draw(mean, std, *arguments, **options) if std is not None else draw(mean, *arguments, **options)
        return torch.empty_like(std).normal_(generator=options.get("generator")).mul_(std).add_(mean)

    torch.normal = functools.wraps(draw)(normal)


def _draw_unchecked(torch: Any) -> None:
    """Draws of the device as its kernel makes them, without its look at the sums of numbers that nobody has computed."""
    really = torch.multinomial

    def multinomial(x, num_samples, replacement=False, *, generator=None, out=None):
        if x.device.type != "cuda" or out is not None or replacement and num_samples > 1:
            return really(x, num_samples, replacement, generator=generator, out=out)
        numbers = torch.empty_like(x).exponential_(generator=generator)
        torch.div(x, numbers, out=numbers)
        return numbers.argmax(-1, keepdim=True) if num_samples == 1 else numbers.topk(num_samples).indices

    torch.multinomial = torch.Tensor.multinomial = functools.wraps(really)(multinomial)


# The host


def _leave_large(torch: Any) -> None:
    """Leaves large tensors of the host as they are: their pages are never touched."""
    tensor, plain = torch.Tensor, (torch.Tensor, torch.nn.Parameter)

    def is_large(x: Any) -> bool:
        return type(x) in plain and x.device.type == "cpu" and x.numel() * x.element_size() > LARGE

    def is_left(x: Any) -> bool:
        """Whether a copy of a tensor is not made: it is large, and no gradient flows through the copy."""
        return is_large(x) and not (x.requires_grad and torch.is_grad_enabled())

    def is_converted(to: Any, x: Any) -> bool:
        """Whether a large tensor comes to a device with another type: the host makes it, page by page."""
        return to.device.type == "cuda" and isinstance(x, tensor) and is_large(x) and x.dtype != to.dtype

    writes = "normal_ uniform_ zero_ fill_ erfinv_ mul_ add_ sub_ div_ clamp_ trunc_ copy_ exponential_ bernoulli_ random_"
    for name in writes.split():
        really = getattr(tensor, name)

        def write(self, *arguments, _really=really, **options):
            leaves = is_large(self) or arguments and is_converted(self, arguments[0])
            return self if leaves else _really(self, *arguments, **options)

        setattr(tensor, name, functools.wraps(really)(write))
    _sample_once(torch, is_large)
    for name in ("zeros", "ones", "rand", "randn", "full"):
        setattr(torch, name, _empty_if_large(torch, getattr(torch, name)))
    for name in ("zeros_like", "ones_like", "rand_like", "randn_like", "full_like"):
        setattr(torch, name, _empty_if_like_large(torch, getattr(torch, name), is_large))
    pin = tensor.pin_memory
    tensor.pin_memory = lambda self, *a: torch.empty_like(self, pin_memory=True) if is_large(self) else pin(self, *a)
    move = tensor.to

    def to(self, *arguments, **options):
        if not is_left(self):
            made = _converted_on_host(torch, self, arguments, options)
            return move(self, *arguments, **options) if made is None else made
        device, dtype = _target(torch, arguments, options)
        if dtype is not None and dtype != self.dtype:
            empty = torch.empty_like(self, dtype=dtype)
            return empty if device is None or device.type == "cpu" else move(empty, device)
        if options.get("copy") and (device is None or device.type == "cpu"):
            return torch.empty_like(self)
        return move(self, *arguments, **options)

    tensor.to = to
    copy = tensor.clone
    tensor.clone = lambda self, *a, **o: torch.empty_like(self) if is_left(self) else copy(self, *a, **o)
    converting = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
    for name, dtype in converting.items():
        really = getattr(tensor, name)

        def convert(self, *arguments, _really=really, _dtype=dtype, **options):
            if is_left(self) and self.dtype != _dtype:
                return torch.empty_like(self, dtype=_dtype)
            return _really(self, *arguments, **options)

        setattr(tensor, name, functools.wraps(really)(convert))


def _sample_once(torch: Any, is_large: Callable[[Any], bool]) -> None:
    """trunc_normal_ draws until all numbers are within bounds, which those that nobody has drawn never are."""
    init = torch.nn.init
    really = init._no_grad_trunc_normal_

    def trunc_normal(x, mean, std, a, b, generator=None):
        if is_large(x):
            return x
        if x.device.type != "cuda":
            return really(x, mean, std, a, b, generator)
        with torch.no_grad():
            x.normal_(mean, std, generator=generator)
            torch.where((x < a) | (x > b), torch.empty_like(x).normal_(mean, std, generator=generator), x)
        return x

    init._no_grad_trunc_normal_ = functools.wraps(really)(trunc_normal)


def _empty_if_large(torch: Any, really: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(really)
    def make(*arguments, **options):
        size = options.get("size", arguments[0] if arguments and not isinstance(arguments[0], int) else arguments)
        device = options.get("device")
        on_host = (torch.get_default_device() if device is None else torch.device(device)).type == "cpu"
        try:
            is_large = on_host and options.get("out") is None and 4 * math.prod(size) > LARGE
        except TypeError:
            is_large = False
        if not is_large:
            return really(*arguments, **options)
        return torch.empty(tuple(size), **{k: v for k, v in options.items() if k not in ("size", "fill_value", "generator")})

    return make


def _empty_if_like_large(torch: Any, really: Callable[..., Any], is_large: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(really)
    def make(x, *arguments, **options):
        if is_large(x) and torch.device(options.get("device") or x.device).type == "cpu":
            return torch.empty_like(x, **{k: v for k, v in options.items() if k != "fill_value"})
        return really(x, *arguments, **options)

    return make


def _converted_on_host(torch: Any, x: Any, arguments: Any, options: Any) -> Any:
    """A large tensor of the device that comes to the host with another type, which the host makes. None for all others."""
    if type(x) is not torch.Tensor or x.device.type != "cuda" or x.requires_grad or x.numel() * x.element_size() <= LARGE:
        return None
    device, dtype = _target(torch, arguments, options)
    if device is None or device.type != "cpu" or dtype in (None, x.dtype):
        return None
    return torch.empty_like(x, dtype=dtype, device=device)


def _target(torch: Any, arguments: Any, options: Any) -> Any:
    """The device and the type that ``to`` was asked for."""
    if arguments and isinstance(arguments[0], torch.Tensor):
        return arguments[0].device, arguments[0].dtype
    given = {name: options[name] for name in ("dtype", "device") if options.get(name) is not None}
    return torch._C._nn._parse_to(*[x for x in arguments if x is not None and not isinstance(x, bool)], **given)[:2]


# The device


def alias(torch: Any, x: Any) -> Any:
    """A tensor of the host over the memory of a tensor of the device."""
    if x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    memory = (ctypes.c_char * (count * x.element_size())).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype, count=count).as_strided(x.shape, x.stride())


def is_small(torch: Any, x: Any) -> bool:
    most = SMALL if x.is_floating_point() else SMALL_OF_INTEGERS
    return x.device.type == "cuda" and x.numel() <= most and x.layout is torch.strided and not x.is_complex()


class _TooLarge(Exception):
    pass


def _on_host(torch: Any, x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        on_device = x.device.type == "cuda"
        if not (is_small(torch, x) if on_device else x.numel() * x.element_size() <= LARGE):
            raise _TooLarge
        return alias(torch, x) if on_device else x
    if isinstance(x, (list, tuple)):
        return type(x)(_on_host(torch, y) for y in x)
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _compute_small(torch: Any, recorder: Any) -> None:
    warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # that kernels are replaced
    library = torch.library.Library("aten", "IMPL")
    recorder.keep(library)
    write = torch.Tensor.copy_.__wrapped__
    watched: Dict[Any, Callable[..., Any]] = {}
    for name in dict.fromkeys([*_COMPUTED, *_OF_INTEGERS, *_CHOOSING]):
        operation = _operation(torch, name)
        if operation is None:
            recorder.note("values", f"{name} is not computed: this release of torch has no operation of that name")
        elif not hasattr(torch.library, "get_kernel"):
            watched[operation] = _computing(torch, name, operation, _without_keys(operation), write, recorder)
        elif (kernel := _kernel(torch, name)) is not None:
            library.impl(name, _computing(torch, name, operation, kernel, write, recorder), "CUDA", with_keyset=True)
        else:
            recorder.note("values", f"{name} is not computed: this release of torch has no kernel of that name")
    if watched:
        recorder.keep(_watch(torch, watched, lambda operation: _computing_other(torch, operation, write)))
    _usual_numbers(torch, library, write)
    _read_unsigned(torch)


def _usual_numbers(torch: Any, library: Any, write: Callable[..., Any]) -> None:
    """Numbers that nobody has computed are finite: a program that looks for others takes its usual way."""
    for name, usual in (("isfinite", True), ("isnan", False), ("isinf", False)):
        for place in (torch, torch.Tensor):
            really = getattr(place, name)

            def look(x, *arguments, _really=really, _usual=usual, **options):
                made = _really(x, *arguments, **options)
                if not torch.compiler.is_compiling() and type(made) is torch.Tensor and is_small(torch, made):
                    write(alias(torch, made), torch.full(made.shape, _usual, device="cpu"))
                return made

            setattr(place, name, functools.wraps(really)(look))

    def read(x):
        value = alias(torch, x.detach()).item()
        return value if not x.is_floating_point() or math.isfinite(value) else 0.0

    if hasattr(torch.library, "get_kernel"):
        library.impl("_local_scalar_dense", read, "CUDA")
    # Matrices of such numbers have inverses and factors. What an operation says of them is a number that nobody has computed.
    library.impl("_linalg_check_errors", lambda said, name, *, is_matrix: None, "CUDA")


def _read_unsigned(torch: Any) -> None:
    """An operation of Python returns no integer of 64 bits without a sign: Python reads it itself."""
    really = torch.Tensor.item

    def item(x):
        if type(x) is torch.Tensor and x.dtype is torch.uint64 and x.device.type == "cuda" and x.numel() == 1:
            return ctypes.c_uint64.from_address(x.data_ptr()).value
        return really(x)

    torch.Tensor.item = functools.wraps(really)(item)


def _operation(torch: Any, name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _kernel(torch: Any, name: str) -> Any:
    """The kernel that torch has for the device, which takes the keys of the dispatcher first."""
    for key in ("CUDA", "CompositeExplicitAutograd"):
        try:
            return torch.library.get_kernel(f"aten::{name}", key).call_boxed
        except Exception:  # this release has none of that key
            pass
    return None


def _without_keys(operation: Any) -> Callable[..., Any]:
    call = operation._op  # without the frame of OpOverload.__call__, which would hide who allocates
    return lambda keys, *arguments, **options: call(*arguments, **options)


def _watch(torch: Any, computing: Dict[Any, Callable[..., Any]], others: Callable[[Any], Callable[..., Any]]) -> Any:
    """Sees operations below autograd, in releases before torch.library.get_kernel: a kernel cannot be replaced there and
    still be called. The operations that a kernel calls are not seen, so that all others are computed, too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    plain = torch._C._disabled_torch_dispatch_impl  # of classes whose tensors are made of no others
    mode = torch._C._TorchDispatchModeKey
    traces = (mode.FAKE, mode.FUNCTIONAL, mode.PROXY)  # operations that are traced have no memory

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            traced = any(torch._C._get_dispatch_mode(key) for key in traces)
            if not traced and any(t.__torch_dispatch__ is not plain for t in types):
                return NotImplemented  # a tensor of such a class comes again, as the tensors that it is made of
            if traced or operation.namespace != "aten":
                return operation._op(*arguments, **(options or {}))
            if operation not in computing:
                computing[operation] = others(operation)
            return computing[operation](None, *arguments, **(options or {}))

    _data_of_inference(torch)
    watch = Watch()
    watch.__enter__()  # until the program ends
    return watch


def _data_of_inference(torch: Any) -> None:
    """A tensor that inference mode made has no ``data`` under a mode, in these releases. So it is read outside of it."""
    data = torch._C.TensorBase.data

    def read(x):
        if not x.is_inference():
            return data.__get__(x)
        with torch._C._DisableTorchDispatch():
            return data.__get__(x)

    torch.Tensor.data = property(read, data.__set__, doc=data.__doc__)


def _put(torch: Any, write: Callable[..., Any], made: Any, value: Any) -> None:
    """Writes what the host has computed into the result of a kernel that did nothing."""
    if isinstance(made, torch.Tensor):
        if made.shape == value.shape and made.dtype == value.dtype:
            write(alias(torch, made) if made.device.type == "cuda" else made, value)
    elif isinstance(made, (list, tuple)):
        for m, v in zip(made, value):
            _put(torch, write, m, v)


def _computing(
    torch: Any, name: str, operation: Any, kernel: Callable[..., Any], write: Callable[..., Any], recorder: Any
) -> Callable[..., Any]:
    """An operation that computes its result on the host after the kernel that does nothing."""
    base = name.partition(".")[0]
    tensors = [i for i, a in enumerate(operation._schema.arguments) if str(a.type) == "Tensor"]
    returns_new, only_integers = not operation._schema.is_mutable, name in _OF_INTEGERS

    def choose(made: Any, among: Any) -> None:
        """Writes a balanced choice: the rows of the result, one after the other, take the places in turn."""
        chosen = made[_CHOOSING[name]] if isinstance(made, (list, tuple)) else made
        recorder.note("guesses", f"{base} chooses among numbers that were not computed: its choice is balanced")
        if is_small(torch, chosen) and chosen.numel():
            places = max(1, among.shape[-1] if among.dim() else 1)
            turns = torch.ops.aten.arange.default(chosen.numel(), device="cpu")
            write(alias(torch, chosen), turns.remainder(places).reshape(chosen.shape))

    def compute(keys, *arguments, **options):
        given: List[Any] = list(arguments)
        for i in tensors:
            if i < len(given) and not isinstance(given[i], torch.Tensor):
                given[i] = torch.tensor(given[i])
        first = given[0] if given else None
        if isinstance(first, (list, tuple)):
            first = first[0] if first else None
        if not isinstance(first, torch.Tensor):
            first = None
        if first is not None and (first.is_floating_point() or first.is_complex()):
            if name in _CHOOSING:
                made = kernel(keys, *given, **options)
                choose(made, first)
                return made
            if only_integers:
                return kernel(keys, *given, **options)
        made = kernel(keys, *given, **options)  # which gives out= its size
        try:
            if any(getattr(x, _UNKNOWN, False) for x in given):
                raise _TooLarge
            here, named = _on_host(torch, tuple(given)), {k: _on_host(torch, v) for k, v in options.items()}
            if base in _COMPARING:
                here = tuple(_numbers(torch, x) for x in here)
            with torch.no_grad():
                value = _histc(torch, *here, **named) if base == "histc" else operation(*here, **named)
            if returns_new:
                _put(torch, write, made, value)
        except _TooLarge:
            if returns_new and isinstance(made, torch.Tensor) and made.numel() == 1:
                if base in ("any", "all"):
                    recorder.note("guesses", f"{base} of values that were not computed: nothing is unusual")
                _put(torch, write, made, torch.full(made.shape, base == "all", dtype=made.dtype, device="cpu"))
            elif returns_new and isinstance(made, torch.Tensor) and made.dtype is torch.bool:
                setattr(made, _UNKNOWN, True)
            elif base == "sum" and is_small(torch, made):  # nothing is unusual, so none of the truths is counted
                _put(torch, write, made, torch.zeros(made.shape, dtype=made.dtype, device="cpu"))
        except (RuntimeError, IndexError):
            recorder.note("values", f"{name}: some results are unknown")
        return made

    return compute


def _numbers(torch: Any, x: Any) -> Any:
    """A tensor without what is no number."""
    return torch.ops.aten.nan_to_num(x, 0.0, math.inf, -math.inf) if isinstance(x, torch.Tensor) else x


def _histc(torch: Any, x: Any, *arguments: Any, **options: Any) -> Any:
    """The host counts no integers."""
    return torch.ops.aten.histc(x.double(), *arguments, **options).to(x.dtype)


def _computing_other(torch: Any, operation: Any, write: Callable[..., Any]) -> Callable[..., Any]:
    """Any operation: the host computes its result where all that it reads and makes is small, and it reads no numbers."""
    call, schema = operation._op, operation._schema
    is_view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    is_random = torch.Tag.nondeterministic_seeded in operation.tags
    reads_one = operation is torch.ops.aten._local_scalar_dense.default
    places = [i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"]

    def tensors(x: Any) -> List[Any]:
        if isinstance(x, (list, tuple)):
            return [t for y in x for t in tensors(y)]
        return [x] if isinstance(x, torch.Tensor) else []

    def is_known(x: Any) -> bool:
        return is_small(torch, x) or x.device.type == "cpu" and x.numel() * x.element_size() <= LARGE

    def compute(keys, *arguments, **options):
        made = call(*arguments, **options)
        read = tensors([arguments, list(options.values())])
        seen = read + tensors(made)
        if any(x.is_floating_point() or x.is_complex() for x in read) or not all(map(is_known, seen)):
            return made
        if all(x.device.type == "cpu" for x in seen):
            return made
        given = list(arguments)
        for i in places:
            if i < len(given) and isinstance(given[i], (int, float)):
                given[i] = torch.tensor(given[i])
        with contextlib.suppress(RuntimeError, IndexError, TypeError), torch.no_grad():
            value = operation(*_on_host(torch, tuple(given)), **{k: _on_host(torch, v) for k, v in options.items()})
            if not schema.is_mutable:
                _put(torch, write, made, value)
        return made

    return _without_keys(operation) if is_view or is_random or reads_one else compute


def _sizes_by_value(torch: Any, recorder: Any) -> None:
    """Operations whose results have a size that depends on values."""
    library = torch.library.Library("aten", "IMPL")
    recorder.keep(library)
    write = torch.Tensor.copy_.__wrapped__

    def copied(value: Any, device: Any) -> Any:
        made = torch.empty(value.shape, dtype=value.dtype, device=device)
        if value.numel():
            write(alias(torch, made), value)
        return made

    def guess(what: str) -> None:
        recorder.note("guesses", f"{what} of values that were not computed: as many as there can be")

    def nonzero(x):
        if is_small(torch, x):
            return copied(alias(torch, x).nonzero(), x.device)
        guess("nonzero")
        return torch.empty((x.numel(), x.dim()), dtype=torch.int64, device=x.device)

    def unique2(x, sorted=True, return_inverse=False, return_counts=False):
        if is_small(torch, x):
            found = torch.ops.aten._unique2(alias(torch, x), sorted, return_inverse, return_counts)
            return tuple(copied(value, x.device) for value in found)
        guess("unique")
        counts = [x.numel() if wanted else 0 for wanted in (return_inverse, return_counts)]
        return (torch.empty(x.numel(), dtype=x.dtype, device=x.device),
                *(torch.empty(n, dtype=torch.int64, device=x.device) for n in counts))  # fmt: skip

    def unique_consecutive(x, return_inverse=False, return_counts=False, dim=None):
        if is_small(torch, x):
            found = torch.ops.aten.unique_consecutive(alias(torch, x), return_inverse, return_counts, dim)
            return tuple(copied(value, x.device) for value in found)
        guess("unique_consecutive")
        counts = [x.numel() if wanted else 0 for wanted in (return_inverse, return_counts)]
        return (torch.empty(x.shape, dtype=x.dtype, device=x.device),
                *(torch.empty(n, dtype=torch.int64, device=x.device) for n in counts))  # fmt: skip

    def bincount(x, weights=None, minlength=0):
        if is_small(torch, x) and weights is None:
            return copied(torch.ops.aten.bincount(alias(torch, x), None, minlength), x.device)
        guess("bincount")
        kind = torch.int64 if weights is None else weights.dtype
        return torch.empty(max(minlength, 1), dtype=kind, device=x.device)

    def masked_select(x, mask):
        count = int(alias(torch, mask).expand(x.shape).sum()) if is_small(torch, mask) else None
        if count is None:
            guess("masked_select")
            count = x.numel()
        made = torch.empty(count, dtype=x.dtype, device=x.device)
        if is_small(torch, x) and is_small(torch, mask) and count:
            write(alias(torch, made), torch.ops.aten.masked_select(alias(torch, x), alias(torch, mask)))
        return made

    def repeat_interleave(repeats, output_size=None):
        if is_small(torch, repeats):
            return copied(torch.ops.aten.repeat_interleave.Tensor(alias(torch, repeats)), repeats.device)
        guess("repeat_interleave")
        count = repeats.numel() if output_size is None else output_size
        return torch.empty(count, dtype=repeats.dtype, device=repeats.device)

    def coalesce(x):
        indices, values = x._indices(), x._values()
        if is_small(torch, indices):
            found = copied(alias(torch, indices).unique(dim=1), indices.device)
        else:
            guess("coalesce")
            found = torch.empty_like(indices)
        kept = torch.empty((found.shape[1], *values.shape[1:]), dtype=values.dtype, device=values.device)
        return torch.sparse_coo_tensor(found, kept, x.shape, check_invariants=False)._coalesced_(True)

    library.impl("_coalesce", coalesce, "SparseCUDA")
    library.impl("bincount", bincount, "CUDA")
    library.impl("masked_select", masked_select, "CUDA")
    library.impl("repeat_interleave.Tensor", repeat_interleave, "CUDA")
    library.impl("nonzero", nonzero, "CUDA")
    library.impl("_unique2", unique2, "CUDA")
    library.impl("unique_consecutive", unique_consecutive, "CUDA")
