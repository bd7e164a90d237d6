"""Finetunes an adapter by TRL: a source whose settings `plimsoll plan examples/python/sft.py` reads."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

NAME = "Qwen/Qwen3-8B"
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16, quantization_config=bits)
adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
settings = SFTConfig(output_dir=f"out/{NAME}", per_device_train_batch_size=2, gradient_accumulation_steps=8,
                     max_length=2048, learning_rate=2e-4)
trainer = SFTTrainer(model=model, args=settings, peft_config=adapter,
                     train_dataset=load_dataset("trl-lib/Capybara", split="train"))
trainer.train()
