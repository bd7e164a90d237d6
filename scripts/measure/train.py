#!/usr/bin/env python3
"""Measure the memory of a training step, phase by phase, with PyTorch itself.

The script builds a Hugging Face transformers model from a config.json, with random
weights and no download, trains it for a few steps on made-up tokens, and reports the
bytes alive after each phase (load, forward, backward, step) and at the peak of it.
It does what the Trainer of transformers does: loss by the model's own loss function,
use_cache off, autocast with the outputs converted to fp32, clip, step, zero_grad.

  --device fake  Tensors without memory (FakeTensorMode) which say that they are on
                 CUDA, so that everything PyTorch decides by device (autocast, foreach,
                 the attention kernel) is decided as on a GPU. No GPU, no driver and
                 hardly any memory are needed; a 70B model takes a minute.
  --device cuda  The first GPU: the counters of the caching allocator, and what the
                 device uses besides them (the CUDA context).
  --device cpu   Real tensors in host memory: resident set size of the process (its
                 peak from VmHWM) and proportional set size.

On fake and cpu, and on cuda with --trace, a dispatch mode follows every tensor storage from the operation that
allocates it to its release, so that the sum of the bytes asked for is exact at every
moment: views share a storage, operations in place allocate nothing. What a kernel
allocates for itself and frees before it returns is not seen (the workspace of cuBLAS,
the fp32 accumulator of the backward of flash attention, what a sort needs); on a real
GPU it is the difference between "requested" and "sum".

What the fake device forces, since there is no GPU to ask:
  - the attention kernel, by the rules of PyTorch for a GPU of compute capability 8.0
    or more: flash for fp16 and bf16 without a mask and heads of up to 256; otherwise the
    memory-efficient kernel; the naive one where the size of the heads is not aligned;
  - a value read back to the host (`.item()`) is 1, so that fp16 steps are never skipped;
  - random number states are not saved by gradient checkpointing (they live on the host).

What the phases are: "load" makes the model with random weights (its peak is not that of
reading a checkpoint); "forward" ends when the outputs other than the loss are released;
"step" is clip, optimizer.step and zero_grad(set_to_none=True).

How far it can be trusted: for a small Llama (torch 2.15, transformers 5.23) the sums of
fake tensors and of real tensors on the host are the same to the byte in every phase, and
the resident set of a run without any mode is that much and 18 to 25 MiB of libraries (with
MALLOC_MMAP_THRESHOLD_=16384, so that what is freed goes back to the kernel).

Examples:
  train.py --config internal/input/model/catalog/llama-3.2-1b.json --precision bf16 --layers 4
  train.py --config internal/input/model/catalog/gpt2.json --precision amp-fp16 --clip 1 --json
  train.py --config config.json --lora adapter_config.json --trace held.json

--trace FILE writes, for each phase, the groups of storages alive at its peak and at its
end, the largest first: bytes, shape, dtype, the operation that made them and the module
(in a backward: the autograd node) it was made in.

Needs torch 2.15 and transformers 4.46 or newer; peft for --lora, accelerate for --precision amp-*.
"""

import argparse
import collections
import contextlib
import ctypes
import gc
import json
import os
import sys
import weakref

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

with contextlib.suppress(ImportError):  # new in transformers 5
    import transformers.initialization

aten = torch.ops.aten

IN_PLACE_IN_FORMULAS = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}

