#!/usr/bin/env python3
"""Measure what a compiled model keeps for its backward pass.

The script compiles a transformers model with random weights as torch.compile does, up to the code of kernels: the
joint graph of both passes, cut by the min-cut partitioner. It reports the bytes of the storages that the forward pass
hands to the backward pass, parameters not counted, for each number of layers.

  compiled.py --config internal/input/model/catalog/llama-3.2-1b.json --layers 2 3 --seq-len 256 --precision bf16

Needs torch 2.15 and transformers 5.
"""

import argparse
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

VIEWS = {"view", "alias", "transpose", "permute", "expand", "slice", "unsqueeze", "squeeze", "t", "_unsafe_view"}


def owner(node):
    """The operation whose result a view is of."""
    while str(node.target).removeprefix("aten.").partition(".")[0] in VIEWS:
        node = node.args[0]
    return node


def saved_bytes(graph, parameters):
    results = [node for node in graph.nodes if node.op == "output"][0].args[0]
    owners = {}
    for node in results:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and node.op != "placeholder":
            owners[owner(node).name] = value.numel() * value.element_size()
            source = owner(node)
            if parameters and source.args and owner(source.args[0]).op == "placeholder" and "convert" in str(source.target):
                del owners[source.name]  # autocast's copy of a weight
    return sum(owners.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--precision", choices=("bf16", "amp-bf16"), default="bf16")
    arguments = parser.parse_args()
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                      "saved": [measure(arguments, layers) for layers in arguments.layers]}))


def measure(arguments, layers):
    """What a model of so many layers keeps, in bytes."""
    with open(arguments.config) as file:
        fields = json.load(file)
    fields = {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}
    fields["num_hidden_layers"] = layers
    architecture = getattr(transformers, fields["architectures"][0])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    mixed = arguments.precision == "amp-bf16"
    model = architecture._from_config(
        config, dtype=torch.float32 if mixed else torch.bfloat16, attn_implementation="sdpa")
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=lambda module, _: make_boxed_func(module.forward),
                           partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table)
    tokens = torch.randint(0, config.vocab_size, (1, arguments.seq_len))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        loss = torch.compile(model.train(), backend=backend)(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return sum(saved_bytes(graph, mixed) for graph in graphs)


if __name__ == "__main__":
    main()
