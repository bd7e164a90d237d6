"""Checkpoints of the optimizer's state beside those of the Trainer."""

import json
import os
import shutil

import pytest
import torch

import plimsoll.torch
from plimsoll import PlimsollError

transformers = pytest.importorskip("transformers")

from plimsoll.transformers import CheckpointCallback  # noqa: E402
from test_trainer import Texts, model  # noqa: E402


def trainer_of(made, optimizer, directory, callbacks, steps=8, **options):
    arguments = dict(save_strategy="steps", save_steps=2, max_steps=steps, per_device_train_batch_size=4, max_grad_norm=0.5)
    arguments.update(logging_steps=1, report_to=[], use_cpu=True, seed=0, lr_scheduler_type="linear", disable_tqdm=True, **options)
    arguments = transformers.TrainingArguments(output_dir=str(directory), **arguments)
    data = dict(train_dataset=Texts(), eval_dataset=Texts(8))
    return transformers.Trainer(made, arguments, optimizers=(optimizer, None), callbacks=callbacks, **data)


def begin(directory, *callbacks, sharding=None, **options):
    made = model(torch.bfloat16)
    optimizer = plimsoll.torch.AdamW(made.parameters(), lr=1e-2, model=made, sharding=sharding)
    return made, optimizer, trainer_of(made, optimizer, directory, list(callbacks), **options)


def losses(trainer):
    return {h["step"]: h["loss"] for h in trainer.state.log_history if "loss" in h}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training from end to end, and its checkpoints."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("whole")
    made, _, trainer = begin(directory, CheckpointCallback())
    trainer.train()
    return directory, losses(trainer), [p.detach().clone() for p in made.parameters()]


@pytest.fixture
def saved(whole, tmp_path):
    directory = tmp_path / "out"
    shutil.copytree(whole[0], directory)
    return directory


@pytest.mark.parametrize("background", [False, True])
def test_goes_on_from_a_checkpoint(whole, saved, background):
    """To the bit, the low bits of the master weights included."""
    for number in (6, 8):
        shutil.rmtree(saved / f"checkpoint-{number}")
    made, optimizer, trainer = begin(saved, CheckpointCallback(background))
    trainer.train(resume_from_checkpoint=True)
    assert optimizer.resumed_step == 4
    assert {step: loss for step, loss in losses(trainer).items() if step > 4} == {s: x for s, x in whole[1].items() if s > 4}
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), whole[2]))
    assert sorted(os.listdir(saved / "checkpoint-8" / "plimsoll")) == ["step-00000008"]


def test_the_trainers_own_file_has_no_state(whole):
    state = torch.load(whole[0] / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert state["state"] == {} and state["param_groups"][0]["lr"] < 1e-2
    assert (whole[0] / "checkpoint-4" / "optimizer.pt").stat().st_size < 8192
    assert (whole[0] / "checkpoint-4" / "scheduler.pt").is_file()


@pytest.mark.parametrize("background", [False, True])
def test_old_checkpoints_are_removed(tmp_path, background):
    _, optimizer, trainer = begin(tmp_path, CheckpointCallback(background), save_total_limit=1)
    trainer.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-8"]
    assert os.listdir(tmp_path / "checkpoint-8" / "plimsoll") == ["step-00000008"]
    assert len(optimizer.state_dict()["state"]) > 0  # as ever when training is over


def test_with_the_best_model(tmp_path):
    options = dict(eval_strategy="steps", eval_steps=2, save_total_limit=1, load_best_model_at_end=True)
    begin(tmp_path, CheckpointCallback(background=True), **options)[2].train()
    for name in os.listdir(tmp_path):
        assert len(os.listdir(tmp_path / name / "plimsoll")) == 1


def test_checkpoints_that_are_elsewhere(whole, tmp_path):
    elsewhere = str(whole[0] / "checkpoint-4")
    _, _, trainer = begin(tmp_path / "another", CheckpointCallback())
    with pytest.raises(PlimsollError, match="training cannot go on from .*another/checkpoint-4, which has no complete state"):
        trainer.train(resume_from_checkpoint=elsewhere)
    made, _, trainer = begin(tmp_path / "another", CheckpointCallback(resume_from_checkpoint=elsewhere))
    trainer.train(resume_from_checkpoint=elsewhere)
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), whole[2]))


def test_the_state_of_another_training_is_noticed(whole, tmp_path):
    made, _, trainer = begin(tmp_path, CheckpointCallback(), learning_rate=1e-3)
    trainer.train()
    _, _, trainer = begin(tmp_path, CheckpointCallback())
    with pytest.raises(PlimsollError, match="was not saved with the checkpoint that the Trainer has loaded"):
        trainer.train(resume_from_checkpoint=str(whole[0] / "checkpoint-4"))


def test_a_save_that_was_broken_off(saved):
    """The program was killed after the Trainer had its files."""
    newest = saved / "checkpoint-8" / "plimsoll"
    [step] = os.listdir(newest)
    os.rename(newest / step, newest / "unfinished")
    _, _, trainer = begin(saved, CheckpointCallback(), steps=10)
    with pytest.raises(PlimsollError, match="training cannot go on from .*checkpoint-8.* a complete state: .*checkpoint-6") as failure:
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-8," not in str(failure.value).split("a complete state: ")[1]


def test_without_the_callback_no_step_is_made(saved):
    """Moments of zero would be a silent mistake."""
    made, optimizer, trainer = begin(saved, steps=10)
    with pytest.raises(RuntimeError, match="give the Trainer that callback, or call optimizer.load"):
        trainer.train(resume_from_checkpoint=True)
    optimizer.load(saved / "checkpoint-8" / "plimsoll")
    assert optimizer.resumed_step == 8 and optimizer.awaits_state is None


def test_from_a_checkpoint_of_the_trainer_alone(tmp_path):
    _, _, trainer = begin(tmp_path, steps=4)
    trainer.train()
    made, optimizer, trainer = begin(tmp_path, CheckpointCallback(), steps=6)
    trainer.train(resume_from_checkpoint=True)
    assert optimizer.state[next(made.parameters())]["step"] == 6
    assert os.listdir(tmp_path / "checkpoint-6" / "plimsoll") == ["step-00000006"]


def test_state_that_is_divided(tmp_path):
    """The Trainer cannot save it, and need not."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        _, _, trainer = begin(tmp_path / "out", CheckpointCallback(), sharding="zero1", steps=4)
        trainer.train()
        made, optimizer, trainer = begin(tmp_path / "out", CheckpointCallback(), sharding="zero1", steps=6)
        trainer.train(resume_from_checkpoint=True)
        assert optimizer.resumed_step == 4
    finally:
        dist.destroy_process_group()


def test_another_optimizer_is_refused(tmp_path):
    made = model(torch.float32)
    trainer = trainer_of(made, torch.optim.AdamW(made.parameters()), tmp_path, [CheckpointCallback()])
    with pytest.raises(ValueError, match="the Trainer's optimizer is a AdamW: expected one of plimsoll.torch"):
        trainer.train()


def test_the_steps_of_both_are_noted(whole):
    [manifest] = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(whole[0] / "checkpoint-6" / "plimsoll")
        for name in names
        if name.endswith(".manifest.json") or name.endswith(".json") and "rank" in name
    ]
    assert json.load(open(manifest))["training"]["trainer_step"] == 6
