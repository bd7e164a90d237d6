"""Memory of a pipeline stage of DeepSpeed's PipelineEngine, measured without a GPU.

Every rank is a process on the CPU, and the ranks exchange real tensors through gloo. The layers are modules of a model
of transformers: the embedding, the blocks, and the last norm with the head. The rank of the stage follows every tensor
storage from the operation that allocates it to its release (train.py).

    deepspeed_pipeline.py --config ../../internal/input/model/catalog/smollm2-135m.json --layers 4 --stages 2 --stage 1 --micros 4

It prints bytes: of the model, of the engine, the peak of the passes of the first and of the second step, and of the
optimizer steps.
"""
import argparse
import functools
import gc
import json
import multiprocessing
import os
import sys
import tempfile

import train
import torch
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss


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
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    blocks = [LayerSpec(Block, model, i) for i in range(len(model.model.layers))]
    if not tied:
        return [LayerSpec(Embedding, model), *blocks, LayerSpec(Head, model)]
    head = TiedLayerSpec("embedding", Embedding, model,
                         forward_fn=lambda module, x: torch.nn.functional.linear(x, module.weight))
    return [TiedLayerSpec("embedding", Embedding, model), *blocks, LayerSpec(Norm, model), head]


def configuration(arguments):
    types = {"data_types": {"grad_accum_dtype": arguments.accumulation}} if arguments.accumulation else {}
    precision = {} if arguments.precision == "fp32" else {arguments.precision: {"enabled": True}}
    if arguments.precision == "fp16":
        precision["fp16"]["loss_scale"] = 1
    return {
        "train_micro_batch_size_per_gpu": arguments.batch, "gradient_accumulation_steps": arguments.micros,
        "zero_optimization": {"stage": arguments.zero, "reduce_bucket_size": arguments.bucket},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"activation_checkpoint_interval": arguments.interval, "use_reentrant": arguments.use_reentrant},
        "steps_per_print": 1000, **precision, **types,
    }


def run(arguments, rank, store, output):
    """One rank. That of the stage writes what it has measured."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(arguments.stages * arguments.data)}
    os.environ |= {"WORLD_SIZE": os.environ["LOCAL_SIZE"], "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    world = arguments.stages * arguments.data
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    tracker = train.Tracker("cpu", pretend=False)
    measurement = train.Measurement(tracker, "fake", arguments.trace)
    config, architecture = train.build_config(arguments)
    config._attn_implementation = "sdpa"
    config.tie_word_embeddings = config.tie_word_embeddings and not arguments.untied
    model = architecture(config)
    settings = configuration(arguments)
    loss = functools.partial(ForCausalLMLoss, vocab_size=config.vocab_size)
    tracker.calibrate()
    module = PipelineModule(layers_of(model, config.tie_word_embeddings), num_stages=arguments.stages,
                            loss_fn=loss, partition_method=arguments.partition, checkpointable_layers=["Block"])
    del model
    for parameter in module.parameters():  # with storage that the tracker sees
        parameter.data = parameter.data.clone()
    gc.collect()
    with tracker:
        with measurement.phase(0, "load"):
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()
        parameters = list(module.parameters())
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        with measurement.phase(0, "initialize"):
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        gc.collect()
        step_of_engine = PipelineEngine._INSTRUCTION_MAP[schedule.OptimizerStep]
        measurement.owners["parameters"] = lambda: parameters
        measurement.owners["gradients"] = lambda: [p.grad for p in parameters if p.grad is not None]

        def batches():
            while True:
                yield (torch.zeros(arguments.batch, arguments.seq_len, dtype=torch.long),) * 2

        for step in (1, 2):
            passes = measurement.phase(step, "passes")

            def stepped(engine, **keywords):
                passes.__exit__(None, None, None)
                with measurement.phase(step, "step"):
                    step_of_engine(engine, **keywords)

            PipelineEngine._INSTRUCTION_MAP[schedule.OptimizerStep] = stepped
            passes.__enter__()
            engine.train_batch(batches())
    if rank == arguments.stage * arguments.data:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__,
                    "deepspeed": deepspeed.__version__}
        document = {"versions": versions, "parts": [int(n) for n in module.parts], "phases": measurement.phases}
        if arguments.trace:
            document["held"] = measurement.held
        json.dump(document, output, indent=1)
        output.flush()
    torch.distributed.barrier()
    os._exit(0)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--untied", action="store_true", help="give the head a weight of its own")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--data", type=int, default=1, help="ranks of each stage")
    parser.add_argument("--micros", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--bucket", type=int, default=1000000)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--accumulation", help="grad_accum_dtype")
    parser.add_argument("--interval", type=int, default=0, help="activation_checkpoint_interval")
    parser.add_argument("--use-reentrant", action="store_true")
    parser.add_argument("--partition", default="parameters")
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    arguments.architecture = arguments.lora = arguments.dropout = None
    return arguments


def load(arguments):
    """Imports what ranks need, once for all of them."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.runtime.pipe.engine  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    train.build_config(arguments)


def main():
    arguments = parse()
    output, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed prints on its own
    load(arguments)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=run, args=(arguments, rank, store, output))
                 for rank in range(arguments.stages * arguments.data)]
        for rank in ranks:
            rank.start()
        codes = []
        for rank in ranks:
            rank.join()
            codes.append(rank.exitcode)
            if codes[-1] != 0:  # the others wait for it
                for other in ranks:
                    other.kill()
        sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    main()
