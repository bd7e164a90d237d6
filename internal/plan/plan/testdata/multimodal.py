#!/usr/bin/env python3
"""Measures what a training of multimodal models holds, as in multimodal.golden.

    multimodal.py > multimodal.golden

Each model of ../../../input/model/testdata/multimodal trains two steps with
scripts/measure/train.py: bf16, two sequences of 256 tokens with two images each,
scaled dot product attention, AdamW. Tensors are in host memory, as encoders read
the sizes of images from their tensors. A line holds the case, the name of the
config file, the size of the images, and for each forward and backward pass the
bytes at its peak and at its end. Cases are "trained", "frozen" (the encoder is),
"projector" (nothing else is trained), "recomputed", "alone" (one image each) and
"adapted" (LoRA of all linear modules of the language model, recomputed).
"""

import json
import pathlib
import sys
import tempfile

import torch
import transformers

from isolated import measure

HERE = pathlib.Path(__file__).resolve().parent

VISION = ("vision_tower,vision_model,visual.patch_embed,visual.blocks,visual.pos_embed,visual.deepstack,"
          "visual.embeddings,visual.post,visual.downsample")
LORA = {"peft_type": "LORA", "r": 8, "target_modules": r".*(language_model|text_model).*\.(q_proj|v_proj|down_proj)"}
CASES = {
    "trained": [],
    "frozen": ["--freeze", VISION],
    "projector": ["--freeze", VISION + ",language_model,text_model,lm_head,image_newline"],
    "recomputed": ["--gradient-checkpointing"],
    "frozen-recomputed": ["--gradient-checkpointing", "--freeze", VISION],
    "alone": [],
    "adapted": ["--gradient-checkpointing", "--lora"],
}
SIZES = {"qwen3": "128x192", "qwen": "112x168", "mistral3": "112x140", "pixtral": "112x140", "glm": "112x168",
         "llava-next": "50x80", "llava-onevision": "180x400"}
ALONE = "llava-next", "llava-onevision"
EVERY = "gemma3-vision", "llava", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "llava-next", "llama4-vision", "glm4v"


def main():
    print("# torch", torch.__version__, "transformers", transformers.__version__, flush=True)
    chosen = sys.argv[1:]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as lora:
        json.dump(LORA, lora)
        lora.flush()
        for path in sorted((HERE.parents[2] / "input" / "model" / "testdata" / "multimodal").glob("*.json")):
            for case, flags in CASES.items():
                if path.stem not in (ALONE if case == "alone" else EVERY) and case != "trained":
                    continue
                if chosen and f"{case}:{path.stem}" not in chosen and path.stem not in chosen:
                    continue
                size = next((s for name, s in SIZES.items() if path.stem.startswith(name)), "112x112")
                more = [lora.name] if flags[-1:] == ["--lora"] else []
                if path.stem == "paligemma2":  # Gemma 2 has no other
                    more += ["--attention", "eager"]
                phases = measure(["--config", str(path), "--device", "cpu", "--batch", "2", "--seq-len", "256",
                                  "--images", "1" if case == "alone" else "2", "--image-size", size, "--steps", "1", "--json", *flags, *more])
                passes = [p for p in phases["phases"] if p["phase"] in ("forward", "backward")]
                print(case, path.stem, size, *(f"{p['peak']} {p['end']}" for p in passes), flush=True)


if __name__ == "__main__":
    main()
