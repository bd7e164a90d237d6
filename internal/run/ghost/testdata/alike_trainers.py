"""Programs of TRL, diffusers, torchtune and torchtitan, on a GPU or on the host: what is held is alike, tensor by tensor.

It is alike.py for packages that have an environment of their own (make test-ghost-all).
"""
import argparse
import collections
import importlib.util
import os
import sys

import torch
from alike import TOKENS, VOCABULARY, device, llama
from torch.nn import functional as F

FOLDER = os.environ.get("TMPDIR", "/tmp")
TRAINED = dict(output_dir=FOLDER, report_to=[], save_strategy="no", bf16=False, use_cpu=device == "cpu", max_steps=9,
    dataloader_pin_memory=False, optim="adamw_torch", gradient_checkpointing=False)  # fmt: skip


def tokenizer():
    """One token for each word: w3, w4 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def text(words):
    return " ".join(f"w{i}" for i in range(3, 3 + words))


def without_triton():
    """Keeps TRL from kernels of Triton, which a host does not have."""
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda device: False


def sft():
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"input_ids": [list(range(3, 3 + TOKENS))] * 64})
    arguments = SFTConfig(**TRAINED, per_device_train_batch_size=4, max_length=TOKENS, dataset_kwargs={"skip_prepare_dataset": True})
    SFTTrainer(llama(), arguments, train_dataset=data, processing_class=tokenizer()).train()


def dpo():
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    without_triton()
    half = text(TOKENS // 2)
    data = Dataset.from_dict({"prompt": [half] * 64, "chosen": [" " + half] * 64, "rejected": [" " + half] * 64})
    arguments = DPOConfig(**TRAINED, per_device_train_batch_size=2)
    DPOTrainer(llama(), llama(), arguments, train_dataset=data, processing_class=tokenizer()).train()


def grpo():
    """It generates 32 tokens for each prompt."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    without_triton()
    arguments = GRPOConfig(**TRAINED, per_device_train_batch_size=4, num_generations=4, max_completion_length=32,
        generation_kwargs={"min_new_tokens": 32})  # fmt: skip
    GRPOTrainer(llama(), reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))], args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [text(32)] * 64}), processing_class=tokenizer()).train()  # fmt: skip


def denoise(model, **inputs):
    """Trains a model of diffusers on two images, as the examples of diffusers do."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clean = torch.ones(2, 4, 32, 32, device=device)
    while True:
        noise = torch.randn_like(clean)
        steps = torch.randint(0, 1000, (2,), device=device).long()
        predicted = model(scheduler.add_noise(clean, noise, steps), timestep=steps, **inputs, return_dict=False)[0]
        F.mse_loss(predicted.float()[:, :4], noise.float(), reduction="mean").backward()
        optimizer.step()
        optimizer.zero_grad()


def unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=32, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))  # fmt: skip
    denoise(model.to(device), encoder_hidden_states=torch.ones(2, 77, 64, device=device))


def transformer():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=4, attention_head_dim=64, in_channels=4, out_channels=8, num_layers=2,
        sample_size=32, num_embeds_ada_norm=1000)  # fmt: skip
    denoise(model.to(device), class_labels=torch.ones(2, dtype=torch.long, device=device))


class Tokens(torch.utils.data.Dataset):
    """The data set of a recipe."""

    pad_id = 0  # it is the tokenizer, too

    def __init__(self, *arguments, **options):
        pass

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"tokens": list(range(3, 3 + TOKENS)), "labels": list(range(3, 3 + TOKENS))}


def recipe(file="full_finetune_single_device", kind="FullFinetuneRecipeSingleDevice", builder="llama3_2", **adapter):
    """A recipe of torchtune, as its file has it. Only the weights are not loaded, but made."""
    import torchtune
    from omegaconf import OmegaConf
    from torchtune.models import llama3_2

    sys.modules["alike_trainers"] = sys.modules["__main__"]
    path = os.path.join(os.path.dirname(os.path.dirname(torchtune.__file__)), "recipes", file + ".py")
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = dict(vocab_size=VOCABULARY, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=256, max_seq_len=256, intermediate_dim=512)
    weights = [llama3_2.llama3_2(**sizes).bfloat16().state_dict()]

    class Recipe(getattr(module, kind)):
        def load_checkpoint(self, *arguments, **options):
            return {torchtune.training.MODEL_KEY: weights.pop()}

    settings = OmegaConf.create(dict(output_dir=FOLDER, device=device, dtype="bf16", seed=1, shuffle=True, batch_size=4, epochs=1,
        max_steps_per_epoch=9, gradient_accumulation_steps=1, optimizer_in_bwd=False, clip_grad_norm=None, compile=False,
        enable_activation_checkpointing=False, enable_activation_offloading=False, resume_from_checkpoint=False,
        model={"_component_": f"torchtune.models.llama3_2.{builder}", **sizes, **adapter}, checkpointer={"model_type": "LLAMA3_2"},
        tokenizer={"_component_": "alike_trainers.Tokens"}, dataset={"_component_": "alike_trainers.Tokens", "packed": False},
        optimizer={"_component_": "torch.optim.AdamW", "lr": 2e-5},
        lr_scheduler={"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 1},
        loss={"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}, log_every_n_steps=1, log_peak_memory_stats=False,
        metric_logger={"_component_": "torchtune.training.metric_logging.StdoutLogger"}))  # fmt: skip
    made = Recipe(cfg=settings)
    made.setup(cfg=settings)
    made.train()


def recipe_lora():
    recipe("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice", "lora_llama3_2", lora_attn_modules=["q_proj", "v_proj"],
        apply_lora_to_mlp=True, apply_lora_to_output=False, lora_rank=8, lora_alpha=16, lora_dropout=0.0)  # fmt: skip


class Batches:
    """The loader of torchtitan's Trainer."""

    def __iter__(self):
        while True:
            tokens = torch.randint(3, VOCABULARY, (4, TOKENS))
            yield {"input": tokens}, tokens

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def titan(*arguments):
    """torchtitan's Trainer, all in bf16. It asks a device for what a host does not have."""
    if device == "cpu":
        known = dict(get_device_name="host", get_device_properties=argparse.Namespace(total_memory=1 << 30), current_device=0,
            memory_stats=collections.Counter(), set_device=None, reset_peak_memory_stats=None, empty_cache=None)  # fmt: skip
        for name, answer in known.items():
            setattr(torch.cpu, name, lambda *_, answer=answer: answer)
        torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.config.manager import ConfigManager
    from torchtitan.models import llama3
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    # The host has no kernel for it, but several operations.
    F.rms_norm = lambda x, shape, weight, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    known = train_spec.get_train_spec("llama3")
    known.build_dataloader_fn, known.build_tokenizer_fn = lambda **_: Batches(), None
    known.model_args["debugmodel"] = llama3.TransformerModelArgs(dim=256, n_layers=4, n_heads=4, n_kv_heads=4, vocab_size=VOCABULARY)
    train_spec.get_train_spec = lambda name: known
    Trainer(ConfigManager().parse_args(["--model.name=llama3", "--model.flavor=debugmodel", "--training.local_batch_size=4",
        f"--training.seq_len={TOKENS}", "--training.steps=9", f"--job.dump_folder={FOLDER}", "--training.dtype=bfloat16",
        "--activation_checkpoint.mode=none", *arguments])).train()  # fmt: skip


def titan_tensor():
    titan("--parallelism.tensor_parallel_degree=2")


def titan_pipeline():
    titan("--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B")


globals()[sys.argv[1]]()
