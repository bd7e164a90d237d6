"""StateOffload in transformers' Trainer and in Lightning: the bits of the optimizer without it."""

import pytest
import torch

from gpt import GPT, batch, text
from plimsoll.torch import StateOffload


def test_the_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    from test_trainer import Texts, model

    def trained(wraps):
        torch.manual_seed(0)
        given = model(torch.float32)
        optimizer = torch.optim.AdamW(given.parameters(), lr=1e-3)
        optimizer = StateOffload(optimizer, chunk_bytes=20_000) if wraps else optimizer
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(wraps)), max_steps=4, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainer = transformers.Trainer(given, arguments, train_dataset=Texts(), optimizers=(optimizer, None))
        trainer.train()
        trainer.train(resume_from_checkpoint=str(tmp_path / str(wraps) / "checkpoint-2"))
        if wraps:
            optimizer.close()
        return list(given.parameters())

    assert all(map(torch.equal, trained(True), trained(False)))


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, wraps):
            super().__init__()
            torch.manual_seed(0)
            self.gpt, self.wraps = GPT(layers=1), wraps

        def training_step(self, tokens, _):
            return self.gpt.loss(tokens[0])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            if not self.wraps:
                return optimizer
            self.optimizer = StateOffload(optimizer, chunk_bytes=20_000)
            return self.optimizer

    def trained(wraps):
        module, data = Module(wraps), torch.utils.data.DataLoader([batch(text(), i, size=1) for i in range(4)])
        options = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)
        trainer = lightning.Trainer(max_epochs=1, gradient_clip_val=0.5, **options)
        trainer.fit(module, data)
        path = tmp_path / f"{wraps}.ckpt"
        trainer.save_checkpoint(path)
        if wraps:
            module.optimizer.close()
        module = Module(wraps)
        lightning.Trainer(max_epochs=2, **options).fit(module, data, ckpt_path=path)
        if wraps:
            module.optimizer.close()
        return list(module.parameters())

    assert all(map(torch.equal, trained(True), trained(False)))