class Tracker(TorchDispatchMode):
    """Follows the storages on one type of device.

    Every allocation and release is an event; the storages alive at the peak of a phase
    are found afterwards, by replaying its events. That keeps the mode itself cheap.
    """

    def __init__(self, device_type, pretend, follows=True):
        super().__init__()
        self.device_type = device_type
        self.pretend = pretend
        self.follows = follows
        self.alive = {}  # storage address -> key of its record
        self.watch = {}  # key -> weak reference to the storage
        self.records = []  # key -> what is known of the storage
        self.kinds = {}  # key -> parameters, buffers, gradients, optimizer or inputs
        self.modules = []  # paths of the modules being run
        self.total = 0
        self.holders_when_alone = None
        self.begin()

    def begin(self):
        """A new phase: its peak is counted from what is alive now."""
        self.at_start = set(self.alive.values())
        self.events = []
        self.peak, self.peak_at = self.total, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.pretend and func is aten._local_scalar_dense.default:
            return one(args[0].dtype)
        if not torch.is_grad_enabled() and (node := torch._C._current_autograd_node()):
            func = self.as_without_mode(func, args, node)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.follow(leaf, func)
        return out

    def as_without_mode(self, func, args, node):
        """The operation autograd would have done if no dispatch mode were there to see it.

        Autograd adds two gradients that meet in place where nobody else holds the first
        (can_accumulate_inplace in input_buffer.cpp), and some formulas fill fresh zeros
        in place, but neither for a subclass of Tensor, nor for any tensor under a mode.
        """
        if func is aten.add.Tensor and len(args) == 2 and isinstance(args[1], torch.Tensor):
            holders = args[0]._use_count(), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
            if self.holders_when_alone is None:
                self.holders_when_alone = holders
            if holders == self.holders_when_alone and torch._prims_common.is_non_overlapping_and_dense_or_false(args[0]):
                return aten.add_.Tensor
        if node.name()[-1].isdigit():  # a formula of PyTorch itself, not a Function in Python
            return IN_PLACE_IN_FORMULAS.get(func, func)
        return func

    def calibrate(self):
        """Counts the holders of a gradient that only its buffer, this call and Python hold."""
        with self:
            leaf = torch.ones((), device=self.device_type, requires_grad=True)
            (leaf * 2 + leaf * 3).backward()

    def follow(self, tensor, func):
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.alive:
            return
        node = torch._C._current_autograd_node()
        key = len(self.records)
        self.records.append({
            "bytes": storage.nbytes(),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "op": str(func).removesuffix(".default"),
            "module": self.modules[-1] if self.modules else node.name() if node else "",
        })
        self.alive[address] = key
        self.watch[key] = weakref.ref(storage, lambda _: self.release(address, key))
        self.events.append((key, True))
        self.total += self.records[key]["bytes"]
        if self.total > self.peak:
            self.peak, self.peak_at = self.total, len(self.events)

    def release(self, address, key):
        del self.alive[address], self.watch[key]
        self.events.append((key, False))
        self.total -= self.records[key]["bytes"]

    def name(self, kind, tensors):
        """Says what these tensors are; the first word for a storage stands."""
        for tensor in tensors:
            key = self.alive.get(tensor.untyped_storage()._cdata)
            if key is not None:
                self.kinds.setdefault(key, kind)

    def alive_at_peak(self):
        keys = set(self.at_start)
        for key, allocated in self.events[: self.peak_at]:
            (keys.add if allocated else keys.discard)(key)
        return keys

    def components(self, keys):
        sums = collections.Counter()
        for key in keys:
            sums[self.kinds.get(key, "rest")] += self.records[key]["bytes"]
        return dict(sums)

    def groups(self, keys):
        """The storages, alike ones together, the largest group first."""
        count = collections.Counter()
        for key in keys:
            record = self.records[key]
            count[self.kinds.get(key, "rest"), *(
                tuple(value) if isinstance(value, list) else value for value in record.values()
            )] += 1
        fields = ("kind", "bytes", "shape", "dtype", "op", "module")
        groups = [dict(zip(fields, group), count=number) for group, number in count.items()]
        return sorted(groups, key=lambda group: -group["bytes"] * group["count"])

    def follow_modules(self, model):
        paths = {module: name for name, module in model.named_modules()}

        def enter(module, _):
            self.modules.append(paths.get(module, type(module).__name__))

        def leave(*_):
            self.modules.pop()

        torch.nn.modules.module.register_module_forward_pre_hook(enter)
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True)


