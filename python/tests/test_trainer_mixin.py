"""A Trainer whose optimizer is ours, with nothing but a base more."""

import copy

import pytest
import torch

import plimsoll.torch
from test_distributed import run, weights
from test_trainer import Texts, model

transformers = pytest.importorskip("transformers")

from plimsoll.transformers import CheckpointCallback, Trainer, TrainerMixin  # noqa: E402


def arguments_of(directory, **options):
    chosen = dict(
        output_dir=str(directory), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1, report_to=[],
        use_cpu=True, seed=0, disable_tqdm=True, save_strategy="no", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5,
    )  # fmt: skip
    chosen.update(options)
    return transformers.TrainingArguments(**chosen)


def trained(kind, directory, dtype=torch.float32, resume=None, callbacks=None, **options):
    made = model(dtype)
    trainer = kind(made, arguments_of(directory, **options), train_dataset=Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer, name):
    return [float(h[name]) for h in trainer.state.log_history if name in h]


def ours(trainer):
    return trainer.optimizer.optimizer


@pytest.mark.parametrize("limit", [0.5, 0.0])
def test_as_with_torch(tmp_path, limit):
    """Losses, norms and learning rates are those of the Trainer with torch's AdamW, clipped or not."""
    found = trained(Trainer, tmp_path / "a", max_grad_norm=limit)
    wanted = trained(transformers.Trainer, tmp_path / "b", max_grad_norm=limit)
    assert isinstance(ours(found), plimsoll.torch.AdamW)
    assert [g["weight_decay"] for g in ours(found).param_groups] == [0.1, 0.0]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert len(logged(found, name)) == 6
        if name != "grad_norm" or limit or logged(wanted, name):  # transformers 4 logs no norm where it does not clip
            assert logged(found, name) == pytest.approx(logged(wanted, name), rel=1e-3)


