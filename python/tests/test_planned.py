"""What ``plimsoll plan --offload states`` says is what StateOffload makes for the same model, to the byte."""

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from plimsoll import states
from plimsoll.torch import Muon, StateOffload, muon_groups, refusals, regions

CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
STATES = {"held_states", "held_control", "gradients"}
WINDOW = {"optimizer_states_window", "dtype_conversions"}
KIB = 1 << 10
SETTINGS = [
    ([], {}),
    (["--master", "split"], {"master": "split"}),
    (["--master", "fp32"], {"master": "fp32"}),
    (["--master", "split", "--offload-moments", "bf16"], {"master": "split", "moments": "bf16"}),
    (["--no-recovery"], {"recovery": False}),
    (["--offload-fraction", "0.5", "--master", "split"], {"fraction": 0.5, "master": "split"}),
    (["--offload-chunk", "64KiB", "--master", "split"], {"chunk_bytes": 64 * KIB, "master": "split"}),
    (["--offload-chunk", "64KiB", "--master", "fp32"], {"chunk_bytes": 64 * KIB, "master": "fp32"}),
    (["--offload-chunk", "1B"], {"chunk_bytes": 1}),
    (["--offload-mode", "whole", "--master", "split"], {"mode": "whole", "master": "split"}),
    (
        ["--offload-mode", "whole", "--master", "fp32", "--no-recovery", "--offload-chunk", "64KiB"],
        {"mode": "whole", "master": "fp32", "recovery": False, "chunk_bytes": 64 * KIB},
    ),
]
OPTIMIZERS = {
    "adamw/foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "adamw/fused": lambda ps: torch.optim.AdamW(ps, fused=True),
}


def planned(folder, optimizer, flags):
    """The bytes of the arenas, and of the window in the first step and in those after it."""
    CONFIG.save_pretrained(folder)
    command = [os.environ["PLIMSOLL"], "plan", "--model", str(folder / "config.json"), "--gpu", "H100-80GB", "--precision", "bf16"]
    command += ["--seq-len", "8", "--offload", "states", "--optimizer", optimizer, "--json", *flags]
    document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    arenas, windows = {}, {}
    for device in document["devices"]:
        for phase in device["phases"]:
            sizes = {c["component"]: c["bytes"] for c in phase["components"]}
            if device["kind"] == "host":
                arenas.update((k, v) for k, v in sizes.items() if k in STATES)
            elif phase["phase"] == "step":
                windows[phase["iteration"]] = sum(v for k, v in sizes.items() if k in WINDOW)
    return arenas, windows["first"], windows["steady"]


@pytest.mark.parametrize("flags, options", SETTINGS, ids=lambda v: " ".join(v).replace("--", "") if isinstance(v, list) else "")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_plan_is_what_the_optimizer_makes(tmp_path, monkeypatch, optimizer, flags, options):
    monkeypatch.setattr(sys.modules[torch.optim.Optimizer.__module__], "_get_fused_kernels_supported_devices", lambda: ["meta"])
    monkeypatch.setattr(refusals, "refuse_dependent", lambda optimizer: None)  # it compares numbers, and here are none
    model = AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16).to("meta")  # a device, but for its memory
    offload = StateOffload(OPTIMIZERS[optimizer](model.parameters()), **options)
    arenas, first, steady = planned(tmp_path, optimizer, flags)
    assert arenas == states.sizes_of(regions.document(offload._layout))
    assert sum(arenas.values()) == offload.host_bytes
    if optimizer == "adamw/foreach" and options.get("master") == "fp32":
        return  # what the optimizer makes for a moment is more than the comparison of weights, and not a part of the window
    assert (first, steady) == (offload.first_window_bytes, offload.window_bytes)


def test_the_arenas_are_the_planned_ones(tmp_path, service):
    model = AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with closing(StateOffload(optimizer, master="split", chunk_bytes=64 * KIB, socket=service.socket)) as offload:
        offload.open()
        arenas = {a.component: a.bytes for a in offload._state.session.arenas.values()}
    assert arenas == planned(tmp_path, "adamw/foreach", ["--offload-chunk", "64KiB", "--master", "split"])[0]


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_muon_is_planned(tmp_path, service, moments):
    model = AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16)
    optimizer = Muon(muon_groups(model), lr=0.02, moments=moments, model=model, socket=service.socket)
    with closing(optimizer):
        optimizer.open()
        arenas, first, steady = planned(tmp_path, "muon", ["--offload-moments", moments])
        assert sum(arenas.values()) == optimizer.host_bytes
        assert (first, steady) == (optimizer._held.first_window_bytes, optimizer._held.window_bytes)