def one(dtype):
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def pretend_cuda():
    """Lets autograd run on fake CUDA tensors where there is no GPU.

    PyTorch already replaces the device guard of CUDA under FakeTensorMode. What is left
    is the engine of autograd, which asks the CUDA hooks whether device 0 has a context
    and refuses; the answer is replaced in a copy of the hooks' table of virtual functions
    (AcceleratorHooksInterface: two destructors, isBuilt, isAvailable, hasPrimaryContext).
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    library._ZN2at6detail12getCUDAHooksEv.restype = ctypes.c_void_p
    hooks = ctypes.cast(library._ZN2at6detail12getCUDAHooksEv(), ctypes.POINTER(ctypes.c_void_p))
    header, slots, has_primary_context = 2, 128, 4
    table = (ctypes.c_void_p * (header + slots))()
    word = ctypes.sizeof(ctypes.c_void_p)
    ctypes.memmove(table, hooks[0] - header * word, ctypes.sizeof(table))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda hooks, device: True)
    table[header + has_primary_context] = ctypes.cast(yes, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(table) + header * word
    pretend_cuda.kept = table, yes

    torch._C._ensureCUDADeviceGuardSet()
    # One thread: the queues of the devices were made for the devices there are.
    torch.autograd.set_multithreading_enabled(False)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    # The defaults of foreach ask for the exact type of the tensors.
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        sys.modules[name]._foreach_supported_types.append(FakeTensor)
    # transformers takes fake tensors for a trace, and would make masks it otherwise omits.
    transformers.utils.import_utils.is_fake_tensor = lambda _: False
    # Fake tensors hold no values, so that sampling until all lie in an interval would not end.
    if hasattr(transformers, "initialization"):
        transformers.initialization.trunc_normal_ = lambda tensor, *_, **__: tensor
    torch.nn.functional.scaled_dot_product_attention = attention_as_on_cuda
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.nn.Module._apply = convert_module


def convert_module(module, convert, recurse=True):
    """Module.to for fake tensors, whose contents PyTorch refuses to swap while they are watched."""
    for child in module.children() if recurse else ():
        child._apply(convert)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                converted = convert(parameter)
            if converted is not parameter:
                module._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


attention_kernels = collections.Counter()


def attention_as_on_cuda(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """scaled_dot_product_attention as PyTorch does it on a GPU of compute capability 8.0 or more."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    width = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and width == value.shape[-1] <= 256:
        attention_kernels["flash"] += 1
        scale = width**-0.5 if scale is None else scale
        if missing := -width % 8:
            query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, float("-inf"))
    if width % (8 if half else 4) or value.shape[-1] % (8 if half else 4):
        attention_kernels["math"] += 1
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    attention_kernels["efficient"] += 1
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if missing := -attn_mask.shape[-1] % 16:
            attn_mask = torch.nn.functional.pad(attn_mask, (0, missing))[..., : attn_mask.shape[-1]]
    log_sum = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, log_sum, dropout_p, is_causal, scale=scale)[0]


def host_memory():
    """Bytes of this process in host memory: the figures of the kernel, now and at the peak."""
    wanted = {"Rss": "rss", "VmHWM": "rss_peak", "Pss": "pss"}
    found = {}
    for path in ("/proc/self/status", "/proc/self/smaps_rollup"):
        with open(path) as lines:
            for line in lines:
                field, _, rest = line.partition(":")
                if field in wanted:
                    found[wanted[field]] = int(rest.split()[0]) * 1024
    return found


