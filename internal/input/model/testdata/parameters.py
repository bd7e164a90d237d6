#!/usr/bin/env python3
"""Asks Hugging Face transformers for the parameters of models, without their weights.

    parameters.py config.json...             one line a model, as in parameters.golden
    parameters.py --list config.json...      every parameter
    parameters.py --held config.json...      as the modules of transformers 5 hold them, as in version5.golden

Each model is built on PyTorch's meta device, so that it takes no memory. A
golden line holds the name of the config file, the number of parameters (tied
ones once), the number of tensors (tied ones each) and the SHA-256 of the list
that --list prints: lines "name 896x4864", with " = owner" after a tensor that
shares the storage of another. They are in the order of the modules, and sorted
where there are experts, whose order is not that of the checkpoints.

Where the modules of transformers 5 differ from the published checkpoints, the
names and shapes are those of the checkpoints: transformers' own conversions
are run backwards, as save_pretrained does. With --held they are those of the
modules. Buffers are left out: a rotary embedding's frequencies, or the bias
that balances DeepSeek-V3's experts. Gemma 3n needs timm and torchvision.
"""

import argparse
import hashlib
import pathlib

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion


def parameters(path, held=False):
    """Every parameter as (name, shape, owner of the storage or None)."""
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    model.tie_weights()
    owners, listed = {}, []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if held:
            listed.append((name, list(parameter.shape), owner if owner != name else None))
            continue
        for published, tensor in revert_weight_conversion(model, {name: parameter.detach()}).items():
            listed.append((published, list(tensor.shape), owner if owner != name else None))
    return listed


def lines(listed):
    if any(".experts." in name for name, _, _ in listed):
        listed = sorted(listed)
    for name, shape, owner in listed:
        yield f"{name} {'x'.join(map(str, shape))}" + (f" = {owner}" if owner else "") + "\n"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--list", action="store_true", help="print every parameter instead of a digest")
    arguments.add_argument("--held", action="store_true", help="the modules of transformers, not the checkpoint")
    arguments.add_argument("configs", nargs="+", type=pathlib.Path)
    options = arguments.parse_args()
    if not options.list:
        print("# transformers", transformers.__version__)
    for path in options.configs:
        listed = parameters(path, options.held)
        if options.list:
            print("".join(lines(listed)), end="")
            continue
        count = sum(torch.Size(shape).numel() for _, shape, owner in listed if not owner)
        digest = hashlib.sha256("".join(lines(listed)).encode()).hexdigest()
        print(path.stem, count, len(listed), digest, flush=True)


if __name__ == "__main__":
    main()
