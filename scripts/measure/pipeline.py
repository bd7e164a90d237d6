"""Memory of a pipeline stage of torch.distributed.pipelining, measured without a GPU and without other ranks.

The stage consists of the modules of a model of transformers, on tensors without memory (train.py). Its process group
is PyTorch's fake one: sends and receives end at once, and whole pipelines need one process.

    pipeline.py --config ../../internal/input/model/catalog/llama-3-8b.json --stages 4 --stage 1 --micros 8

It prints bytes: of the load, the peak of the passes of the first and of the second step, and of the optimizer steps.
"""
import argparse
import contextlib
import functools
import gc
import json
import os
import sys

import train
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.loss.loss_utils import ForCausalLMLoss


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


def indices(arguments):
    """The indices of the rank's segments: in a V, they come back from the last rank to the first."""
    if arguments.schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [arguments.stage, 2 * arguments.stages - 1 - arguments.stage]
    return range(arguments.stage, arguments.stages * arguments.chunks, arguments.stages)


def cut(arguments, config):
    """Returns the stage's segments, by index."""
    count = arguments.stages * arguments.chunks
    each, more = divmod(config.num_hidden_layers + 2, count)
    layers = [each + (i < more) for i in range(count)]
    layers[0] -= 1
    layers[-1] -= 1
    segments = {}
    model, _ = train.build_model(arguments)
    for index in indices(arguments):
        start = sum(layers[:index])
        segments[index] = Segment(model, range(start, start + layers[index]), index == 0, index == count - 1)
    return segments


def messages(arguments, config, index, count):
    """What a stage receives and sends: a fake process group cannot ask the other stages."""
    tokens = arguments.batch, arguments.seq_len
    wide = getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[arguments.precision])
    hidden = torch.empty(*tokens, config.hidden_size, dtype=wide, device="meta", requires_grad=True)
    ids = torch.empty(*tokens, dtype=torch.long, device="meta")
    logits = torch.empty(*tokens, config.vocab_size, dtype=wide, device="meta", requires_grad=True)
    return {"input_args": (hidden if index else ids,), "output_args": (hidden if index < count - 1 else logits,)}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--untied", action="store_true", help="give the head a weight of its own")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=1, help="of each stage")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--micros", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    arguments = parser.parse_args()
    arguments.architecture = arguments.lora = arguments.dropout = None
    arguments.attention, arguments.device, arguments.use_reentrant = "sdpa", "fake", False
    return arguments


def main():
    arguments = parse()
    device = torch.device("cuda:0")
    dist.init_process_group("fake", rank=arguments.stage, world_size=arguments.stages, store=FakeStore())
    train.pretend_cuda()
    # A stage keeps outputs that are subclasses of Tensor, as fake tensors are.
    PipelineStage._output_slot_is_releasable = lambda stage, _: (not stage.is_last, "the last stage's")
    torch.random.fork_rng = lambda *_, **__: contextlib.nullcontext()
    tracker = train.Tracker("cuda", pretend=True)
    measurement = train.Measurement(tracker, "fake", None)
    count = arguments.stages * arguments.chunks
    config, architecture = train.build_config(arguments)
    train.build_config = lambda _: (config, architecture)
    config.tie_word_embeddings = config.tie_word_embeddings and not arguments.untied
    with FakeTensorMode(allow_non_fake_inputs=True):
        tracker.calibrate()
        with tracker:
            with measurement.phase(0, "load"), torch.device(device):
                segments = cut(arguments, config)
                gc.collect()
            stages = [
                PipelineStage(segment, index, count, device, **messages(arguments, config, index, count))
                for index, segment in segments.items()
            ]
            loss = functools.partial(ForCausalLMLoss, vocab_size=config.vocab_size)
            kind = get_schedule_class(arguments.schedule)
            one = arguments.chunks == 1
            schedule = kind(stages[0] if one else stages, arguments.micros, loss_fn=loss)
            parameters = [p for segment in segments.values() for p in segment.parameters()]
            measurement.owners["parameters"] = lambda: parameters
            measurement.owners["gradients"] = lambda: [p.grad for p in parameters if p.grad is not None]
            optimizer = torch.optim.AdamW(parameters, foreach=True)
            ids = torch.zeros(arguments.micros * arguments.batch, arguments.seq_len, dtype=torch.long, device=device)
            given = [ids] if 0 in segments else []
            target = {"target": ids} if count - 1 in segments else {}
            for step in (1, 2):
                with measurement.phase(step, "passes"):
                    schedule.step(*given, **target, return_outputs=False)
                with measurement.phase(step, "step"):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    json.dump({"versions": versions, "phases": measurement.phases}, sys.stdout, indent=1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
