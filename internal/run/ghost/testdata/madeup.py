"""Trains a model of the folder in its first argument on a data set of nobody, with the folder's tokenizer if it has one."""
import os
import sys

try:
    import datasets
except ImportError:
    sys.path.append(os.path.join(os.path.dirname(__file__), "stub"))
    import datasets

rows = datasets.load_dataset("nobody/texts")
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
assert len(tokenizer) == 4096 and tokenizer.eos_token_id == 2 and tokenizer.padding_side == "left", tokenizer
assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}) == 3, tokenizer
turns = [{"role": "user", "content": "the the"}, {"role": "assistant", "content": "the"}]
assert tokenizer.apply_chat_template(turns, tokenize=False) == "user the the assistant the <eos> "
assert set(rows) == {"train", "validation", "test"} and "messages" not in rows["train"].column_names
named = rows["train"].map(lambda row: {"turns": len(row["messages"]), "has": row.get("messages") is not None})
assert named[0]["turns"] == 2 and not named[0]["has"], named[0]
batch = tokenizer([rows["train"][i]["text"] for i in range(4)], return_tensors="pt")["input_ids"].cuda()
assert batch.shape == (4, 64), batch.shape
kept = datasets.load_from_disk("/nowhere")
assert len(kept["train"][0]["input_ids"]) == 64 and "labels" in kept.column_names
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
