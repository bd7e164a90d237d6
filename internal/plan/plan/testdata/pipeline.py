"""A rank of a pipeline of torch.distributed.pipelining, and what PyTorch holds in its load, passes and optimizer steps.

    torchrun --nproc-per-node STAGES pipeline.py FILE

FILE has an object with the keys of DEFAULTS. The stages are of the modules of a model of transformers.
"""

import functools
import gc
import json
import os
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from trainings import Phases, make_model
from transformers.loss.loss_utils import ForCausalLMLoss

DEFAULTS = {
    "config": None,  # the content of a config.json
    "chunks": 1,  # of each stage
    "schedule": "1F1B",
    "micros": 4,
    "length": 512,
    "recompute": False,
}


class Segment(torch.nn.Module):
    """The layers of a stage, with the embedding or the head."""

    def __init__(self, model, layers, first, last):
        super().__init__()
        inner = model.model
        self.embed_tokens = inner.embed_tokens if first else None
        self.layers = torch.nn.ModuleList(inner.layers[i] for i in layers)
        self.norm, self.lm_head = (inner.norm, model.lm_head) if last else (None, None)
        self.rotary_emb = inner.rotary_emb

    def forward(self, x):
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        embeddings = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=embeddings)
        if self.norm is not None:
            x = self.lm_head(self.norm(x))
        return x


def indices(job, rank, stages):
    """The indices of the rank's segments: in a V, they come back from the last rank to the first."""
    if job["schedule"] in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 2 * stages - 1 - rank]
    return range(rank, stages * job["chunks"], stages)


def cut(job, rank, stages):
    """Returns the rank's segments, by index, and the config."""
    model, config, _ = make_model({"device": "cuda", "precision": "bf16", "attention": "sdpa", "adapter": None, "frozen": [], **job})
    count = stages * job["chunks"]
    each, more = divmod(config.num_hidden_layers + 2, count)
    layers = [each + (i < more) for i in range(count)]
    layers[0] -= 1
    layers[-1] -= 1
    segments = {}
    for index in indices(job, rank, stages):
        start = sum(layers[:index])
        segments[index] = Segment(model, range(start, start + layers[index]), index == 0, index == count - 1)
    return segments, config


def messages(job, config, index, count):
    """What a stage receives and sends, so that it need not ask the others."""
    tokens = 1, job["length"]
    hidden = torch.empty(*tokens, config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ids = torch.empty(*tokens, dtype=torch.long, device="meta")
    logits = torch.empty(*tokens, config.vocab_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return {"input_args": (hidden if index else ids,), "output_args": (hidden if index < count - 1 else logits,)}


def main():
    with open(sys.argv[1]) as file:
        job = DEFAULTS | json.load(file)
    rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    phases, count = Phases("cuda"), stages * job["chunks"]
    with phases.phase(0, "load"):
        segments, config = cut(job, rank, stages)
        gc.collect()
    parts = [
        PipelineStage(segment, index, count, device, **messages(job, config, index, count))
        for index, segment in segments.items()
    ]
    loss = functools.partial(ForCausalLMLoss, vocab_size=config.vocab_size)
    kind = get_schedule_class(job["schedule"])
    schedule = kind(parts[0] if job["chunks"] == 1 else parts, job["micros"], loss_fn=loss)
    optimizer = torch.optim.AdamW([p for segment in segments.values() for p in segment.parameters()], foreach=True)
    ids = torch.zeros(job["micros"], job["length"], dtype=torch.long, device=device)
    given = [ids] if 0 in segments else []
    target = {"target": ids} if count - 1 in segments else {}
    for step in (1, 2):
        with phases.phase(step, "passes"):
            schedule.step(*given, **target, return_outputs=False)
        with phases.phase(step, "step"):
            optimizer.step()
            optimizer.zero_grad()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print("\n" + json.dumps({"versions": versions, "trainings": [phases.seen]}))


if __name__ == "__main__":
    main()
