#!/usr/bin/env python3
"""Asks Hugging Face transformers for the classes of a model's blocks of tokens, without its weights.

    blocks.py config.json...     one line a class of models and a type of its language model, as in blocks.golden

The first model of each line is built on PyTorch's meta device. Its blocks are
the modules in its outer ModuleLists outside of encoders of images and sound; an
encoder and a decoder of tokens both count. Albert's list of blocks is in a
group. Models of other code and of missing packages are left
out.
"""

import re
import sys

import torch
import transformers

OTHERS = re.compile("layer_groups$|vision|visual|audio|merger|tower|experts|projector|embedder")


def classes(config):
    """The sorted classes of the blocks."""
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    found = set()
    for name, module in model.named_modules():
        inside = re.search(r"\.\d+\.", name + ".") and "albert_layer_groups" not in name
        if isinstance(module, torch.nn.ModuleList) and len(module) > 0 and not OTHERS.search(name) and not inside:
            found |= {type(block).__name__ for block in module}
    return sorted(found)


def main():
    print("# transformers", transformers.__version__)
    known = set()
    for path in sys.argv[1:]:
        try:
            config = transformers.AutoConfig.from_pretrained(path)
            key = f"{config.architectures[0]}/{config.get_text_config().model_type}"
            if key not in known:
                print(key, *classes(config), flush=True)
                known.add(key)
        except (ImportError, ValueError, AttributeError) as error:
            print(f"{path}: {str(error).splitlines()[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
