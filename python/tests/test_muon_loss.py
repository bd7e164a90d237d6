"""The loss of plimsoll.torch.Muon beside torch's optimizers: scripts/measure/muon_loss.py, with few steps."""

import importlib.util
import statistics

import pytest
import torch

from gpt import ROOT, text

_SPEC = importlib.util.spec_from_file_location("muon_loss", ROOT / "scripts" / "measure" / "muon_loss.py")
muon_loss = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(muon_loss)

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")


@pytest.mark.nightly
def test_losses_of_three_seeds():
    """Within the noise of the seeds: the largest difference of means is a standard deviation of torch's losses."""
    data = text()
    kinds = "torch, fp32", "plimsoll, bf16", "plimsoll, bf16, bf16 moments"
    torchs, *ours = [[muon_loss.train(kind, seed, data, 40) for seed in range(3)] for kind in kinds]
    assert statistics.mean(torchs) < 4.7  # it begins with more than 5.5
    for found in ours:
        assert abs(statistics.mean(found) - statistics.mean(torchs)) < statistics.stdev(torchs)