def device_memory():
    """Bytes on the GPU: the counters of the caching allocator, and what the device says."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    found = {}
    for counter in ("requested", "allocated", "reserved"):
        found[counter] = stats[f"{counter}_bytes.all.current"]
        found[f"{counter}_peak"] = stats[f"{counter}_bytes.all.peak"]
    free, total = torch.cuda.mem_get_info()
    found |= {"device_used": total - free, "device_total": total, "outside_allocator": total - free - found["reserved"]}
    return found


class Measurement:
    """The phases of the run and what was seen in each."""

    def __init__(self, tracker, device, trace):
        self.tracker, self.device, self.trace = tracker, device, trace
        self.phases, self.held = [], []
        self.owners = {}  # kind -> a function that lists the tensors of that kind

    @contextlib.contextmanager
    def phase(self, step, name):
        if self.device == "cpu":
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets VmHWM
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        tracker = self.tracker
        tracker.begin()
        yield
        seen = {"step": step, "phase": name}
        if tracker.follows:
            for kind, tensors in self.owners.items():
                tracker.name(kind, tensors())
            at_peak, at_end = tracker.alive_at_peak(), set(tracker.alive.values())
            seen |= {
                "peak": tracker.peak, "end": tracker.total,
                "peak_components": tracker.components(at_peak), "end_components": tracker.components(at_end),
            }
        if self.device == "cpu":
            seen["host"] = host_memory()
        if self.device == "cuda":
            seen["cuda"] = device_memory()
        self.phases.append(seen)
        if self.trace:
            self.held.append({
                "step": step, "phase": name, "peak": tracker.groups(at_peak), "end": tracker.groups(at_end)})


def build_config(arguments):
    with open(arguments.config) as file:
        fields = json.load(file)
    if arguments.layers:
        names = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "decoder_layers", "encoder_layers")
        present = [name for name in names if name in fields]
        if not present:
            sys.exit(f"{arguments.config}: no field that counts the layers among {', '.join(names)}")
        fields.update({name: arguments.layers for name in present})
        for name in ("layer_types", "mlp_layer_types"):
            if name in fields:
                fields[name] = fields[name][: arguments.layers]
    for name in ("dtype", "torch_dtype", "quantization_config"):
        fields.pop(name, None)
    if fields.get("model_type") in ("t5", "mt5"):
        fields.setdefault("decoder_start_token_id", 0)
    architecture = arguments.architecture or fields.get("architectures", [None])[0]
    if not hasattr(transformers, architecture or ""):
        sys.exit(f"{arguments.config}: transformers {transformers.__version__} has no class {architecture}; see --architecture")
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    if arguments.dropout is not None:
        for name in vars(config):
            if name.endswith(("dropout", "dropout_prob", "dropout_rate", "pdrop")):
                setattr(config, name, arguments.dropout)
    config.use_cache = False  # as the Trainer sets it, and not inside of text_config
    return config, getattr(transformers, architecture)


def build_model(arguments):
    config, architecture = build_config(arguments)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arguments.precision, torch.float32)
    attention = {"flash": "flash_attention_2"}.get(arguments.attention, arguments.attention)
    try:
        named = "dtype" if int(transformers.__version__.partition(".")[0]) > 4 else "torch_dtype"
        model = architecture._from_config(config, **{named: dtype}, attn_implementation=attention)
    except (ImportError, ValueError) as error:  # a kernel not installed, or not for this architecture
        sys.exit(f"--attention {arguments.attention}: {error}")
    model.train()
    if config.model_type == "llama4":  # it takes pixels in the type of its weights only, which autocast converts to
        model.vision_model.patch_embedding.linear.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
    if config.model_type == "whisper":  # as it takes the spectrum in the type of its weights only
        model.model.encoder.conv1.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
    if arguments.gradient_checkpointing:
        settings = {"use_reentrant": arguments.use_reentrant}
        if arguments.device == "fake":
            settings["preserve_rng_state"] = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    if arguments.lora:
        try:
            import peft
        except ImportError:
            sys.exit("--lora needs the package peft, which is not installed: pip install peft")
        with open(arguments.lora) as file:
            fields = json.load(file)
        adapter = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[fields.pop("peft_type", "LORA")]
        known = {name: value for name, value in fields.items() if name in adapter.__dataclass_fields__}
        model = peft.get_peft_model(model, adapter(**known))
    return model, config


def under_autocast(model, arguments, device_type):
    """The forward as accelerate wraps it: autocast, then floating-point outputs to fp32."""
    if not arguments.precision.startswith("amp-"):
        return model
    try:
        from accelerate.utils import convert_outputs_to_fp32
    except ImportError:
        sys.exit("--precision amp-* needs the package accelerate, as the Trainer does: pip install accelerate")
    dtype = torch.bfloat16 if arguments.precision == "amp-bf16" else torch.float16
    return convert_outputs_to_fp32(torch.autocast(device_type, dtype=dtype)(model.__call__))


class MuonAndAdamW:
    """torch.optim.Muon for the matrices of hidden layers, torch.optim.AdamW for all other parameters."""

    def __init__(self, model, **settings):
        apart = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        apart.add(id(model.get_output_embeddings().weight))
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in apart]
        others = [p for p in trained if p.ndim != 2 or id(p) in apart]
        self.parts = torch.optim.Muon(matrices, lr=settings["lr"]), torch.optim.AdamW(others, **settings)

    @property
    def state(self):
        return {p: state for part in self.parts for p, state in part.state.items()}

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none):
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def build_optimizer(arguments, parameters, model):
    settings = {"lr": 1e-4}
    if arguments.implementation:
        settings |= {"foreach": arguments.implementation == "foreach", "fused": arguments.implementation == "fused"}
    if arguments.optimizer == "adafactor":  # as the Trainer sets it
        return transformers.optimization.Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False)
    if arguments.optimizer == "muon":
        return MuonAndAdamW(model, **settings)
    if arguments.optimizer == "sgd":
        settings["momentum"] = arguments.momentum
    classes = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
    if arguments.optimizer in ("rmsprop",):
        settings.pop("fused", None)
    return getattr(torch.optim, classes[arguments.optimizer])(parameters, **settings)


class PretendScaler(torch.amp.GradScaler):
    """A GradScaler that does not read back whether gradients overflowed: they did not."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)


