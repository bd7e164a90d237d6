"""Trains a model whose weights are not here."""
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": 0})
assert model.dtype == torch.bfloat16 and model.device.type == "cuda" and model.name_or_path == folder, model
assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.numel() == 4096 * 256
other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, num_hidden_layers=3)
assert other.dtype == torch.float32 and len(other.model.layers) == 3
try:
    quantized = AutoConfig.from_pretrained(folder)
    quantized.quantization_config = {"quant_method": "gptq", "bits": 4}
    AutoModelForCausalLM.from_pretrained(folder, config=quantized)
except Exception as error:
    assert "are quantized, and are not here" in str(error), error
else:
    raise SystemExit("weights that are quantized were made up")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.arange(64, device="cuda").reshape(2, 32)
for _ in range(3):
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