def test_one_pass_over_gradients(tmp_path, monkeypatch):
    """Nothing asks torch for the norm of gradients, and each step's norm comes from the step."""
    for name in ("clip_grad_norm_", "get_total_norm"):
        monkeypatch.setattr(torch.nn.utils, name, lambda *_, **__: pytest.fail("a second pass over the gradients"))
    assert all(n > 0 for n in logged(trained(Trainer, tmp_path), "grad_norm"))


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_overlap_where_nobody_reads(tmp_path):
    class Reader(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            self.norm = next(model.parameters()).norm()

    class Weighted(TrainerMixin, transformers.Trainer):
        def compute_loss(self, model, inputs, **named):
            return super().compute_loss(model, inputs, **named) + 0 * sum(p.sum() for p in model.parameters())

    def headless(made):
        """As Liger's fused loss: the model reads the weight of its head, whose own forward pass is not called."""

        def forward(input_ids, labels, **_):
            logits = made.model(input_ids=input_ids).last_hidden_state @ made.lm_head.weight.T
            return {"loss": loss_of(logits, labels)}

        made.forward = forward
        return made

    patched = Trainer(headless(model(torch.float32)), arguments_of(tmp_path / "e", max_steps=2), train_dataset=Texts())
    patched.train()
    given = dict(train_dataset=Texts(), compute_loss_func=lambda outputs, labels, **_: loss_of(outputs.logits, labels))
    function = Trainer(model(torch.float32), arguments_of(tmp_path / "f", max_steps=2), **given)
    function.train()
    overlaps = {
        "a forward pass": patched,
        "a function": function,
        "its own": trained(Trainer, tmp_path / "a", max_steps=2),
        "a callback": trained(Trainer, tmp_path / "b", max_steps=2, callbacks=[Reader()]),
        "a loss": trained(Weighted, tmp_path / "c", max_steps=2),
        "told so": trained(Trainer, tmp_path / "d", max_steps=2, optim_args="overlap=none, moments=bf16"),
    }
    found = {name: ours(t)._settings.overlap for name, t in overlaps.items()}
    assert found.pop("its own") == "forward"
    assert set(found.values()) == {None}, found
    assert ours(overlaps["told so"])._settings.moments == "bf16"


def test_no_overlap_under_data_parallel(tmp_path):
    """It copies parameters to other GPUs before any module's forward pass."""
    made = model(torch.float32)
    trainer = Trainer(made, arguments_of(tmp_path), train_dataset=Texts())
    assert trainer._reads_no_parameters(made)
    trainer.args._n_gpu = 2
    assert not trainer._reads_no_parameters(made)


def test_same_bits_with_overlap(tmp_path):
    behind = trained(Trainer, tmp_path / "a", torch.bfloat16)
    serial = trained(Trainer, tmp_path / "b", torch.bfloat16, optim_args="overlap=none")
    ours(behind).synchronize()
    for p, q in zip(behind.model.parameters(), serial.model.parameters()):
        assert torch.equal(p, q)


def test_goes_on_from_its_checkpoint(tmp_path):
    """To the bit, from a folder that is not that of the second run."""
    whole = trained(Trainer, tmp_path / "a", torch.bfloat16, save_strategy="steps", save_steps=3)
    assert (tmp_path / "a" / "checkpoint-3" / "plimsoll").is_dir()
    resumed = trained(Trainer, tmp_path / "b", torch.bfloat16, resume=str(tmp_path / "a" / "checkpoint-3"))
    assert logged(resumed, "loss")[-1] == logged(whole, "loss")[-1]
    for trainer in (whole, resumed):
        ours(trainer).synchronize()
    for p, q in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(p, q)


def test_one_callback(tmp_path):
    """A callback that the program gives is the only one."""
    mine = CheckpointCallback(background=True)
    trainer = trained(Trainer, tmp_path, max_steps=2, callbacks=[mine])
    assert [c for c in trainer.callback_handler.callbacks if isinstance(c, CheckpointCallback)] == [mine]


def test_optimizer_of_the_program(tmp_path):
    """An optimizer that the program gives stays, and the Trainer clips for it."""
    made = model(torch.float32)
    theirs = torch.optim.AdamW(made.parameters(), lr=1e-2)
    trainer = Trainer(made, arguments_of(tmp_path, max_steps=2), train_dataset=Texts(), optimizers=(theirs, None))
    trainer.train()
    assert ours(trainer) is theirs and all(n > 0 for n in logged(trainer, "grad_norm"))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(optim="adafactor"), "optim is .*adafactor.*expected adamw_torch"),
        (dict(optim_args="moments"), "optim_args has 'moments': expected NAME=VALUE"),
        (dict(optim_args="beta1=0.8"), "optim_args has 'beta1=0.8'"),
        (dict(optim_args="moments=int4"), "moments is 'int4'"),
    ],
)
def test_refuses(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trained(Trainer, tmp_path, max_steps=1, **options)


def test_adapter_and_scheduler(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model(torch.bfloat16), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    before = copy.deepcopy(adapted.state_dict())
    trainer = Trainer(adapted, arguments_of(tmp_path, max_steps=2, lr_scheduler_type="cosine"), train_dataset=Texts())
    trainer.train()
    changed = [n for n, t in adapted.state_dict().items() if not torch.equal(t, before[n])]
    assert changed and all("lora_" in n for n in changed)


def rank_of_trainer(rank, kind, folder, resume, options):
    trainer = trained(kind, folder, torch.bfloat16, resume=resume, gradient_accumulation_steps=1, per_device_train_batch_size=2, **options)
    optimizer = ours(trainer)
    held = sum(p.session.elements for p in optimizer._shards) if kind is Trainer else 0
    if kind is Trainer:
        optimizer.synchronize()
    return logged(trainer, "loss"), logged(trainer, "grad_norm"), held, weights(trainer.accelerator.unwrap_model(trainer.model))


def test_ranks_refuse_a_second_average(tmp_path):
    with pytest.raises(AssertionError, match="sharding=zero2', but the Trainer's DistributedDataParallel"):
        run(rank_of_trainer, Trainer, str(tmp_path), None, dict(optim_args="sharding=zero2"))


def test_ranks_share_the_state(tmp_path):
    """DistributedDataParallel: each rank has half the state, losses are torch's, and a run goes on to the bit."""
    found = run(rank_of_trainer, Trainer, str(tmp_path / "a"), None, dict(save_strategy="steps", save_steps=3))
    wanted = run(rank_of_trainer, transformers.Trainer, str(tmp_path / "b"), None, {})
    parameters = sum(len(values) for values in found[0][3].values())
    assert [held for _, _, held, _ in found] == [parameters // 2] * 2
    for name in (0, 1):
        assert found[0][name] == pytest.approx(wanted[0][name], rel=0.02)  # torch rounds bf16 weights after each step
    resumed = run(rank_of_trainer, Trainer, str(tmp_path / "c"), str(tmp_path / "a" / "checkpoint-3"), {})
    assert resumed[0][3] == found[0][3] == found[1][3]
