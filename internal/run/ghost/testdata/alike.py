"""Trains a small model in one of several ways, on a GPU or on the host: what is held is alike, tensor by tensor."""
import os
import sys

import torch
from torch.nn import functional as F

TOKENS, VOCABULARY = 96, 1024
device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCABULARY, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip


def loop():
    """A loop of its own, with autocast and a frozen part. It keeps gradients through the forward pass. Attention is torch's
    module, which copies its output."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 256), layer, torch.nn.Linear(256, VOCABULARY)).to(device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while True:
        tokens = torch.randint(VOCABULARY, (4, TOKENS), device=device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens)
        optimizer.zero_grad()
        F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def trainer(model, **options):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": torch.randint(3, VOCABULARY, (TOKENS,)), "labels": torch.randint(3, VOCABULARY, (TOKENS,))}] * 64
    arguments = TrainingArguments(output_dir=os.environ.get("TMPDIR", "/tmp"), per_device_train_batch_size=4, report_to=[],
        save_strategy="no", bf16=False, use_cpu=device == "cpu", dataloader_pin_memory=False, max_steps=9, **options)  # fmt: skip
    Trainer(model, arguments, train_dataset=data).train()


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).bfloat16()


def full():
    trainer(llama(), optim="adamw_torch")


def checkpoints():
    trainer(llama(), optim="adamw_torch", gradient_checkpointing=True, gradient_accumulation_steps=2)


def lora():
    from peft import LoraConfig, get_peft_model

    trainer(get_peft_model(llama(), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")), optim="adamw_torch")


def mixture():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**SIZES, "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    trainer(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, experts_implementation="grouped_mm")).bfloat16(), optim="adamw_torch")


def images():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = dict(depth=2, hidden_size=256, intermediate_size=512, num_heads=4, out_hidden_size=256, fullatt_block_indexes=[1])
    text = {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=3, video_token_id=4, vision_start_token_id=5)
    model = Qwen2_5_VLForConditionalGeneration(config).bfloat16().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(8, VOCABULARY, (2, TOKENS), device=device)
    tokens[:, :17] = torch.tensor([5] + 16 * [3], device=device)
    pixels = torch.ones(2 * 64, 3 * 2 * 14 * 14, dtype=torch.bfloat16, device=device)
    grid = torch.tensor([[1, 8, 8]] * 2, device=device)
    types = (tokens == 3).int()
    while True:
        model(input_ids=tokens, labels=tokens, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=types).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def eager():
    """BERT with attention in single operations, on padded batches of 4."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY)
    model = BertForMaskedLM(BertConfig(**sizes, attn_implementation="eager")).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while True:
        tokens = torch.randint(3, VOCABULARY, (4, TOKENS), device=device)
        mask = (torch.arange(TOKENS, device=device) < torch.tensor([[96], [90], [80], [70]], device=device)).long()
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama()

        def training_step(self, batch, index):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    data = torch.utils.data.DataLoader(torch.randint(3, VOCABULARY, (64, TOKENS)), batch_size=4)
    lightning.Trainer(max_steps=9, logger=False, enable_checkpointing=False, precision="bf16-true", enable_progress_bar=False,
        accelerator="gpu" if device == "cuda" else "cpu", devices=1).fit(Module(), data)  # fmt: skip


def sharded():
    """FSDP2, with two ranks: those of the host speak gloo. Gradients of the first of two batches are kept whole."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = torch.distributed.init_device_mesh(device, (2,))
    model = llama().to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while True:
        for is_last in (False, True):
            tokens = torch.randint(3, VOCABULARY, (4, TOKENS), device=device)
            model.set_requires_gradient_sync(is_last)
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def zero(stage=2):
    """DeepSpeed's ZeRO, with two ranks."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 500_000}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    while True:
        tokens = torch.randint(3, VOCABULARY, (4, TOKENS), device=device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


def zero3():
    zero(3)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
