"""Trains models of transformers with random weights, and prints what PyTorch holds in each phase of each training.

    trainings.py FILE

FILE has a list of trainings, each an object with the keys of DEFAULTS. They run one after another on the first GPU,
which may be one that is not there, or on the CPU. The loop is that of a plain program which does what the Trainer does:
the model's own loss, no cache of keys and values, autocast with outputs in fp32, clipping, zero_grad.

The output is one JSON document. A phase has the bytes that were asked of PyTorch's allocator, at the peak and at the
end: "load" makes the model; "forward" ends when the outputs besides the loss are dropped; "step" is clipping,
optimizer.step and zero_grad. On the CPU it has the resident bytes of this process instead.
"""

import contextlib
import gc
import json
import sys

import peft
import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32

DEFAULTS = {
    "config": None,  # the content of a config.json
    "device": "cuda",
    "adapter": None,  # the content of an adapter_config.json
    "batch": 1,
    "length": 512,  # tokens of a sequence
    "images": 0,  # in every sequence
    "image_size": [112, 112],  # height and width in pixels
    "frozen": [],  # words in the names of parameters that are not trained
    "precision": "bf16",  # or fp32, amp-bf16, amp-fp16
    "optimizer": "adamw",  # or sgd, muon
    "implementation": None,  # of the optimizer: foreach, fused or for-loop
    "recompute": False,  # gradient checkpointing
    "attention": "sdpa",  # or eager; sdpa is eager where transformers has no other
    "clip": None,  # the largest norm of the gradients
    "steps": 2,
}


class Phases:
    """The phases of a training, and what they hold."""

    def __init__(self, device):
        self.device, self.seen = device, []

    @contextlib.contextmanager
    def phase(self, step, name):
        if self.device == "cpu":
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # begins a new peak of the resident bytes
        else:
            torch.cuda.reset_peak_memory_stats()
        yield
        self.seen.append({"step": step, "phase": name, **(on_host() if self.device == "cpu" else on_gpu())})


def on_gpu():
    asked = torch.cuda.memory_stats()
    return {"peak": asked.get("requested_bytes.all.peak", 0), "end": asked.get("requested_bytes.all.current", 0)}


def on_host():
    with open("/proc/self/status") as status:
        sizes = dict(line.split(":", 1) for line in status)
    return {what: int(sizes[key].split()[0]) * 1024 for what, key in (("peak", "VmHWM"), ("end", "VmRSS"))}


def make_model(job):
    fields = {key: value for key, value in job["config"].items() if key not in ("dtype", "torch_dtype")}
    if fields.get("model_type") in ("t5", "mt5"):
        fields.setdefault("decoder_start_token_id", 0)
    architecture = getattr(transformers, fields["architectures"][0])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False  # as the Trainer sets it, and not inside of text_config
    dtype = torch.bfloat16 if job["precision"] == "bf16" else torch.float32
    attention = job["attention"] if architecture._supports_sdpa else "eager"
    with torch.device(job["device"]):
        model = architecture._from_config(config, dtype=dtype, attn_implementation=attention).train()
    # These take what they see or hear in the type of their weights only, which autocast converts to.
    if config.model_type == "llama4":
        model.vision_model.patch_embedding.linear.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
    if config.model_type == "whisper":
        model.model.encoder.conv1.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
    if job["recompute"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if job["adapter"]:
        fields = dict(job["adapter"])
        adapter = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[fields.pop("peft_type")]
        model = peft.get_peft_model(model, adapter(**fields)).to(job["device"])
    for name, parameter in model.named_parameters():
        if any(word in name for word in job["frozen"]):
            parameter.requires_grad_(False)
    return model, config, architecture.__name__


class MuonAndAdamW:
    """torch.optim.Muon for the matrices of hidden layers, torch.optim.AdamW for all other parameters."""

    def __init__(self, model, **settings):
        apart = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        apart.add(id(model.get_output_embeddings().weight))
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in apart]
        others = [p for p in trained if p.ndim != 2 or id(p) in apart]
        self.parts = torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(others, **settings)

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


def make_optimizer(job, model):
    settings = {"lr": 1e-4}
    if job["implementation"]:
        settings |= {"foreach": job["implementation"] == "foreach", "fused": job["implementation"] == "fused"}
    if job["optimizer"] == "muon":
        return MuonAndAdamW(model, **settings)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[job["optimizer"]]
    return kind([p for p in model.parameters() if p.requires_grad], **settings)


def make_inputs(job, config, architecture):
    rows, shape = job["batch"], (job["batch"], job["length"])
    if config.model_type in ("clip", "siglip"):
        side = config.vision_config.image_size
        tokens = torch.randint(0, config.text_config.vocab_size, shape)
        return {"input_ids": tokens, "return_loss": True, "pixel_values": torch.rand(rows, 3, side, side)}
    if config.model_type in ("vit", "deit", "dinov2"):
        side = job["image_size"][0] if config.model_type == "dinov2" else config.image_size
        pixels = torch.rand(rows, config.num_channels, side, side)
        return {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.long)}
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        sound = torch.rand(rows, config.num_mel_bins, frames)
        return {"input_features": sound, "labels": torch.randint(0, config.vocab_size, shape)}
    vocabulary = config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, shape)
    one_a_row = torch.zeros(rows, dtype=torch.long)
    if "SequenceClassification" in architecture:
        return {"input_ids": tokens, "labels": one_a_row}
    if "QuestionAnswering" in architecture:
        return {"input_ids": tokens, "start_positions": one_a_row, "end_positions": one_a_row}
    inputs = {"input_ids": tokens, "labels": torch.randint(0, vocabulary, shape)}
    if "PreTraining" in architecture and config.model_type == "bert":
        inputs["next_sentence_label"] = one_a_row
    return make_images(job, config, inputs) if job["images"] else inputs


