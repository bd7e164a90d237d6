"""Writes FOLDER.txt: the SHA-256 of every state in a checkpoint, as torch.distributed.checkpoint reads it.

    python digest.py FOLDER
"""

import hashlib
import sys

import torch
import torch.distributed.checkpoint as dcp

out = sys.argv[1]
saved = dcp.FileSystemReader(out).read_metadata()
tensors = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in saved.state_dict_metadata.items() if hasattr(v, "size")}
dcp.load(tensors, checkpoint_id=out, no_dist=True)
with open(out + ".txt", "w") as file:
    for key, t in sorted(tensors.items()):
        before = getattr(saved, "mcore_data", {}).get(key, {}).get("nd_reformulated_orig_global_shape")
        if before:  # the shape counts blocks in each dimension, and the last one is the numbers of a block
            blocks = t.shape[:-1]
            sides = [n // b for n, b in zip(before, blocks)]
            order = [i for d in range(len(before)) for i in (d, len(before) + d)]
            t = t.reshape(*blocks, *sides).permute(*order).reshape(before)
        component, name = key.removeprefix("optimizer.state.").split(".", 1)
        layers = [(name, t)]
        if "layers." in name and not name.split("layers.", 1)[1][0].isdigit():
            layers = [(name.replace("layers.", f"layers.{i}.", 1), one) for i, one in enumerate(t)]
        for of, one in layers:
            digest = hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest()
            print(component.replace("fp32_param", "master").replace("param", "master"), of, list(one.shape), digest, file=file)
