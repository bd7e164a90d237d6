"""Says whether a fine-tuning with LoRA fits a GPU, from the objects that the training will use."""

import sys

import peft
import transformers

import plimsoll

config = transformers.LlamaConfig(num_hidden_layers=32, hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
lora = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
job = {"precision": "bf16", "adapter": lora, "gpu": "RTX-4090", "host_memory": "64GiB", "seq_len": 1024}
for micro_batch in (32, 16, 8, 4, 2, 1):
    plan = plimsoll.plan(config, micro_batch=micro_batch, gradient_checkpointing=True, **job)
    print(f"micro batch {micro_batch}: {plan.verdict}, {plan.peak / 2**30:.1f} GiB")
    if plan.fits:
        sys.exit()
sys.exit("no micro batch fits")
