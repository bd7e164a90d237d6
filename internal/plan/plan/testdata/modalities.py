#!/usr/bin/env python3
"""Measures what a training of models that read images or sound holds, as in modalities.golden.

    modalities.py NAME... > modalities.golden

Each config of ../../../input/model/testdata/variants trains a step with
scripts/measure/train.py, on tensors without memory: two samples, AdamW. A line
holds the name, the precision, the attention, the checkpointing ("none", "full" or
"adapted": full, with LoRA of the projections of queries and values), and for each
forward and backward pass the bytes at its peak and at its end.
"""

import json
import pathlib
import sys
import tempfile

import torch
import transformers

from isolated import measure

HERE = pathlib.Path(__file__).resolve().parent
CASES = [
    ("bf16", "sdpa", "none"), ("bf16", "eager", "none"), ("bf16", "sdpa", "full"), ("fp32", "sdpa", "none"),
    ("amp-bf16", "sdpa", "none"), ("amp-bf16", "sdpa", "full"), ("amp-fp16", "sdpa", "none"),
    ("amp-bf16", "sdpa", "adapted"),
]
LORA = {"peft_type": "LORA", "r": 8, "target_modules": r".*\.(q_proj|v_proj|query|value)"}


def main():
    print("# torch", torch.__version__, "transformers", transformers.__version__, flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as lora:
        json.dump(LORA, lora)
        lora.flush()
        for name in sys.argv[1:]:
            for precision, attention, checkpointing in CASES:
                path = HERE.parents[2] / "input" / "model" / "testdata" / "variants" / f"{name}.json"
                flags = ["--gradient-checkpointing"] if checkpointing != "none" else []
                if checkpointing == "adapted":
                    flags += ["--lora", lora.name]
                phases = measure(["--config", str(path), "--batch", "2", "--seq-len", "256", "--image-size", "224x224",
                                  "--steps", "1", "--json",
                                  "--precision", precision, "--attention", attention, *flags])
                passes = [p for p in phases["phases"] if p["phase"] in ("forward", "backward")]
                print(name, precision, attention, checkpointing, *(f"{p['peak']} {p['end']}" for p in passes), flush=True)


if __name__ == "__main__":
    main()
