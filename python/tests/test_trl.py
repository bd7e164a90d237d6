"""TRL's trainers with our optimizer, by the base that docs/python.md shows: losses and norms are those with torch's."""

import pytest
import torch

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

import transformers  # noqa: E402

import plimsoll.torch  # noqa: E402
from plimsoll.transformers import TrainerMixin  # noqa: E402
from test_trainer import model  # noqa: E402
from test_trainer_mixin import logged, ours  # noqa: E402

WORDS = ["<pad>", "<unk>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]


def tokenizer():
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")


def sentence(i, words=12):
    return " ".join(WORDS[3 + (7 * i + 5 * j) % 26] for j in range(words + i % 4))


SETS = {
    "SFT": lambda: [{"text": sentence(i)} for i in range(64)],
    "DPO": lambda: [{"prompt": sentence(i, 4) + " ", "chosen": sentence(i + 1), "rejected": sentence(i + 2)} for i in range(64)],
}


def trained(kind, mixed, folder, dtype):
    base = getattr(trl, f"{kind}Trainer")
    trainer_class = type("Ours", (TrainerMixin, base), {}) if mixed else base
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, report_to=[],
        use_cpu=True, seed=0, disable_tqdm=True, save_strategy="no", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, bf16=False,
        max_length=32,
    )  # fmt: skip
    data = datasets.Dataset.from_list(SETS[kind]())
    reference = {"ref_model": model(dtype)} if kind == "DPO" else {}
    trainer = trainer_class(model(dtype), args=arguments, train_dataset=data, processing_class=tokenizer(), **reference)
    trainer.train()
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SETS)
def test_as_with_torch(tmp_path, monkeypatch, kind, dtype):
    wanted = trained(kind, False, tmp_path / "theirs", dtype)
    for name in ("clip_grad_norm_", "get_total_norm"):
        monkeypatch.setattr(torch.nn.utils, name, lambda *_, **__: pytest.fail("a second pass over the gradients"))
    found = trained(kind, True, tmp_path / "ours", dtype)
    assert isinstance(ours(found), plimsoll.torch.AdamW)
    # Torch rounds bf16 weights after each step, and ours are fp32.
    tolerance = 1e-3 if dtype is torch.float32 else 0.05
    for name in ("loss", "grad_norm"):
        assert len(logged(found, name)) == 6
        assert logged(found, name)[:3] == pytest.approx(logged(wanted, name)[:3], rel=tolerance)
