"""ZenFlow: important columns in every step, the others with the mean gradient of several, in one set of moments."""

import contextlib
import copy
import dataclasses
import signal
import subprocess

import numpy as np
import pytest
import torch

import plimsoll.torch
from gpt import GPT, batch, text
from plimsoll.client import Session
from plimsoll.torch import ZenFlow, parameter_arena
from plimsoll.torch.important import Important, Matrix
from plimsoll.torch.selective import Sums
from test_crash import digest, kill_trainer, killed_again_and_again, start_trainer

BOTH_WAYS = True
DATA = text()
LR, BETA1, BETA2, EPS, DECAY = 2e-3, 0.9, 0.99, 1e-8, 0.1
OPTIONS = dict(lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
EVERY = ZenFlow(0.25, "step", 6, update_interval=3, full_warm_up_rounds=2)


def backward(model, i):
    loss = model.loss(batch(DATA, i))
    loss.backward()
    return loss.item()


def zenflow(model, mode=EVERY, **options):
    return plimsoll.torch.AdamW(model.parameters(), model=model, overlap=mode, **{**OPTIONS, **options})


def train(model, optimizer, steps, first=0, parts=1):
    for i in range(first, first + steps):
        for part in range(parts):
            backward(model, parts * i + part)
        optimizer.step()
        optimizer.zero_grad()


def fma(a, b, c):
    return (a.double() * b + c.double()).float()  # rounded twice, which shows in one result of 2^29


class Reference:
    """The definition, in plain torch: each column has one master weight and two moments, wherever it is updated."""

    def __init__(self, model, mode, norms, split):
        self.mode, self.norms, self.split = mode, norms, split
        self.parameters = list(model.parameters())
        self.weights = [p.detach().float().clone() for p in self.parameters]
        self.first = [torch.zeros_like(w) for w in self.weights]
        self.second = [torch.zeros_like(w) for w in self.weights]
        self.sums = [torch.zeros_like(p) for p in self.parameters]
        self.important = None  # of each parameter, whether an element is in an important column
        self.step, self.count, self.late = 0, 0, None
        self.others, self.own = 0, 0

    def update(self, i, gradient, scale, where, lr=LR):
        def constant(x):
            return float(np.float32(x))

        gradient = gradient.float() * constant(scale)
        bias1, bias2 = 1 - BETA1**self.step, 1 - BETA2**self.step
        w, m, v = self.weights[i], self.first[i], self.second[i]
        m_new = fma(gradient, constant(1 - BETA1), m * constant(BETA1))
        v_new = fma(gradient * gradient, constant(1 - BETA2), v * constant(BETA2))
        d = fma(v_new.double().sqrt().float(), constant(1 / bias2**0.5), torch.tensor(constant(EPS)))
        w_new = fma(w, constant(-lr * DECAY), w)
        w_new = fma(m_new / d, constant(-lr / bias1), w_new)
        for old, new in ((w, w_new), (m, m_new), (v, v_new)):
            old[where] = new[where]

    def shown(self, i):
        """Master weights as parameters: the split state rounds half away from zero."""
        if not self.split:
            return self.weights[i].to(self.parameters[i].dtype)
        return ((self.weights[i].view(torch.int32) + 0x8000) & -0x10000).view(torch.float32).bfloat16()

    def show(self, where):
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                p[where[i]] = self.shown(i)[where[i]]

    def select(self, scores):
        self.important = []
        for p, score in zip(self.parameters, scores):
            where = torch.zeros_like(p, dtype=torch.bool)
            if p.dim() == 2:
                where[:, score.topk(max(1, int(p.shape[1] * self.mode.topk_ratio))).indices] = True
            self.important.append(where if p.dim() == 2 else ~where)

    def ends(self, scores):
        mode, after = self.mode, self.step - self.mode.full_warm_up_rounds
        if after <= 0 or mode.selects_every and self.step % mode.selects_every == 0:
            return True
        if mode.update_interval != "auto":
            return after % mode.update_interval == 0
        matrices = [i for i, p in enumerate(self.parameters) if p.dim() == 2]
        own = torch.stack([scores[i][self.important[i][0]].sum() for i in matrices])
        self.others = self.others + (torch.stack([scores[i].sum() for i in matrices]) - own) / (1 - mode.topk_ratio)
        self.own = self.own + own / mode.topk_ratio
        return int((self.others >= self.own / self.count).sum()) >= int(mode.auto_ratio * len(matrices))

    def make(self, gradients, clip=None):
        """A step with the gradients of one or more backward passes."""
        every = [torch.ones_like(p, dtype=torch.bool) for p in self.parameters]
        if self.late is not None:
            self.show(self.late)
            self.late = None
        self.step, mode = self.step + 1, self.mode
        own = [torch.zeros_like(p) for p in self.parameters]
        for i in range(len(self.parameters)):
            for j, of_pass in enumerate(gradients):
                own[i] = of_pass[i] if j == 0 else own[i] + of_pass[i]
                self.sums[i] = of_pass[i].clone() if j == 0 and self.count == 0 else self.sums[i] + of_pass[i]
        scores = [sum(of_pass[i].float().abs().sum(0) for of_pass in gradients) for i in range(len(own))]
        self.count += 1
        after = self.step - mode.full_warm_up_rounds
        if after > 0 and (self.important is None or mode.selects_every and (self.step - 1) % mode.selects_every == 0):
            self.select(scores)
        important = self.important if after > 0 else [~x for x in every]
        ends = self.ends(scores)
        squares = sum(float((g[x].double() ** 2).sum()) for g, x in zip(own, important))
        if ends:
            squares += sum(float((s[~x].double() ** 2).sum()) for s, x in zip(self.sums, important)) / self.count**2
        scale = 1.0
        if clip:
            norm = self.norms[-1]  # ours, which adds up in fp32
            assert norm == pytest.approx(squares**0.5, rel=1e-5)
            scale = min(1.0, clip / (norm + 1e-6))
        for i in range(len(own)):
            self.update(i, own[i], scale, important[i])
        self.show(important)
        if ends:
            self.end(important, scale)
            if after > 0 and mode.overlap_step:
                self.late = [~x for x in important]
            else:
                self.show(every)

    def end(self, important, scale):
        lr = LR * self.count if self.mode.scale_lr else LR
        for i, total in enumerate(self.sums):
            self.update(i, total, scale / self.count, ~important[i], lr)
        self.count, self.others, self.own = 0, 0, 0

    def flush(self):
        if self.count:
            self.end(self.important, 1.0)
        self.important, self.late = None, None
        self.show([torch.ones_like(p, dtype=torch.bool) for p in self.parameters])


def follows(ours, mode, steps, *, parts=1, clip=None, flushes=(), **options):
    """Asserts that our optimizer and the definition give the same bits."""
    theirs = copy.deepcopy(ours)
    optimizer = zenflow(ours, mode, max_grad_norm=clip, **options)
    norms, clipped = [], 0
    split = options.get("state") != "fp32" and next(ours.parameters()).dtype is torch.bfloat16
    reference = Reference(theirs, mode, norms, split)
    for i in range(steps):
        gradients = []
        for part in range(parts):
            backward(ours, parts * i + part)
            backward(theirs, parts * i + part)
            gradients.append([p.grad for p in theirs.parameters()])
            theirs.zero_grad()
        optimizer.step()
        norms.append(optimizer.last_grad_norm)
        clipped += bool(clip) and norms[-1] > clip
        reference.make(gradients, clip)
        assert digest(ours) == digest(theirs), f"step {i}"
        if i in flushes:
            optimizer.synchronize()
            reference.flush()
            assert digest(ours) == digest(theirs), f"step {i}"
    assert not clip or 0 < clipped < steps
    optimizer.synchronize()
    reference.flush()
    assert digest(ours) == digest(theirs)
    state = optimizer.state_dict()["state"]
    for i in range(len(reference.parameters)):
        assert state[i]["step"] == steps
        assert torch.equal(state[i]["exp_avg"], reference.first[i]) and torch.equal(state[i]["exp_avg_sq"], reference.second[i])
        if "master_weights" in state[i]:
            assert torch.equal(state[i]["master_weights"], reference.weights[i])
    return optimizer


def small():
    return GPT(width=16, layers=1)


@pytest.mark.each_choice
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("overlap_step", [True, False])
def test_follows_the_definition(dtype, overlap_step):
    mode = dataclasses.replace(EVERY, overlap_step=overlap_step, scale_lr=overlap_step)
    follows(small().to(dtype), mode, 20)


def test_clips_what_a_step_applies():
    # It ends with an interval: else the last norm would be of no step.
    follows(small(), EVERY, 20, clip=0.5)


@pytest.mark.each_choice
@pytest.mark.parametrize("strategy", [dict(), dict(steps_per_epoch=5), dict(select_strategy="epoch", select_interval=2, steps_per_epoch=4)])
def test_update_interval_auto(strategy):
    follows(small().bfloat16(), ZenFlow(0.25, full_warm_up_rounds=1, auto_ratio=0.8, **strategy), 16)


def test_several_backward_passes():
    follows(small().bfloat16(), EVERY, 9, parts=2)


def test_synchronize_ends_an_interval():
    follows(small().bfloat16(), EVERY, 16, flushes=(1, 3, 9, 10))


def test_other_states():
    follows(small().bfloat16(), EVERY, 9, state="fp32")


@pytest.mark.each_choice
@pytest.mark.parametrize("options", [dict(), dict(overlap="async"), dict(moments="bf16"), dict(overlap=ZenFlow(update_interval=2))])
def test_checkpoints_are_ordinary(tmp_path, options):
    model = small().bfloat16()
    optimizer = zenflow(model)
    train(model, optimizer, 9)
    optimizer.save(tmp_path)
    assert optimizer.saved() == 9
    want = copy.deepcopy(optimizer.state_dict()["state"])
    other = small().bfloat16()
    loaded = plimsoll.torch.AdamW(other.parameters(), model=other, name="other", **{**OPTIONS, **options})
    loaded.load(tmp_path)
    assert loaded.resumed_step == 9 and digest(other) == digest(model)
    train(other, loaded, 3, first=9)
    loaded.save(tmp_path)
    assert loaded.saved() == 12
    optimizer.load(tmp_path)
    assert digest(other) == digest(model)
    train(model, optimizer, 3, first=12)
    assert optimizer.state_dict()["state"][0]["step"] == 15 and want[0]["step"] == 9


def test_state_of_torch():
    """A state_dict goes to torch's optimizer and comes back, in the middle of an interval."""
    model = small()
    optimizer = zenflow(model)
    train(model, optimizer, 6)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    theirs = torch.optim.AdamW(model.parameters(), **OPTIONS)
    theirs.load_state_dict(state)
    train(model, optimizer, 3, first=6)
    first = digest(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(theirs.state_dict())
    train(model, optimizer, 3, first=6)
    assert digest(model) == first
    assert torch.equal(optimizer.state[model.head.weight]["exp_avg"], optimizer.state_dict()["state"][len(state["state"]) - 1]["exp_avg"])


def test_gradients_that_are_not_finite():
    model = small().bfloat16()
    optimizer = zenflow(model, max_grad_norm=1.0)
    train(model, optimizer, 7)  # of an interval from step 6 to 8, of which 6 ends one, as columns are selected in 7
    for i in (8, 7):  # an interval, and a step that selects columns
        before = digest(model)
        backward(model, 0)
        loss = model.loss(batch(DATA, 0)) * float("nan")
        loss.backward()
        optimizer.step()
        assert not np.isfinite(optimizer.last_grad_norm)
        train(model, optimizer, 6)
        assert before != digest(model)
    assert optimizer.skipped == 2 and all(p.isfinite().all() for p in model.parameters())


def test_missing_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16()
    optimizer = zenflow(model)
    optimizer.open()
    x = torch.randn(4, 8).bfloat16()
    model[0](x).float().sum().backward()
    with pytest.raises(RuntimeError, match="2 parameters have no gradient, 1.bias among them"):
        optimizer.step()
    model[1](x).float().sum().backward()
    optimizer.step()
    optimizer.close()
    reference = copy.deepcopy(model)
    lenient = zenflow(model, name="lenient", missing_gradients="zero")
    full = zenflow(reference, name="full")
    for i in range(6):
        model[i % 2](x).float().sum().backward()
        lenient.step()
        reference[i % 2](x).float().sum().backward()
        for p in reference[1 - i % 2].parameters():
            p.grad = torch.zeros_like(p)
        full.step()
    assert digest(model) == digest(reference)
    lenient.step()  # without any gradient
    assert lenient.state_dict()["state"][0]["step"] == 6


def test_zero_grad_discards():
    model = small().bfloat16()
    reference = copy.deepcopy(model)
    optimizer, theirs = zenflow(model), zenflow(reference, name="theirs")
    backward(model, 5)
    optimizer.open()
    optimizer.zero_grad()
    train(model, optimizer, 5)
    train(reference, theirs, 5)
    optimizer.synchronize(), theirs.synchronize()
    assert digest(model) == digest(reference)
    train(model, optimizer, 2)  # an interval ends with step 6
    backward(model, 6)
    with pytest.raises(RuntimeError, match="after optimizer.step"):
        model.state_dict()
    with pytest.warns(UserWarning, match="added to those of 1 steps"):
        optimizer.zero_grad()
    model.state_dict()


@pytest.mark.each_choice
@pytest.mark.parametrize("what", [(Session, "begin"), (Important, "bring"), (Important, "clear_sums"), (Matrix, "choose")])
def test_an_interrupt_in_a_step(monkeypatch, what):
    """The step is made all the same, or not begun, and the program goes on."""
    model = small().bfloat16()
    undisturbed = copy.deepcopy(model)
    optimizer, theirs = zenflow(model, max_grad_norm=0.5), zenflow(undisturbed, max_grad_norm=0.5, name="theirs")
    train(undisturbed, theirs, 12)
    method, interrupts = getattr(*what), []

    def interrupted(*arguments, **options):
        if not interrupts:
            interrupts.append(signal.raise_signal(signal.SIGINT))
        return method(*arguments, **options)

    for i in range(12):
        with monkeypatch.context() as patch:
            if i > 3:
                patch.setattr(*what, interrupted)
            backward(model, i)
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step()
            optimizer.zero_grad()
    assert interrupts
    optimizer.synchronize(), theirs.synchronize()
    assert digest(model) == digest(undisturbed)


def test_an_interrupt_at_the_end_of_an_interval(monkeypatch):
    model = small().bfloat16()
    undisturbed = copy.deepcopy(model)
    optimizer, theirs = zenflow(model), zenflow(undisturbed, name="theirs")
    train(model, optimizer, 4), train(undisturbed, theirs, 4)
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "clear", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            optimizer.synchronize()
    optimizer.synchronize(), theirs.synchronize()
    assert digest(model) == digest(undisturbed)


def test_an_interrupt_in_a_backward_pass(monkeypatch):
    model = small().bfloat16()
    optimizer = zenflow(model)
    train(model, optimizer, 4)
    with monkeypatch.context() as patch:
        patch.setattr(Important, "take", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            backward(model, 4)
    with pytest.warns(UserWarning, match="added to those of 2 steps"):
        optimizer.zero_grad()


def test_gradients_that_are_taken_in_the_step():
    model = small().bfloat16()
    reference = copy.deepcopy(model)
    optimizer, theirs = zenflow(model, gradients="step"), zenflow(reference, name="theirs")
    for i in range(8):
        for m, o in ((model, optimizer), (reference, theirs)):
            o.open()
            backward(m, i)
            assert all((p.grad is None) == (o is theirs) for p in m.parameters())
            o.step()
            assert all(p.grad is None for p in m.parameters())
    optimizer.synchronize(), theirs.synchronize()
    assert digest(model) == digest(reference)


def test_weights_are_changed():
    model = small().bfloat16()
    optimizer = zenflow(model)
    train(model, optimizer, 7)
    optimizer.synchronize()
    with torch.no_grad():
        model.head.weight.clamp_(-0.02, 0.02)
    changed = model.head.weight.detach().clone()
    backward(model, 7)
    optimizer.step()
    assert (model.head.weight - changed).abs().max() < 0.02
    with torch.no_grad():
        model.head.weight.clamp_(-0.01, 0.01)
    backward(model, 8)
    with pytest.raises(RuntimeError, match="head.weight among them.*synchronize"):
        optimizer.step()


@pytest.mark.parametrize("options, message", [
    (dict(topk_ratio=1.0), "topk_ratio is 1.0: expected a number between 0 and 1"),
    (dict(select_strategy="often"), "expected 'auto', 'step' or 'epoch'"),
    (dict(select_strategy="step"), "select_interval is 'auto': expected a number"),
    (dict(select_interval=3), "select_interval is 3: expected 'auto'"),
    (dict(update_interval=0), "update_interval is 0: expected 'auto' or a whole number"),
    (dict(select_strategy="step", select_interval=2, update_interval=4), "every 2 steps, and update_interval is 4"),
    (dict(full_warm_up_rounds=-1), "expected a whole number"),
    (dict(overlap_step="yes"), "expected True or False"),
    (dict(steps_per_epoch=0), "expected None or a whole number from 1 on"),
    (dict(auto_ratio=2), "expected 0 to 1"),
])
def test_refuses_settings(options, message, way):
    with pytest.raises(ValueError, match=message):
        ZenFlow(**options)


def test_refuses_what_it_cannot_do():
    model = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match="model is None"):
        plimsoll.torch.AdamW(model.parameters(), overlap=EVERY)
    with pytest.raises(ValueError, match="made for AdamW and Adam"):
        plimsoll.torch.SGD(model.parameters(), model=model, overlap=EVERY)
    with pytest.raises(ValueError, match="moments is 'int8'"):
        zenflow(model, moments="int8")
    with pytest.raises(ValueError, match="expected no sharding"):
        zenflow(model, sharding="zero2")
    with pytest.raises(ValueError, match="weight is float16"):
        zenflow(copy.deepcopy(model).half()).open()
    with pytest.raises(ValueError, match="is not contiguous"):
        zenflow(torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)).open()
    optimizer = zenflow(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    with pytest.raises(RuntimeError, match="without a GradScaler"):
        scaler.step(optimizer)


def test_deepspeeds_section(tmp_path, way):
    section = dict(topk_ratio=0.05, select_strategy="epoch", select_interval=2, update_interval=4, full_warm_up_rounds=3)
    config = {"zero_optimization": {"stage": 2, "zenflow": {**section, "auto_ratio": 0.9, "offload": True}}}
    assert ZenFlow.from_deepspeed(config, 10) == ZenFlow(0.05, "epoch", 2, 4, 3, False, 10, 0.9)
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"zenflow": {"overlap_step": true}}}')
    assert ZenFlow.from_deepspeed(path) == ZenFlow(overlap_step=True)
    for found, message in (
        ({"zero_optimization": {"stage": 2}}, "zenflow is None: expected a section"),
        ({"zero_optimization": {"zenflow": {"offload": False}}}, "offload is false: the moments"),
        ({"zero_optimization": {"zenflow": {"pt_reserved_cores_perc": 0.5}}}, "pt_reserved_cores_perc is 0.5: plimsoll run"),
        ({"zero_optimization": {"zenflow": {"topk": 0.1}}}, "zenflow has topk: expected some of"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 3}}}, "zenflow: topk_ratio is 3: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            ZenFlow.from_deepspeed(found)


