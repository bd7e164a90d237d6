"""Where host memory goes in a real training: a recording of plimsoll run explains the peak of every phase."""

import json
import os
import subprocess
import sys

import pytest

from gpt import ROOT
from marked import bytes_of

transformers = pytest.importorskip("transformers")

TRAINING = """
import sys, torch, transformers, plimsoll.torch
torch.set_num_threads(1)  # no memory of other threads
config = transformers.GPT2Config(use_cache=False)  # 124 million parameters
model = transformers.GPT2LMHeadModel(config).train()
if sys.argv[1] == "plimsoll":
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model)
else:
    optimizer = torch.optim.AdamW(model.parameters(), **{sys.argv[1]: True})
plimsoll.torch.watch(model, optimizer)
for _ in range(2):
    tokens = torch.randint(0, 50257, (2, 128))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
plimsoll.mark("end")
"""
PARAMETERS = 4 * 124_439_808  # bytes


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["foreach", "fused", "plimsoll"])
def test_memory_is_explained(tmp_path, optimizer):
    recording = tmp_path / "run.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    # A fresh interpreter: a fork begins with the memory of another.
    command = [os.environ["PLIMSOLL"], "run", "--record", recording, "--", sys.executable, "-c", TRAINING, optimizer]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in recording.read_text().splitlines()]
    ends = [r["mark"]["ended"] for r in records if "mark" in r and r["mark"]["ended"]["phase"] != "load"]
    counted = [e for e in ends if e["holdings"] is not None]
    assert [(e["phase"], e["step"]) for e in counted[:9]] == [("initialize", 0)] + [
        (phase, step) for step in (1, 2) for phase in ("forward", "backward", "step", "")
    ]
    for ended in counted[:9]:
        at_peak = ended.get("peak_holdings") or ended["holdings"]
        # What is known by difference alone is not explained.
        named = sum(h["bytes"] for h in at_peak if not h["why"].startswith("by difference"))
        unexplained = ended["peak_resident_bytes"] - named - ended["peak_free_heap_bytes"]
        share = unexplained / ended["peak_resident_bytes"]
        print(f"{optimizer} {ended['phase'] or 'between'} {ended['step']}: {ended['peak_resident_bytes']} B, {share:+.2%}")
        assert abs(share) < 0.02, (ended, unexplained)
    before, after = (bytes_of(counted[i]["holdings"]) for i in (2, 3))
    grown = {c: after[c] - before.get(c, 0) for c in after if after[c] - before.get(c, 0) > 1 << 20}
    states = {"exp_avg": PARAMETERS, "exp_avg_sq": PARAMETERS}
    assert grown == (states if optimizer != "plimsoll" else {})  # the service holds them
