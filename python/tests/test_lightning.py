"""Lightning clips gradients as it does with optimizers of torch, with and without mixed precision."""

import logging

import pytest
import torch

import plimsoll.torch

lightning = pytest.importorskip("lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6


class Module(lightning.LightningModule):
    def __init__(self, optimizers, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        self.optimizers_of, self.options, self.losses, self.norms = optimizers, options, [], []

    def training_step(self, rows, _):
        loss = (self.layers(rows) - rows).float().square().mean() * 100
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def configure_optimizers(self):
        return self.optimizers_of.AdamW(self.parameters(), lr=1e-2, **self.options)


def fit(module, directory, precision, **options):
    torch.manual_seed(1)
    rows = torch.utils.data.DataLoader(torch.randn(8 * STEPS * 2, 16), batch_size=8)
    plugins = []
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugins = [lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, precision=None if plugins else precision, plugins=plugins, enable_checkpointing=False,
        default_root_dir=directory, **options,
    )  # fmt: skip
    trainer.fit(module, rows)
    return trainer


@pytest.mark.each_choice
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(tmp_path, precision, algorithm):
    found = []
    for optimizers in (plimsoll.torch, torch.optim):
        module = Module(optimizers)
        fit(module, tmp_path, precision, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
        found.append((module.losses, module.norms))
    assert max(found[1][1]) > 0.05 and len(found[1][1]) == STEPS  # there was something to clip
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-2)


def test_gradients_of_a_scaled_loss_are_clipped_without_their_scale(tmp_path):
    """The other way: the optimizer clips, in the pass that updates, and GradScaler leaves gradients scaled for it."""
    ours = Module(plimsoll.torch, max_grad_norm=0.05)
    fit(ours, tmp_path, "16-mixed")
    theirs = Module(torch.optim)
    fit(theirs, tmp_path, "16-mixed", gradient_clip_val=0.05)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)


def test_a_step_that_overflows_is_skipped(tmp_path):
    class Overflows(Module):
        def training_step(self, rows, index):
            return super().training_step(rows, index) * (float("inf") if index == 2 else 1)

    module = Overflows(plimsoll.torch)
    trainer = fit(module, tmp_path, "16-mixed", gradient_clip_val=0.05)
    [optimizer] = trainer.optimizers
    assert optimizer.skipped == 1 and all(torch.isfinite(p).all() for p in module.parameters())
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**9


def test_fabric(tmp_path):
    found = []
    for optimizers in (plimsoll.torch, torch.optim):
        fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
        module = Module(optimizers)
        layers, optimizer = fabric.setup(module.layers, module.configure_optimizers())
        losses = []
        for i in range(STEPS):
            rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
            loss = (layers(rows) - rows).float().square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(layers, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_grad_scaler_keeps_what_it_had():
    """It alone is told that the step takes a scale."""
    model = torch.nn.Linear(4, 4)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for unscales in (False, True):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        taken = []
        optimizer.register_step_pre_hook(lambda *_: taken.append(optimizer.grad_scale))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert taken[0] is None if unscales else taken[0] == 4
    assert optimizer._step_supports_amp_scaling
