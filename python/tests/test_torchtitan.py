"""torchtitan's own model, optimizers and schedule, with the two lines of the cookbook."""

import pathlib
import re
import textwrap

import pytest
import torch

pytest.importorskip("torchtitan")

import plimsoll.torch  # noqa: E402
from torchtitan.components.lr_scheduler import build_lr_schedulers  # noqa: E402
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.llama3 import Transformer, TransformerModelArgs  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 6


def trained(monkeypatch, ours):
    if ours:
        monkeypatch.setattr(torch.optim, "AdamW", torch.optim.AdamW)  # what the lines set is taken back
        blocks = re.findall(r"(?m)(?:^ {6}.*\n)+", (ROOT / "docs" / "cookbook.md").read_text())
        (lines,) = (block for block in blocks if "torch.optim.AdamW" in block)
        exec(compile(textwrap.dedent(lines), "docs/cookbook.md", "exec"), {})
    torch.manual_seed(0)
    model = Transformer(TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=128, max_seq_len=32))
    with torch.no_grad():
        model.init_weights()
    config = JobConfig()
    config.optimizer.lr, config.lr_scheduler.warmup_steps = 1e-3, 2
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    optimizers = build_optimizers([model], config.optimizer, dims)
    schedule = build_lr_schedulers(optimizers, config.lr_scheduler, STEPS)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizers.step()
        schedule.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    return losses, optimizers


def test_as_with_torch(monkeypatch):
    wanted, theirs = trained(monkeypatch, False)
    found, optimizers = trained(monkeypatch, True)
    (optimizer,) = optimizers
    assert isinstance(optimizer, plimsoll.torch.AdamW) and found == pytest.approx(wanted, rel=1e-4)
    # The state of torchtitan's checkpoints has the same names, and each takes the other's.
    states = [{k: v for k, v in o.state_dict().items() if k.startswith("state.")} for o in (theirs, optimizers)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(torch.as_tensor(states[1][name]), torch.as_tensor(value), rtol=1e-3, atol=1e-6)
    optimizers.load_state_dict(theirs.state_dict())