def make_inputs(config, arguments, architecture, device):
    shape = arguments.batch, arguments.seq_len
    if config.model_type in ("clip", "siglip"):
        side = config.vision_config.image_size
        return {"input_ids": torch.randint(0, config.text_config.vocab_size, shape, device=device), "return_loss": True,
                "pixel_values": torch.rand(arguments.batch, 3, side, side, device=device)}
    if config.model_type in ("vit", "deit", "dinov2"):
        side = int(arguments.image_size.partition("x")[0]) if config.model_type == "dinov2" else config.image_size
        return {"pixel_values": torch.rand(arguments.batch, config.num_channels, side, side, device=device),
                "labels": torch.zeros(arguments.batch, dtype=torch.long, device=device)}
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        return {"input_features": torch.rand(arguments.batch, config.num_mel_bins, frames, device=device),
                "labels": torch.randint(0, config.vocab_size, shape, device=device)}
    vocabulary = config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, shape, device=device)
    if "SequenceClassification" in architecture:
        return {"input_ids": tokens, "labels": torch.zeros(arguments.batch, dtype=torch.long, device=device)}
    if "QuestionAnswering" in architecture:
        ends = torch.zeros(arguments.batch, dtype=torch.long, device=device)
        return {"input_ids": tokens, "start_positions": ends, "end_positions": ends}
    inputs = {"input_ids": tokens, "labels": torch.randint(0, vocabulary, shape, device=device)}
    if arguments.attention_mask:
        inputs["attention_mask"] = torch.ones_like(tokens)
    if "PreTraining" in architecture and config.model_type == "bert":
        inputs["next_sentence_label"] = torch.zeros(arguments.batch, dtype=torch.long, device=device)
    return inputs