def big_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.Linear(2000, 1000)).bfloat16()


def big_train(model, optimizer, steps, begun=lambda: None):
    for i in steps:
        x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(i)).bfloat16()
        model(x).float().square().mean().backward()
        if i % 2:
            begun()
        optimizer.step()
        optimizer.zero_grad()
        begun()
    optimizer.synchronize()


@pytest.mark.first_way
def test_service_is_killed(service, monkeypatch):
    """In updates of important columns and of all others, in moves of columns, and while gradients come."""
    monkeypatch.setattr(parameter_arena, "_BLOCK_BYTES", 1 << 18)  # the blocks of tests are small, and this network is not
    mode = ZenFlow(0.1, "step", 4, update_interval=2, full_warm_up_rounds=2)
    undisturbed, model = big_network(), big_network()
    optimizer = zenflow(model, mode, max_grad_norm=0.5, socket=service.socket)
    optimizer.open()
    with killed_again_and_again(service, 1, within=0.1) as killer:
        big_train(model, optimizer, killer.steps(), killer.begun)
    big_train(undisturbed, zenflow(undisturbed, mode, max_grad_norm=0.5, name="undisturbed"), range(killer.made))
    assert digest(model) == digest(undisturbed)


def train_on(steps):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = small().bfloat16()
    optimizer = zenflow(model)
    begin = optimizer.resumed_step
    for i in range(begin, steps):
        print("step", i, flush=True)
        backward(model, i)
        optimizer.step()
    return (begin,)


@pytest.mark.first_way
@pytest.mark.parametrize("step, begins", [(1, 1), (6, 0)])
def test_trainer_is_killed(service, step, begins, way):
    """In the warm-up another trainer goes on. Later only the trainer knows which columns are where: the next begins anew."""
    if way == "copied":
        pytest.skip("the trainers are processes of their own, which share")
    kill_trainer(start_trainer(service, "test_zenflow.train_on(10**9)"), f"step {step}")
    process = start_trainer(service, "test_zenflow.train_on(12)", stderr=subprocess.PIPE)
    out, warned = process.communicate()
    begin = int(out.split()[-1])
    assert begin >= begins and ("Training begins anew" in warned) == (begin == 0)
