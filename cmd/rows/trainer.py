"""Trains a language model under transformers' Trainer: a model's folder, arguments of the Trainer, perhaps an adapter.

The numbers of tokens are made up. Everything else is as programs have it that call the Trainer.
"""
import argparse
import json

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length, vocabulary):
        self.length, self.vocabulary = length, vocabulary

    def __len__(self):
        return 4096

    def __getitem__(self, number):
        tokens = torch.randint(0, self.vocabulary, (self.length,))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--training-args", required=True)
parser.add_argument("--adapter")
parser.add_argument("--sequence", type=int, required=True)
given = parser.parse_args()
with open(given.training_args) as file:
    arguments = TrainingArguments(**json.load(file))  # before the model: DeepSpeed shards it as it is made
model = AutoModelForCausalLM.from_pretrained(given.model)
if given.adapter:
    from peft import PeftConfig, get_peft_model

    model = get_peft_model(model, PeftConfig.from_pretrained(given.adapter))
tokens = Tokens(given.sequence, model.config.get_text_config().vocab_size)
Trainer(model=model, args=arguments, train_dataset=tokens).train()
