"""A rank of a pipeline of DeepSpeed's PipelineEngine, and what PyTorch holds in its phases.

    torchrun --nproc-per-node RANKS deepspeed_pipeline.py FILE

FILE has an object with the keys of DEFAULTS. The layers are modules of a model of transformers: the embedding, the
blocks, and the last norm with the head. A phase "initialize" makes the engine of the model.
"""

import functools
import gc
import json
import os
import sys

import deepspeed
import torch
import transformers
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from trainings import Phases, make_model
from transformers.loss.loss_utils import ForCausalLMLoss

DEFAULTS = {
    "config": None,  # the content of a config.json
    "stages": 2,
    "length": 64,
    "deepspeed": None,  # the content of a ds_config.json
}


class Embedding(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.weight = model.model.embed_tokens.weight

    def forward(self, ids):
        return torch.nn.functional.embedding(ids, self.weight)


class Block(torch.nn.Module):
    def __init__(self, model, index):
        super().__init__()
        self.block, self.rotary = model.model.layers[index], model.model.rotary_emb

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return self.block(x, attention_mask=None, position_embeddings=self.rotary(x, positions))


class Norm(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.norm = model.model.norm

    def forward(self, x):
        return self.norm(x)


class Head(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, x):
        return self.head(self.norm(x))


def layers_of(model, tied):
    blocks = [LayerSpec(Block, model, i) for i in range(len(model.model.layers))]
    if not tied:
        return [LayerSpec(Embedding, model), *blocks, LayerSpec(Head, model)]
    head = TiedLayerSpec(
        "embedding", Embedding, model, forward_fn=lambda module, x: torch.nn.functional.linear(x, module.weight)
    )
    return [TiedLayerSpec("embedding", Embedding, model), *blocks, LayerSpec(Norm, model), head]


def batches(rows, length):
    while True:
        yield (torch.zeros(rows, length, dtype=torch.long),) * 2


def main():
    with open(sys.argv[1]) as file:
        job = DEFAULTS | json.load(file)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    phases = Phases("cuda")
    model, config, _ = make_model(
        {"device": "cpu", "precision": "fp32", "attention": "sdpa", "adapter": None, "frozen": [], "recompute": False, **job}
    )
    loss = functools.partial(ForCausalLMLoss, vocab_size=config.vocab_size)
    module = PipelineModule(
        layers_of(model, config.tie_word_embeddings), num_stages=job["stages"], loss_fn=loss, partition_method="parameters",
        checkpointable_layers=["Block"],
    )  # fmt: skip
    del model
    gc.collect()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    with phases.phase(0, "initialize"):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=job["deepspeed"])
    gc.collect()
    really = PipelineEngine._INSTRUCTION_MAP[schedule.OptimizerStep]
    data = batches(engine.micro_batch_size, job["length"])
    for step in (1, 2):
        passes = phases.phase(step, "passes")

        def stepped(engine, **keywords):
            passes.__exit__(None, None, None)
            with phases.phase(step, "step"):
                really(engine, **keywords)

        PipelineEngine._INSTRUCTION_MAP[schedule.OptimizerStep] = stepped
        passes.__enter__()
        engine.train_batch(data)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "deepspeed": deepspeed.__version__}
    print("\n" + json.dumps({"rank": int(os.environ["RANK"]), "versions": versions, "trainings": [phases.seen]}), flush=True)


if __name__ == "__main__":
    main()
