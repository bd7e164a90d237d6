"""plimsoll.torch.watch in the training loops of frameworks."""

import logging
import os
import socket
import subprocess

import pytest
import torch

import plimsoll.torch
from gpt import ROOT
from marked import received  # noqa: F401
from preloaded import python
from test_watch import named, nbytes, network, unwatched  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")


class Rows(torch.nn.Module):
    """A model whose loss is its own, as the Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, rows):
        logits = self.layers(rows)
        return {"loss": logits.square().mean(), "logits": logits}


def dataset(rows):
    return [{"rows": torch.ones(16)} for _ in range(rows)]


def without_repeats(places):
    return [p for p, before in zip(places, [None, *places]) if p != before]


@pytest.mark.parametrize("optimizers", [torch.optim, plimsoll.torch, None])
def test_trainer(received, tmp_path, optimizers):
    transformers = pytest.importorskip("transformers")
    model = Rows()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_steps=3,
        save_strategy="no" if optimizers is plimsoll.torch else "steps",
    )  # fmt: skip
    optimizer = optimizers.AdamW(model.parameters()) if optimizers else None  # else the Trainer makes one
    trainer = transformers.Trainer(
        model, arguments, train_dataset=dataset(24), eval_dataset=dataset(4), optimizers=(optimizer, None)
    )
    plimsoll.torch.watch(model, optimizer)
    trainer.train()
    passes = ["forward {0}", "backward {0}"] * 2 + ["step {0}", "between steps"]
    one, two, three = ([p.format(n) for p in passes] for n in (1, 2, 3))
    saved = [] if optimizers is plimsoll.torch else ["checkpoint 3"]
    assert received.places() == ["initialize 0", *one, *two, "evaluation", *three, "evaluation", *saved]
    size = nbytes(model.parameters())
    step = named(received.ended("step", 1))
    assert (step["parameters"], step["gradients"]) == (size, size)
    assert ("exp_avg" in step) == (optimizers is not plimsoll.torch)


@pytest.mark.parametrize("optimizers", [torch.optim, plimsoll.torch])
def test_lightning(received, tmp_path, optimizers):
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def training_step(self, rows, _):
            return self.layers(rows).square().mean()

        def validation_step(self, rows, _):
            self.layers(rows)

        def configure_optimizers(self):
            return optimizers.AdamW(self.parameters())

    module = Module()
    plimsoll.torch.watch(module)
    rows = torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=8)
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, enable_checkpointing=False, default_root_dir=tmp_path, num_sanity_val_steps=0,
    ).fit(module, rows, rows)  # fmt: skip
    passes = ["forward {0}", "backward {0}"] * 2 + ["step {0}", "between steps"]
    one, two = ([p.format(n) for p in passes] for n in (1, 2))
    assert without_repeats(received.places()) == ["initialize 0", *one, *two, "evaluation"]
    assert named(received.ended("step", 2))["gradients"] == nbytes(module.parameters())


@pytest.mark.parametrize("wrapped", [False, True])
def test_accelerate(received, wrapped):
    accelerate = pytest.importorskip("accelerate")
    model = network()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters())
    if not wrapped:
        plimsoll.torch.watch(model, optimizer)
    prepared, wrapper = accelerator.prepare(model, optimizer)
    if wrapped:
        plimsoll.torch.watch(prepared, wrapper)
    for i in range(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.randn(4, 16)).square().mean())
            wrapper.step()
            wrapper.zero_grad()
    passes = ["forward {0}", "backward {0}"] * 2 + ["step {0}", "between steps"]
    assert received.places() == ["initialize 0"] + [p.format(n) for n in (1, 2) for p in passes]
    assert named(received.ended("step", 2))["exp_avg"] == nbytes(model.parameters())


DEEPSPEED = """
import sys, deepspeed, torch, plimsoll.torch
stage = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
settings = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": stage}, "bf16": {"enabled": stage > 0},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
plimsoll.torch.watch(engine)
for _ in range(4):
    loss = engine(torch.randn(4, 16, dtype=torch.bfloat16 if stage else torch.float32)).float().square().mean()
    engine.backward(loss)
    engine.step()
"""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(received, stage):
    pytest.importorskip("deepspeed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    place = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PYTHONPATH=ROOT / "python")
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    command = [*python("deepspeed", "plimsoll.torch"), "-c", DEEPSPEED, str(stage)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    places = [p for p in without_repeats(received.places()) if p]
    passes = ["forward {0}", "backward {0}"] * 2 + ["step {0}", "between steps"]
    assert places == ["initialize 0"] + [p.format(n) for n in (1, 2) for p in passes]
    step, size = named(received.ended("step", 2)), nbytes(network().parameters())
    assert step["exp_avg"] >= size and step["exp_avg_sq"] >= size
    if stage:
        assert step["master_weights"] >= size
    if stage < 3:  # stage 3 holds the model's parameters in a flat buffer of its own
        assert step["parameters"] >= size // (2 if stage else 1)
