"""overlap="backward" with clipping and GradScaler: steps begin before their norm is known, and have the bits of steps that wait."""

import os

import pytest
import torch

from gpt import GPT, batch
from plimsoll.client import Session
from plimsoll.errors import PlimsollError
from plimsoll.torch import gradient_arena
from plimsoll.torch.speculation import Speculation, exposed
from test_crash import digest, kill_worker
from test_optimizer import backward, network
from test_overlap import DATA, gpt
from test_overlap_backward import die, die_in_child, has_begun, layers, make, step, wide

BOTH_WAYS = True
STEPS = int(os.environ.get("PLIMSOLL_OVERLAP_STEPS", 60))


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Every step speculates, however long it takes, and the service hears of every gradient at once."""
    monkeypatch.setattr(gradient_arena, "_READY_BYTES", 64)
    monkeypatch.setattr(Speculation, "is_worthwhile", lambda self: not self.is_unscaled)


@pytest.fixture
def decided(monkeypatch):
    """What was decided: whether each step that speculated was made as it had begun, made again or skipped."""
    begun, found = {}, []
    begin, decide = Session.begin, Session.decide

    def note_begin(self, grad_scale, *arguments, **options):
        begun[self] = grad_scale
        return begin(self, grad_scale, *arguments, **options)

    def note(self, grad_scale):
        found.append("skipped" if grad_scale is None else "made" if grad_scale == begun[self] else "again")
        return decide(self, grad_scale)

    monkeypatch.setattr(Session, "begin", note_begin)
    monkeypatch.setattr(Session, "decide", note)
    return found


def state_of(model, optimizer):
    state = optimizer.state_dict()["state"]  # waits
    return digest(model), [v.tolist() if torch.is_tensor(v) else v for s in state.values() for v in s.values()]


MODELS = {
    "AdamW": ("AdamW", torch.bfloat16, {}),
    "AdamW, fp32 masters": ("AdamW", torch.bfloat16, dict(state="fp32")),
    "AdamW fp32": ("AdamW", torch.float32, {}),
    "Adam with a penalty": ("Adam", torch.bfloat16, dict(weight_decay=0.1)),
}


@pytest.mark.each_choice
@pytest.mark.parametrize("share", [0, 1, 10, 50, 100])
@pytest.mark.parametrize("named", MODELS)
@pytest.mark.parametrize("breaks", [False, True])
def test_same_bits(named, share, breaks, decided):
    """A share of the steps is clipped, in percent, and with ``breaks`` one in a hundred has gradients that are not finite."""
    name, dtype, options = MODELS[named]
    found = []
    for overlap in (None, "backward"):
        model = gpt(dtype)
        model.head.weight = model.tokens.weight  # tied
        optimizer = make(model, overlap, name, max_grad_norm=1e6, lr=1e-3, **options)
        norms = []
        for i in range(STEPS):
            for j in range(2):  # accumulation
                factor = float("inf") if breaks and j and i % 100 == 41 else 1
                (factor * model.loss(batch(DATA, 2 * i + j))).backward()
            optimizer.max_grad_norm = 1e-2 if i * 37 % 100 < share else 1e6
            step(optimizer)
            norms.append(repr(optimizer.last_grad_norm))  # a NaN is equal to itself
        found.append((norms, optimizer.skipped, state_of(model, optimizer)))
    assert found[0] == found[1]
    again = decided.count("again")
    assert len(decided) >= STEPS - 3 and abs(again - share * STEPS / 100) <= 3 + share * STEPS / 1000
    assert decided.count("skipped") == optimizer.skipped == (STEPS + 58) // 100 * breaks


@pytest.mark.each_choice
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_scaler_skips_steps(dtype, decided):
    found = []
    for overlap in (None, "backward"):
        model = network(dtype)
        optimizer = make(model, overlap, max_grad_norm=0.3, eps=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=25)
        for i in range(2 * STEPS):
            scaler.scale(backward_loss(model, i) * (float("inf") if i % 50 == 20 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((optimizer.skipped, scaler.get_scale(), state_of(model, optimizer)))
    assert found[0] == found[1]
    assert found[0][0] >= 2 and {"skipped", "again"} <= set(decided)


def backward_loss(model, i):
    x = torch.randn(8, model[0].in_features, generator=torch.Generator().manual_seed(i)).to(model[0].weight.dtype)
    return model(x).float().square().mean()


def test_a_scaler_that_divides_gradients_makes_steps_wait(decided):
    found = []
    for overlap in (None, "backward"):
        model = network(torch.float32)
        optimizer = make(model, overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for i in range(6):
            scaler.scale(backward_loss(model, i)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(state_of(model, optimizer))
    assert found[0] == found[1] and not decided


def test_missing_gradients_do_not_count_for_the_norm(decided):
    """The arena still has those of the step before."""
    found = []
    for overlap in (None, "backward"):
        model = layers()
        optimizer = make(model, overlap, max_grad_norm=1e-3)
        norms = []
        for i in range(8):
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(i)).bfloat16()
            (model[1:] if i % 2 else model)(x).float().square().mean().backward()
            step(optimizer)
            norms.append(optimizer.last_grad_norm)
        found.append((norms, state_of(model, optimizer)))
    assert found[0] == found[1] and decided


# What takes a step back


@pytest.mark.parametrize("how", ["zero_grad", "synchronize", "load_state_dict", "close"])
def test_a_step_that_has_begun_is_retracted(how, decided):
    found = []
    for overlap in (None, "backward"):
        model = layers()
        optimizer = make(model, overlap, max_grad_norm=0.5)
        for i in range(12):
            wide(model, i)
            step(optimizer)
        before = state_of(model, optimizer)
        wide(model, 50)
        assert overlap is None or has_begun(optimizer)
        if how == "close":
            optimizer.close()
            found.append(digest(model))
            assert found[-1] == before[0]
            continue
        {"zero_grad": optimizer.zero_grad, "synchronize": optimizer.synchronize,
         "load_state_dict": lambda: optimizer.load_state_dict(optimizer.state_dict())}[how]()
        assert state_of(model, optimizer) == before
        if how == "load_state_dict":
            optimizer.zero_grad()
        if how == "synchronize":
            step(optimizer)  # with the gradients that are there
        for i in range(12, 16):
            wide(model, i)
            step(optimizer)
        found.append(state_of(model, optimizer))
    assert found[0] == found[1] and "skipped" in decided


@pytest.mark.parametrize("at_step", [True, False])
def test_changed_gradients_are_found(at_step, tmp_path):
    model = layers()
    optimizer = make(model, max_grad_norm=1e-3)
    for i in range(12):
        wide(model, i)
        step(optimizer)
    optimizer.save(tmp_path)
    optimizer.saved()
    wide(model, 12)
    model[4].weight.grad.mul_(2)
    for call in (optimizer.step, optimizer.zero_grad, optimizer.synchronize) if at_step else (optimizer.zero_grad, optimizer.step):
        with pytest.raises(RuntimeError, match="the gradient of parameter 4.weight was changed after it was accumulated"):
            call()
    optimizer.load(tmp_path)
    model.zero_grad()
    wanted = layers()
    serial = make(wanted, None, max_grad_norm=1e-3)
    for i in range(12):
        wide(wanted, i)
        step(serial)
    for i in range(12, 16):
        for trained, by in ((model, optimizer), (wanted, serial)):
            wide(trained, i)
            step(by)
    assert state_of(model, optimizer) == state_of(wanted, serial)


# Deaths


@pytest.mark.parametrize("when", ["in the backward pass", "before it is decided", "after it was decided"])
def test_the_service_is_killed(when, service, monkeypatch):
    wanted, model = layers(), layers()
    serial, optimizer = make(wanted, None, max_grad_norm=1e6), make(model, socket=service.socket, max_grad_norm=1e6)
    killed = 0

    def kill():
        nonlocal killed
        killed += has_begun(optimizer) and bool(kill_worker(service))

    decide = Session.decide

    def decide_and_kill(self, grad_scale):
        if when == "before it is decided":
            kill()
        request = decide(self, grad_scale)
        if when == "after it was decided":
            kill()
        return request

    monkeypatch.setattr(Session, "decide", decide_and_kill)
    for i in range(16):
        serial.max_grad_norm = optimizer.max_grad_norm = 1e-2 if i % 2 else 1e6
        wide(wanted, i)
        step(serial)
        wide(model, i, kill if when == "in the backward pass" and i % 3 else lambda: None)
        step(optimizer)
    assert state_of(model, optimizer) == state_of(wanted, serial) and killed >= 6


@pytest.mark.parametrize("when", ["in the backward pass", "before it is decided"])
def test_the_trainer_is_killed(when, service):
    """The next one goes on from the step before, of which nothing is lost."""

    def trained(count, socket, at=-1, overlap="backward"):
        model = layers()
        optimizer = make(model, overlap, socket=socket, max_grad_norm=1e-2)
        first = optimizer.resumed_step
        for i in range(first, count):
            wide(model, i, lambda i=i: die() if i == at and when == "in the backward pass" else None)
            if i == at:
                Session.decide = lambda *_: die()
            step(optimizer)
        return first, state_of(model, optimizer)

    die_in_child(lambda: trained(16, service.socket, at=11))
    first, found = trained(16, service.socket)
    assert first == 11 and found == trained(16, None, overlap=None)[1]


def test_the_trainer_is_killed_between_parts(service, way):
    """One part has the verdict, and the other goes back: the next trainer says so."""

    def program():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256).bfloat16())
        return model, make(model, socket=service.socket, max_grad_norm=1e-2)

    def run(model, optimizer):
        for i in range(5):
            model[1](model[0](torch.ones(2, 256)).bfloat16()).float().square().sum().backward()
            if i == 3:
                decide = Session.decide
                Session.decide = lambda s, scale: die() if "fp32" in s.document["part"] else s.result(decide(s, scale))
            step(optimizer)

    die_in_child(lambda: run(*program()))
    with pytest.raises(PlimsollError, match="at different steps .3, 4., and not all prepared the last one"):
        program()[1].open()


# Whether it pays


def test_exposed():
    """The closed forms of docs/overlap.md."""
    assert exposed(3, 6, 1, 2, 0) == 0 and exposed(4, 8, 1, 2, 0) == 1
    assert exposed(3, 6, 1, 2, 0.25) == pytest.approx(0.25 * 5)


@pytest.fixture
def real(monkeypatch):
    monkeypatch.undo()


def after(share, update=3.0, speculating=3.0):
    """What is known after many steps: forward passes took 1 s, backward passes 2 s."""
    s = Speculation()
    s._forward, s._backward = 1.0, 2.0
    for i in range(300):
        s.learn(1.0, False, False, i * 37 % 100 < share)
    s._update = {False: update, True: speculating}
    s._waited = 0
    return s


@pytest.mark.parametrize(
    "share, update, speculating, pays",
    [(0, 3.0, 3.0, True), (10, 3.0, 3.0, True), (60, 3.0, 3.0, False), (0, 1.0, 1.0, False), (0, 3.0, 6.0, False), (100, 9.0, 9.0, False)],
)
def test_speculation_pays_while_few_steps_are_clipped(share, update, speculating, pays, real):
    s = after(share, update, speculating)
    assert s.is_worthwhile() == pays
    for _ in range(64):
        s.stepped(False)
    assert s.is_worthwhile() == (share <= 50)  # it is tried again


def test_speculation_stops_where_it_cannot_be_right(real):
    s = after(20)
    s.stepped(True)
    assert s.is_worthwhile()
    s.learn(1.0, False, False, True)
    s.updated(50.0)  # a step that was made again took long
    assert not s.is_worthwhile()
    s = after(0)
    s.learn(0.5, True, False, True)  # skipped: the next scale is another
    assert not s.is_worthwhile()
    s.learn(0.5, True, False, False)
    assert s.is_worthwhile()
    s.learn(0.5, True, True, False)  # GradScaler.unscale_
    assert not s.is_worthwhile()