def make_images(config, arguments, inputs, device):
    """Adds images to the inputs, as the processor of the model would: their pixels, their grids, and their tokens."""
    height, width = (int(side) for side in arguments.image_size.split("x"))
    vision, count = config.vision_config, arguments.images * arguments.batch
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    patches = (height // patch) * (width // patch)
    image_token = next(i for i in (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
                       if i is not None)
    if hasattr(vision, "temporal_patch_size"):  # Qwen-VL: rows of patches
        channels = getattr(vision, "in_channels", 3) * vision.temporal_patch_size
        inputs["pixel_values"] = torch.rand(count * patches, channels * patch * patch, device=device)
        inputs["image_grid_thw"] = torch.tensor([[1, height // patch, width // patch]] * count)
        tokens = patches // vision.spatial_merge_size**2
    elif hasattr(config, "image_grid_pinpoints"):
        tokens = make_tiles(config, arguments, inputs, device)
    else:
        inputs["pixel_values"] = torch.rand(count, 3, height, width, device=device)
        merged = getattr(config, "spatial_merge_size", None) or getattr(config, "scale_factor", None) or round(
            1 / getattr(config, "downsample_ratio", getattr(vision, "pixel_shuffle_ratio", 1)))
        tokens = getattr(config, "mm_tokens_per_image", None) or patches // merged**2
        if getattr(config, "vision_feature_select_strategy", "") == "full" and vision.model_type == "clip_vision_model":
            tokens += 1
        if vision.model_type == "pixtral":
            inputs["image_sizes"] = torch.tensor([[height, width]] * count)
        if config.model_type in ("idefics3", "smolvlm"):
            inputs["pixel_values"] = inputs["pixel_values"].view(arguments.batch, arguments.images, 3, height, width)
    inputs["input_ids"] = torch.randint(0, image_token, (arguments.batch, arguments.seq_len), device=device)
    for image in range(arguments.images):  # with a token between two images
        inputs["input_ids"][:, image * (tokens + 1) : image * (tokens + 1) + tokens] = image_token
    types = "mm_token_type_ids" if hasattr(vision, "temporal_patch_size") else "token_type_ids"
    if types == "mm_token_type_ids" or config.model_type in ("gemma3", "paligemma"):
        inputs[types] = (inputs["input_ids"] == image_token).int()
    return inputs


def make_tiles(config, arguments, inputs, device):
    """Adds the tiles of images, as the processors of LLaVA-NeXT and LLaVA-OneVision do, and returns their tokens."""
    from transformers.models.llava_next import modeling_llava_next as next_
    from transformers.models.llava_onevision import modeling_llava_onevision as one_vision

    size, count = [int(side) for side in arguments.image_size.split("x")], arguments.images * arguments.batch
    vision, module = config.vision_config, next_ if config.model_type == "llava_next" else one_vision
    tiles, side = 1, vision.image_size // vision.patch_size
    if module is next_ or arguments.images == 1:
        tiles = module.image_size_to_num_patches(size, config.image_grid_pinpoints, vision.image_size)
    inputs["pixel_values"] = torch.rand(count, tiles, 3, vision.image_size, vision.image_size, device=device)
    inputs["image_sizes"] = torch.tensor([size] * count)
    settings = {"vision_feature_select_strategy": "default"} if module is next_ else {}
    if module is one_vision:
        inputs["batch_num_images"] = torch.tensor([arguments.images] * arguments.batch)
    model = module.LlavaNextModel if module is next_ else module.LlavaOnevisionModel
    fake = type("fake", (), {"config": config})
    features, _ = model.pack_image_features(
        fake, [torch.zeros(tiles, side * side, 1)], torch.tensor([size]), image_newline=torch.zeros(1), **settings)
    return features[0].shape[0]


def freeze(model, parts):
    """Freezes the modules that have one of these words in their names."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            parameter.requires_grad_(False)


def train(arguments, measurement, device):
    """Loads the model and runs the steps, each phase measured."""
    tracker = measurement.tracker
    with measurement.phase(0, "load"):
        with torch.device(device):
            model, config = build_model(arguments)
        if arguments.freeze:
            freeze(model, arguments.freeze.split(","))
        gc.collect()
        trainable = [p for p in model.parameters() if p.requires_grad]
        measurement.owners["parameters"] = model.parameters
        measurement.owners["buffers"] = model.buffers
    architecture = type(model.get_base_model() if arguments.lora else model).__name__
    tracker.follow_modules(model)
    forward = under_autocast(model, arguments, device.type)
    optimizer = build_optimizer(arguments, trainable, model)
    scaler = None
    if arguments.precision == "amp-fp16":
        scaler = (PretendScaler if arguments.device == "fake" else torch.amp.GradScaler)(device.type)
    measurement.owners["gradients"] = lambda: [p.grad for p in trainable if p.grad is not None]
    measurement.owners["optimizer"] = lambda: [
        t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, torch.Tensor)]
    inputs = None
    measurement.owners["inputs"] = lambda: [t for t in (inputs or {}).values() if isinstance(t, torch.Tensor)]

    for step in range(1, arguments.steps + 1):
        for micro in range(1, arguments.accumulation + 1):
            suffix = f"-{micro}" if arguments.accumulation > 1 else ""
            inputs = make_inputs(config, arguments, architecture, device)
            if arguments.images:
                inputs = make_images(config, arguments, inputs, device)
            with measurement.phase(step, "forward" + suffix):
                outputs = forward(**inputs)
                loss = outputs["loss"]
                del outputs
            with measurement.phase(step, "backward" + suffix):
                inputs = None
                if arguments.accumulation > 1:
                    loss = loss / arguments.accumulation
                (scaler.scale(loss) if scaler else loss).backward()
                loss = loss.detach()
        with measurement.phase(step, "step"):
            if arguments.clip:
                if scaler:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(trainable, arguments.clip)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            # What is a gradient or a state must be said before the gradients go.
            for kind in ("gradients", "optimizer"):
                tracker.name(kind, measurement.owners[kind]())
            optimizer.zero_grad(set_to_none=True)
    return architecture, sum(p.numel() for p in model.parameters()), sum(p.numel() for p in trainable)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a config.json, or a file of internal/input/model/catalog")
    parser.add_argument("--device", choices=("fake", "cuda", "cpu"), default="fake")
    parser.add_argument("--architecture", help="class of transformers, if not the first of \"architectures\"")
    parser.add_argument("--layers", type=int, help="this many layers instead of the config's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--images", type=int, default=0, help="images in every sequence, of a multimodal model")
    parser.add_argument("--image-size", default="112x112", help="height and width in pixels")
    parser.add_argument("--freeze", help="words in the names of parameters that are not trained")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16"), default="bf16")
    parser.add_argument("--optimizer", choices=("adamw", "adam", "sgd", "adagrad", "rmsprop", "adafactor", "muon"), default="adamw")
    parser.add_argument("--momentum", type=float, default=0.0, help="of sgd")
    implementation = parser.add_mutually_exclusive_group()
    for name in ("foreach", "fused", "for-loop"):
        implementation.add_argument(f"--{name}", dest="implementation", action="store_const", const=name)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--use-reentrant", action="store_true")
    parser.add_argument("--attention", choices=("eager", "sdpa", "flash"), default="sdpa")
    parser.add_argument("--attention-mask", action="store_true", help="give the model the mask of a batch without padding")
    parser.add_argument("--lora", metavar="FILE", help="an adapter_config.json of peft")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--clip", type=float, help="the largest norm of the gradients")
    parser.add_argument("--dropout", type=float, help="all dropout probabilities, instead of the config's")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trace", metavar="FILE", help="write what is alive at the peak and the end of each phase")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main():
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no GPU; --device fake needs none")
    device = torch.device("cpu" if arguments.device == "cpu" else "cuda:0")
    fake = arguments.device == "fake"
    if fake:
        pretend_cuda()
    # A GPU has its own counters, and is best measured with nothing in the way.
    tracker = Tracker(device.type, pretend=fake, follows=arguments.device != "cuda" or arguments.trace)
    measurement = Measurement(tracker, arguments.device, arguments.trace)
    before = device_memory() if arguments.device == "cuda" else host_memory() if arguments.device == "cpu" else None
    with contextlib.ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if tracker.follows:
            tracker.calibrate()
            stack.enter_context(tracker)
        architecture, parameters, trainable = train(arguments, measurement, device)
    report = {
        "arguments": vars(arguments), "architecture": architecture,
        "parameters": parameters, "trainable_parameters": trainable,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "forced_attention_kernels": dict(attention_kernels),
        "before": before, "phases": measurement.phases,
    }
    if arguments.trace:
        with open(arguments.trace, "w") as file:
            json.dump(measurement.held, file, indent=1)
    if arguments.json:
        json.dump(report, sys.stdout, indent=1)
        print()
        return
    print(f"{architecture}: {parameters:,} parameters, {trainable:,} of them trained")
    for seen in measurement.phases:
        sums = {"end": seen["end"], "peak": seen["peak"]} if tracker.follows else {}
        print_row(seen["step"], seen["phase"], sums | seen.get("cuda", {}) | seen.get("host", {}))
        if tracker.follows:
            print_row("", "  at the peak", seen["peak_components"])


def print_row(step, phase, figures):
    print(f"{step:>4} {phase:13}", *(f"{name} {figure:,}" for name, figure in figures.items()), sep="  ")


if __name__ == "__main__":
    main()
    # With torch 2.15 an exit handler of the process sometimes calls a null pointer after a training on the fake device.
    sys.stdout.flush()
    os._exit(0)
