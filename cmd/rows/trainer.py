"""Trains a model under transformers' Trainer or in a loop of its own: a model, settings, perhaps an adapter.

The numbers of tokens and images are made up. Everything else is as programs have it that call the Trainer.
"""
import argparse
import json

import torch
import transformers


class Samples(torch.utils.data.Dataset):
    """Samples of what the architecture reads: tokens or images, with labels of tokens or of the whole."""

    def __init__(self, config, length, count=4096):
        self.config, self.length, self.count = config, length, count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        architecture = self.config.architectures[0]
        label = torch.tensor(number % 2)
        if "ImageClassification" in architecture:
            side = self.config.image_size
            return {"pixel_values": torch.zeros(self.config.num_channels, side, side), "labels": label}
        tokens = torch.randint(1, self.config.get_text_config().vocab_size, (self.length,))
        sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return {**sample, "labels": label if "SequenceClassification" in architecture else tokens}


def auto_class(config):
    """The class by which programs load a model of this architecture."""
    for kind in ("SequenceClassification", "ImageClassification", "MaskedLM"):
        if kind in config.architectures[0]:
            return getattr(transformers, "AutoModelFor" + kind)
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def read(path):
    with open(path) as file:
        return json.load(file)


def load(given, checkpointing):
    """The model, quantized and with an adapter where these are given."""
    config = transformers.AutoConfig.from_pretrained(given.model)
    options = {}
    if given.attention:
        options["attn_implementation"] = given.attention
    if given.quantization:
        options["quantization_config"] = transformers.BitsAndBytesConfig(**read(given.quantization))
    model = auto_class(config).from_pretrained(given.model, **options)
    if given.adapter:
        import peft

        if checkpointing:
            model.enable_input_require_grads()
        model = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(given.adapter))
    return model


def train(model, samples, loop):
    """A loop of its own, in plain PyTorch."""
    model = model.cuda().train()
    if loop["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = torch.optim.SGD if loop["optimizer"] == "sgd" else torch.optim.AdamW
    way = {"foreach": False} if loop["implementation"] == "for-loop" else {loop["implementation"]: True}
    optimizer = kind(trained, lr=1e-4, **way)
    loader = torch.utils.data.DataLoader(samples, batch_size=loop["batch"])
    for batch in loader:
        batch = {name: tensor.cuda() for name, tensor in batch.items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=loop["autocast"]):
            outputs = model(**batch)
        outputs.loss.backward()
        if loop["clip"]:
            torch.nn.utils.clip_grad_norm_(trained, loop["clip"])
        optimizer.step()
        optimizer.zero_grad()


parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--training-args")
parser.add_argument("--loop", help="settings of a loop of its own, in place of the Trainer's arguments")
parser.add_argument("--adapter")
parser.add_argument("--quantization")
parser.add_argument("--attention")
parser.add_argument("--sequence", type=int, required=True)
given = parser.parse_args()
if given.loop:
    loop = read(given.loop)
    model = load(given, loop["checkpointing"])
    train(model, Samples(model.config, given.sequence), loop)
else:
    # The arguments come before the model: DeepSpeed shards it as it is made.
    arguments = transformers.TrainingArguments(**read(given.training_args))
    model = load(given, arguments.gradient_checkpointing)
    samples = Samples(model.config, given.sequence)
    evaluated = Samples(model.config, given.sequence, count=16) if arguments.eval_strategy != "no" else None
    transformers.Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=evaluated).train()
