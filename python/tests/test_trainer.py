"""transformers.Trainer and accelerate take the optimizer as any other."""

import copy

import pytest
import torch

import plimsoll.torch
from gpt import GPT, batch, text

BOTH_WAYS = True

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


class Texts(torch.utils.data.Dataset):
    def __init__(self, items=64, length=32):
        data = text()
        self.rows = [data[i * length : (i + 1) * length] % 250 for i in range(items)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def model(dtype):
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def train(model, optimizer, directory, resume=None, steps=8, **arguments):
    arguments = transformers.TrainingArguments(
        output_dir=str(directory), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5, logging_steps=1,
        report_to=[], use_cpu=True, seed=0, lr_scheduler_type="linear", disable_tqdm=True, **arguments
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    return [h for h in trainer.state.log_history if "loss" in h]


def test_trainer(tmp_path):
    ours, theirs = model(torch.float32), model(torch.float32)
    found = train(ours, plimsoll.torch.AdamW(ours.parameters(), lr=1e-2), tmp_path / "a", save_strategy="no")
    wanted = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), tmp_path / "b", save_strategy="no")
    assert [h["loss"] for h in found] == pytest.approx([h["loss"] for h in wanted], rel=1e-3)
    assert [float(h["grad_norm"]) for h in found] == pytest.approx([float(h["grad_norm"]) for h in wanted], rel=1e-3)
    assert max(float(h["grad_norm"]) for h in found) > 0.5 and found[-1]["loss"] < found[0]["loss"]


def test_trainer_goes_on_from_its_checkpoint(tmp_path):
    def new():
        made = model(torch.bfloat16)
        return made, plimsoll.torch.AdamW(made.parameters(), lr=1e-2, model=made)

    whole, optimizer = new()
    wanted = train(whole, optimizer, tmp_path, save_strategy="steps", save_steps=4)
    resumed, optimizer = new()
    found = train(resumed, optimizer, tmp_path, resume=str(tmp_path / "checkpoint-4"), save_strategy="no")
    # The low bits of the master weights are in the checkpoint, too.
    for p, q in zip(resumed.parameters(), whole.parameters()):
        assert torch.equal(p, q)
    assert found[-1]["loss"] == wanted[-1]["loss"]


def test_accelerate():
    losses = []
    for module in (plimsoll.torch, torch.optim):
        torch.manual_seed(0)
        model = GPT()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = module.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        data = torch.utils.data.DataLoader(torch.cat([batch(text(), i) for i in range(8)]), batch_size=4)
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        of_this = []
        for tokens in data:
            with accelerator.accumulate(model):
                loss = model.loss(tokens)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                of_this.append(loss.item())
        losses.append(of_this)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0]


def test_peft_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    base = model(torch.bfloat16)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    before = copy.deepcopy(adapted.state_dict())
    optimizer = plimsoll.torch.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2, model=adapted)
    train(adapted, optimizer, tmp_path, save_strategy="no", steps=2)
    changed = [n for n, t in adapted.state_dict().items() if not torch.equal(t, before[n])]
    assert changed and all("lora_" in n for n in changed)
    adapted.save_pretrained(tmp_path / "adapter")  # safetensors of views of shared memory
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 1 << 20
