"""plimsoll explain names the phase of real tracebacks: each framework fails in each phase of its training loop."""

import json
import os
import subprocess
import traceback

import pytest
import torch

_TEXT = (
    "CUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 109.06 MiB is "
    "free. Including non-PyTorch memory, this process has 79.03 GiB memory in use. Of the allocated memory 77.80 GiB is "
    "allocated by PyTorch, and 612.80 MiB is reserved by PyTorch but unallocated."
)


def fail(*_, **__):
    raise torch.OutOfMemoryError(_TEXT)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail()


def arm(monkeypatch, phase):
    """Makes torch fail in a phase."""
    if phase == "load":
        monkeypatch.setattr(torch.nn.Module, "_apply", fail)
    elif phase == "forward":
        monkeypatch.setattr(torch.nn.functional, "linear", fail)
    elif phase == "loss":
        monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    elif phase == "backward":
        embed = torch.nn.Embedding.forward
        monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: FailsInBackward.apply(embed(self, ids)))
    elif phase == "clip":
        monkeypatch.setattr(torch, "_foreach_norm", fail)
    elif phase == "step":
        monkeypatch.setattr(torch.optim.AdamW, "_init_group", fail)
    elif phase == "checkpoint":
        monkeypatch.setattr(torch.serialization, "_save", fail)


def model():
    return torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))


def loop(folder):
    net = model()
    net.to("cpu")
    optimizer = torch.optim.AdamW(net.parameters())
    tokens = torch.arange(8)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(net(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(net.state_dict(), folder / "model.pt")


def accelerate_loop(folder):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    tokens = torch.arange(8)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(net(tokens), tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(net.state_dict(), folder / "model.pt")


def lightning_loop(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.net(batch), batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=2, gradient_clip_val=1.0, default_root_dir=folder, **options)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.arange(8), batch_size=4))


def trainer_loop(folder):
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    net = transformers.LlamaForCausalLM(config)
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    options = {"report_to": [], "use_cpu": True, "save_steps": 1, "max_steps": 2, "optim": "adamw_torch"}
    arguments = transformers.TrainingArguments(str(folder), per_device_train_batch_size=2, **options)
    transformers.Trainer(net, arguments, train_dataset=data).train()


_LOOPS = {"torch": loop, "accelerate": accelerate_loop, "lightning": lightning_loop, "trainer": trainer_loop}
_PHASES = {"forward": "forward", "loss": "forward", "backward": "backward", "clip": "step", "step": "step"}


@pytest.mark.parametrize("phase", [*_PHASES, "load", "checkpoint"])
@pytest.mark.parametrize("framework", _LOOPS)
def test_phase(framework, phase, monkeypatch, tmp_path):
    arm(monkeypatch, phase)
    expected = _PHASES.get(phase, phase)
    if (framework, phase) == ("accelerate", "load"):
        expected = "initialize"  # prepare() moves the model, and sets up the rest
    try:
        _LOOPS[framework](tmp_path)
    except torch.OutOfMemoryError:
        (tmp_path / "log").write_text(traceback.format_exc())
    answer = subprocess.run([os.environ["PLIMSOLL"], "explain", "--json", tmp_path / "log"], capture_output=True, check=False)
    cause = json.loads(answer.stdout)["cause"]
    assert (cause["resource"], cause["phase"]) == ("gpu", expected), (tmp_path / "log").read_text()