def make_images(job, config, inputs):
    """Adds images to the inputs, as the processor of the model would: their pixels, their grids, and their tokens."""
    (height, width), vision = job["image_size"], config.vision_config
    count = job["images"] * job["batch"]
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    patches = (height // patch) * (width // patch)
    names = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    image_token = next(token for token in names if token is not None)
    if hasattr(vision, "temporal_patch_size"):  # Qwen-VL: rows of patches
        channels = getattr(vision, "in_channels", 3) * vision.temporal_patch_size
        inputs["pixel_values"] = torch.rand(count * patches, channels * patch * patch)
        inputs["image_grid_thw"] = torch.tensor([[1, height // patch, width // patch]] * count)
        tokens = patches // vision.spatial_merge_size**2
    elif hasattr(config, "image_grid_pinpoints"):
        tokens = make_tiles(job, config, inputs)
    else:
        inputs["pixel_values"] = torch.rand(count, 3, height, width)
        shuffled = 1 / getattr(config, "downsample_ratio", getattr(vision, "pixel_shuffle_ratio", 1))
        merged = getattr(config, "spatial_merge_size", None) or getattr(config, "scale_factor", None) or round(shuffled)
        tokens = getattr(config, "mm_tokens_per_image", None) or patches // merged**2
        if getattr(config, "vision_feature_select_strategy", "") == "full" and vision.model_type == "clip_vision_model":
            tokens += 1
        if vision.model_type == "pixtral":
            inputs["image_sizes"] = torch.tensor([[height, width]] * count)
        if config.model_type in ("idefics3", "smolvlm"):
            inputs["pixel_values"] = inputs["pixel_values"].view(job["batch"], job["images"], 3, height, width)
    ids = inputs["input_ids"] = torch.randint(0, image_token, (job["batch"], job["length"]))
    for image in range(job["images"]):  # with a token between two images
        ids[:, image * (tokens + 1) : image * (tokens + 1) + tokens] = image_token
    types = "mm_token_type_ids" if hasattr(vision, "temporal_patch_size") else "token_type_ids"
    if types == "mm_token_type_ids" or config.model_type in ("gemma3", "paligemma"):
        inputs[types] = (ids == image_token).int()
    return inputs


def make_tiles(job, config, inputs):
    """Adds the tiles of images, as the processors of LLaVA-NeXT and LLaVA-OneVision do, and returns their tokens."""
    from transformers.models.llava_next import modeling_llava_next as next_
    from transformers.models.llava_onevision import modeling_llava_onevision as one_vision

    size, vision, count = job["image_size"], config.vision_config, job["images"] * job["batch"]
    module = next_ if config.model_type == "llava_next" else one_vision
    tiles, side = 1, vision.image_size // vision.patch_size
    if module is next_ or job["images"] == 1:
        tiles = module.image_size_to_num_patches(size, config.image_grid_pinpoints, vision.image_size)
    inputs["pixel_values"] = torch.rand(count, tiles, 3, vision.image_size, vision.image_size)
    inputs["image_sizes"] = torch.tensor([size] * count)
    settings = {"vision_feature_select_strategy": "default"} if module is next_ else {}
    if module is one_vision:
        inputs["batch_num_images"] = torch.tensor([job["images"]] * job["batch"])
    model = module.LlavaNextModel if module is next_ else module.LlavaOnevisionModel
    alone = type("alone", (), {"config": config})
    features, _ = model.pack_image_features(
        alone, [torch.zeros(tiles, side * side, 1)], torch.tensor([size]), image_newline=torch.zeros(1), **settings
    )
    return features[0].shape[0]


def to(device, inputs):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def train(job, phases):
    device = torch.device(job["device"])
    with phases.phase(0, "load"):
        model, config, architecture = make_model(job)
        gc.collect()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, forward, scaler = make_optimizer(job, model), model, None
    if job["precision"].startswith("amp-"):
        dtype = torch.bfloat16 if job["precision"] == "amp-bf16" else torch.float16
        forward = convert_outputs_to_fp32(torch.autocast(device.type, dtype=dtype)(model.__call__))
    if job["precision"] == "amp-fp16":
        scaler = torch.amp.GradScaler(device.type)
    for step in range(1, job["steps"] + 1):
        inputs = to(device, make_inputs(job, config, architecture))
        with phases.phase(step, "forward"):
            outputs = forward(**inputs)
            loss = outputs["loss"]
            del outputs
        with phases.phase(step, "backward"):
            (scaler.scale(loss) if scaler else loss).backward()
            loss = loss.detach()
        with phases.phase(step, "step"):
            if job["clip"]:
                if scaler:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(trained, job["clip"])
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()


def forget():
    """Drops what a training has left on the GPU."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    if left := torch.cuda.memory_stats()["requested_bytes.all.current"]:
        sys.exit(f"a training has left {left} bytes on the GPU")


def main():
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    done = []
    for number, job in enumerate(jobs):
        print(number, "of", len(jobs), file=sys.stderr, flush=True)
        job = DEFAULTS | job
        phases = Phases(job["device"])
        train(job, phases)
        done.append(phases.seen)
        if job["device"] == "cuda":
            forget()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print("\n" + json.dumps({"versions": versions, "trainings": done}))


if __name__ == "__main__":
    main()
