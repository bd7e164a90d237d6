"""overlap="forward": the update goes on behind the next forward pass, with the bits of steps that are awaited."""

import contextlib
import copy
import gc
import os
import pathlib
import pickle
import signal
import sys
import threading
import time

import pytest
import torch
from torch.nn import functional as F

import plimsoll.torch
from gpt import GPT, batch, text
from plimsoll import connection
from plimsoll.client import Session
from plimsoll.torch import parameter_arena
from test_crash import digest, kill_worker, workers
from test_fork import in_child
from test_optimizer import assert_same, backward, network, train

BOTH_WAYS = True
DATA = text()


def make(model, overlap, name="AdamW", **options):
    options = {"lr": 1e-3, "max_grad_norm": 1e6, **options}
    return getattr(plimsoll.torch, name)(model.parameters(), model=model, overlap=overlap, **options)


def gpt(dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    return GPT(**options).to(dtype)


def steps(model, optimizer, count, first=0):
    """Trains, and clips every tenth step."""
    losses = []
    for i in range(first, first + count):
        loss = model.loss(batch(DATA, i))
        losses.append(loss.item())
        loss.backward()
        optimizer.max_grad_norm = 0.3 if i % 10 == 5 else 1e6
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture
def strict(monkeypatch):
    """Nothing is there before somebody has waited for it, however fast the update is."""
    monkeypatch.setenv("PLIMSOLL_CHECK_OVERLAP", "1")


def underway(optimizer):
    return optimizer._overlap._arrivals.are_underway


FORMATS = {
    "AdamW": ("AdamW", torch.bfloat16, {}),
    "AdamW fp32 state, bf16 moments": ("AdamW", torch.bfloat16, dict(state="fp32", moments="bf16")),
    "AdamW int8 moments": ("AdamW", torch.bfloat16, dict(moments="int8")),
    "AdamW masters of 24 bits": ("AdamW", torch.bfloat16, dict(state="split24", moments="int8")),
    "AdamW fp16": ("AdamW", torch.float16, dict(eps=1e-4)),
    "AdamW fp32": ("AdamW", torch.float32, {}),
    "Adam": ("Adam", torch.float32, dict(moments="bf16", weight_decay=0.1)),
    "Lion": ("Lion", torch.bfloat16, dict(lr=1e-4, moments="bf16")),
    "Adagrad": ("Adagrad", torch.bfloat16, dict(lr=1e-2)),
    "SGD": ("SGD", torch.bfloat16, dict(lr=1e-2, momentum=0.9, state="fp32")),
}


@pytest.mark.each_choice
@pytest.mark.parametrize("named", FORMATS)
def test_same_bits(named, strict):
    name, dtype, options = FORMATS[named]
    count = int(os.environ.get("PLIMSOLL_OVERLAP_STEPS", 20))
    found = []
    for overlap in (None, "forward"):
        model = gpt(dtype)
        optimizer = make(model, overlap, name, **options)
        losses = steps(model, optimizer, count)
        assert overlap is None or underway(optimizer)
        found.append((losses, optimizer.state_dict()["state"], digest(model)))
        assert model.loss(batch(DATA, 0)) < losses[0]
    (losses, state, bits), (overlapped, other, same) = found
    assert losses == overlapped and bits == same
    torch.testing.assert_close(state, other, rtol=0, atol=0)


def is_stopped(pid):
    """Whether no thread of a process runs."""
    try:
        lines = [(task / "stat").read_text() for task in pathlib.Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return {line.rpartition(")")[2].split()[0] for line in lines} == {"T"}


def stop(service, seconds, ends=None):
    """The service stands still from now on: no update goes on. Returns what waits until it goes on, which it does after
    some seconds or when the event ``ends`` is set.
    """
    pids, ends = workers(service), ends or threading.Event()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def go_on():
        ends.wait(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    deadline = time.monotonic() + 120
    while not all(map(is_stopped, pids)):  # one thread takes the signal: until it runs, the others go on
        if time.monotonic() > deadline:
            ends.set()
            go_on()
            pytest.fail("the service does not stand still")
        time.sleep(0.001)
    thread = threading.Thread(target=go_on)
    thread.start()
    return thread.join


@pytest.fixture
def begins_late(service, monkeypatch):
    """Makes one step of which the service has not begun the update when step() returns."""

    def late(step, seconds, ends=None):
        begin, waits = Session.begin, []

        def stop_and_begin(*arguments, **options):
            waits.append(stop(service, seconds, ends))
            return begin(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Session, "begin", stop_and_begin)
            patch.setattr(Session, "begun", lambda *_: 0.0)
            step()
        return waits[0]

    return late


@pytest.fixture
def large_blocks(monkeypatch):
    monkeypatch.setattr(parameter_arena, "_BLOCK_BYTES", 1 << 20)


def test_forward_waits_while_the_service_stands_still(service, begins_late, monkeypatch):
    goes_on, receive, found = threading.Event(), connection._receive, []
    for overlap in (None, "forward"):
        model = gpt()
        optimizer = make(model, overlap, socket=service.socket)
        losses = steps(model, optimizer, 2)
        model.loss(batch(DATA, 2)).backward()
        goes_on.clear()
        wait = begins_late(optimizer.step, 60, goes_on) if overlap else optimizer.step()
        assert not overlap or all(map(is_stopped, workers(service)))
        optimizer.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(connection, "_receive", lambda socket: goes_on.set() or receive(socket))
            losses += steps(model, optimizer, 1, 3)
        if overlap:
            assert goes_on.is_set()
            wait()
        optimizer.synchronize()
        found.append((losses, digest(model)))
        optimizer.close(give_back=True)
    assert found[0] == found[1]


def test_modules_wait_for_their_own_parameters(strict):
    model = network()
    optimizer = make(model, "forward")
    train(model, optimizer, 2)
    missing = optimizer._overlap._arrivals.missing
    seen = []
    model[1].register_forward_pre_hook(lambda *_: seen.append([missing(p) is None for p in model.parameters()]))
    model(torch.ones(1, 16))
    assert seen == [[True, True, False, False]] and not underway(optimizer)


class Sent:
    """The ranges that a session was asked for."""

    def __init__(self, monkeypatch):
        self.waits, self.orders = [], []
        wait, order = Session.wait, Session.order
        monkeypatch.setattr(Session, "wait", lambda s, *a: self.waits.append(a) or wait(s, *a))
        monkeypatch.setattr(Session, "order", lambda s, ranges: self.orders.append(list(ranges)) or order(s, ranges))


def test_updates_come_in_the_order_of_the_forward_pass(monkeypatch):
    class Reversed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.layer = torch.nn.Linear(4, 2), torch.nn.Linear(4, 4)
            self.tokens, self.bare = torch.nn.Embedding(8, 4), torch.nn.Parameter(torch.ones(4))
            self.outer = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.head(self.layer(self.tokens(x)) @ self.outer.weight * self.bare)

    torch.manual_seed(0)
    model, sent = Reversed(), Sent(monkeypatch)
    optimizer = make(model, "forward")
    for _ in range(2):
        model(torch.arange(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # bare 4, head 8 + 2, layer 16 + 4, tokens 32, outer 16: what no module waits for goes first, and embeddings last
    assert sent.orders == [[(66, 16), (0, 4), (14, 20), (4, 10), (34, 32)]]


# Embeddings


class Words(torch.nn.Module):
    """A large embedding: whole, tied to the head, or also read by hand."""

    def __init__(self, kind, vocabulary=40000, width=32):
        torch.manual_seed(0)
        super().__init__()
        self.kind = kind
        self.tokens, self.layer = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocabulary if kind == "tied" else 16, bias=False)
        if kind == "tied":
            self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.layer(self.tokens(x))
        if self.kind == "by hand":
            return x @ self.tokens.weight.T[:, :16] if self.training else x
        return self.head(x)

    def loss(self, i):
        ids = torch.randint(len(self.tokens.weight), (6,), generator=torch.Generator().manual_seed(i))
        return self(ids).float().square().mean()


@pytest.mark.each_choice
@pytest.mark.parametrize("kind", ["own", "tied", "by hand"])
def test_rows_of_embeddings_go_first(kind, strict, monkeypatch):
    found = []
    for overlap in (None, "forward"):
        model = Words(kind)
        if kind == "by hand":
            del model.head
        optimizer = make(model, overlap)
        sent = Sent(monkeypatch) if overlap else None
        for i in range(5):
            if overlap and i:
                del sent.waits[:]
                model(torch.tensor([5, 6, 39999]))
                # The two rows at the beginning are in one range. By hand, the step has waited for all of them.
                rows = [] if kind == "by hand" else [(5 * 32, 2 * 32), (39999 * 32, 32)]
                assert sent.waits[:2] == rows or (kind == "by hand" and sent.waits[0][0] >= 40000 * 32)
                assert (optimizer._overlap._arrivals.missing(model.tokens.weight) is None) == (kind != "own")
            model.loss(i).backward()
            assert not (overlap and i) or optimizer._overlap._arrivals.missing(model.tokens.weight) is None
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        found.append(digest(model))
        optimizer.close()
    assert found[0] == found[1]


def test_an_embedding_that_is_read_by_hand_later_is_refused():
    model = Words("own")
    optimizer = make(model, "forward")
    for i in range(3):
        model.loss(i).backward()
        optimizer.step()
        optimizer.zero_grad()
    (model.loss(3) + model.tokens.weight.square().sum()).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter tokens.weight got a gradient, but .*zero_grad"):
            optimizer.step()
    optimizer.zero_grad()
    (model.loss(3) + model.tokens.weight.square().sum()).backward()
    optimizer.step()
    assert optimizer._overlap._arrivals.missing(model.tokens.weight) is None


# Parameters that no hook waits for


class ByParents(torch.nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
        self.inner, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
        self.loose = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(16))])
        self.by_hand = True

    def forward(self, x):
        x = self.layer(self.attention(x, x, x)[0])
        x = F.linear(x, self.inner.weight, self.inner.bias) if self.by_hand else self.inner(x)
        return self.head(x * self.loose[0])


def parents(overlap, prepare=lambda model: model, count=6):
    model = ByParents()
    used = prepare(model)
    optimizer = make(model, overlap, lr=1e-2)
    for i in range(count):
        used(torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(i))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        out = used(torch.ones(3, 2, 16))
    return out, digest(model), optimizer


def test_parameters_that_parents_read(strict):
    out, bits, _ = parents(None)
    same, others, optimizer = parents("forward")
    assert torch.equal(out, same) and bits == others
    slots = optimizer._overlap._uses.at_step
    assert {n for n, p in optimizer._model.named_parameters() if p in slots} == {"inner.weight", "inner.bias", "loose.0"}


def test_functional_call(strict):
    def prepare(model):
        return lambda x: torch.func.functional_call(model, dict(model.named_parameters()), x)

    assert parents(None, prepare)[1] == parents("forward", prepare)[1]

    def prepare_others(model):
        return lambda x: torch.func.functional_call(model, {n: p * 1 for n, p in model.named_parameters()}, x)

    found, wanted = parents("forward", prepare_others), parents(None, prepare_others)
    assert found[1] == wanted[1] and len(found[2]._overlap._uses.at_step) == len(list(found[2]._model.parameters()))


def test_a_parameter_that_was_read_without_waiting_is_refused_with_its_name():
    model = ByParents()
    model.by_hand = False
    optimizer = make(model, "forward")

    def loss(i):
        return model(torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(i))).square().sum()

    for i in range(3):
        loss(i).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.by_hand = True
    before = optimizer._shards.step
    loss(3).backward()
    with pytest.raises(RuntimeError, match="parameter inner.bias .and 1 more. got a gradient, but no forward pass"):
        optimizer.step()
    assert optimizer._shards.step == before
    optimizer.zero_grad()
    for i in range(3, 6):
        loss(i).backward()
        optimizer.step()
        assert optimizer._overlap._arrivals.missing(model.inner.weight) is None
        optimizer.zero_grad()


def test_parameters_without_gradients_wait_at_the_step_until_they_have_some(strict):
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    optimizer = make(model, "forward", missing_gradients="zero")
    for used in (1, 1, 2, 1):
        sum(layer(torch.ones(4)).sum() for layer in list(model)[:used]).backward()
        optimizer.step()
        optimizer.zero_grad()
        waited = optimizer._overlap._arrivals.missing(model[1].weight) is None
        assert waited == (optimizer._shards.step < 3)


# Whatever else reads or changes something


def reads(model, optimizer, directory):
    """Everything that must see all of the last step."""
    other = network(torch.bfloat16)
    other.load_state_dict(model.state_dict())
    yield "model.state_dict", other[0].weight
    other[2].load_state_dict(model[2].state_dict())
    yield "submodule.state_dict", other[2].weight
    state = optimizer.state_dict()["state"]
    yield "state_dict", state[0]["master_weights"], state[3]["exp_avg"]
    yield "state", optimizer.state[model[0].weight]["exp_avg_sq"]
    optimizer.synchronize()
    yield "synchronize", *(p.detach().clone() for p in model.parameters())
    optimizer.save(directory)
    optimizer.saved()
    state = copy.deepcopy(optimizer.state_dict())
    yield "save", model[0].weight.detach().clone()
    optimizer.load_state_dict(state)
    yield "load_state_dict", model[2].weight.detach().clone()
    optimizer.load(directory)
    yield "load", model[2].weight.detach().clone()
    model.load_state_dict(network(torch.bfloat16).state_dict())
    yield "model.load_state_dict", model[0].weight.detach().clone()
    optimizer.open()
    optimizer.close()
    yield "close", *(p.detach().clone() for p in model.parameters())


def test_what_synchronizes(tmp_path, strict):
    found = []
    for overlap in (None, "forward"):
        model = network(torch.bfloat16)
        optimizer = make(model, overlap, lr=1e-2)
        seen = reads(model, optimizer, tmp_path / str(overlap))
        everything = []
        for name, *tensors in _with_steps(model, optimizer, seen):
            everything.append((name, [t.detach().clone() for t in tensors]))
        found.append(everything)
    assert len(found[0]) == 10
    for (name, serial), (_, overlapped) in zip(*found):
        torch.testing.assert_close(serial, overlapped, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def _with_steps(model, optimizer, seen):
    for i in range(10):
        train(model, optimizer, 1, i)
        yield next(seen)


def test_the_step_of_an_earlier_state_is_awaited(monkeypatch):
    """It has the number of a step that was finished."""
    model = network()
    optimizer = make(model, "forward")
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1)
    optimizer.synchronize()
    optimizer.load_state_dict(state)
    train(model, optimizer, 1)
    sent = Sent(monkeypatch)
    optimizer.synchronize()
    assert sent.waits == [(0, sum(p.numel() for p in model.parameters()))]


def test_a_group_is_not_added_to_a_state(strict):
    model = network()
    optimizer = make(model, "forward")
    train(model, optimizer, 2)
    with pytest.raises(RuntimeError, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_gradients_that_are_not_set_to_none(strict):
    found = []
    for overlap in (None, "forward"):
        model = network(torch.bfloat16)
        optimizer = make(model, overlap)
        for i in range(4):
            backward(model, i)
            optimizer.step()
            if i == 1:
                optimizer.zero_grad(set_to_none=False)
                assert not overlap or not underway(optimizer)
            elif i > 1:
                optimizer.zero_grad()  # after the first step, gradients are accumulated to those of the step
        optimizer.synchronize()
        found.append(digest(model))
    assert found[0] == found[1]


WRITES = {
    "weights": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "gradients": lambda p: p.grad.zero_(),
    "gradients' data": lambda p: p.grad.data.fill_(7),
}


@pytest.mark.parametrize("written", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_while_an_update_runs_are_refused(written, dtype, way):
    shared = way == "shared"
    if "gradients" in written and not shared or written == "data" and not (shared and dtype is torch.bfloat16):
        pytest.skip("these writes do no harm, or only the check mode finds them")
    model = network(dtype)
    optimizer = make(model, "forward")
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    backward(model, 2)
    optimizer.step()
    with torch.no_grad():
        WRITES[written](model[2].weight)
    for use in (lambda: backward(model, 3), optimizer.step, optimizer.state_dict, lambda: optimizer.save("/nowhere")):
        with pytest.raises(RuntimeError, match=r"parameter (in the pages of [02]\.\w+|2.weight) was written while .* load"):
            use()
            optimizer.synchronize()
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    train(model, optimizer, 2)


def test_weights_that_are_written_between_steps(strict):
    found = []
    for overlap in (None, "forward"):
        model = network(torch.bfloat16)
        optimizer = make(model, overlap, lr=1e-2)
        for i in range(6):
            backward(model, i)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)
        found.append(digest(model))
    assert found[0] == found[1]


# Steps of all kinds


def test_scaler_closures_and_skipped_steps(strict):
    found = []
    for overlap in (None, "forward"):
        model = network(torch.float16)
        optimizer = make(model, overlap, lr=1e-2, max_grad_norm=0.3, eps=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for i in range(12):
            loss = backward(model, i, scaler.get_scale() * (float("inf") if i in (0, 5) else 1)) if i % 2 == 0 else None
            if loss is None:
                optimizer.step(lambda: backward(model, i))
            else:
                scaler.scale(torch.ones(()))  # the scale is on the CPU from here on
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        optimizer.synchronize()
        found.append((digest(model), optimizer.skipped, scaler.get_scale()))
    assert found[0] == found[1] and found[0][1] == 1


def test_several_types_optimizers_and_maximize(strict):
    class Mixed(torch.nn.Sequential):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(torch.nn.Linear(16, 40), torch.nn.Linear(40, 8).bfloat16(), torch.nn.Linear(8, 4))

        def forward(self, x):
            return self[2](self[1](self[0](x).bfloat16()).float())

    found = []
    for overlap in (None, "forward"):
        model = Mixed()
        options = dict(model=model, overlap=overlap, max_grad_norm=0.3)
        first = plimsoll.torch.AdamW([*model[0].parameters(), *model[1].parameters()], lr=1e-2, name="a", **options)
        second = plimsoll.torch.SGD(model[2].parameters(), lr=1e-2, maximize=True, name="b", **options)
        for i in range(8):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(i))).square().sum().backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        first.synchronize()
        second.synchronize()
        found.append(digest(model))
    assert found[0] == found[1]


def test_an_optimizer_for_each_parameter():
    found = []
    for overlap in (None, "forward"):
        model = network()
        optimizers = {p: plimsoll.torch.SGD([p], lr=0.1, model=model, overlap=overlap) for p in model.parameters()}

        def step_and_clear(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_and_clear)
        for i in range(4):
            backward(model, i)
        for optimizer in optimizers.values():
            optimizer.synchronize()
        found.append(digest(model))
    assert found[0] == found[1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_shared_modules_and_evaluation(reentrant, strict):
    class Shared(torch.nn.Module):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__()
            self.first, self.layer, self.head = torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)
            self.same = self.layer
            self.other = torch.nn.Linear(32, 32)
            self.other.weight = self.layer.weight

        def block(self, x):
            return torch.tanh(self.other(torch.tanh(self.same(torch.tanh(self.layer(x))))))

        def forward(self, x):
            return self.head(torch.utils.checkpoint.checkpoint(self.block, self.first(x), use_reentrant=reentrant))

    found = []
    for overlap in (None, "forward"):
        model = Shared()
        optimizer = make(model, overlap, lr=1e-2, max_grad_norm=0.3)
        seen = []
        for i in range(6):
            for _ in range(1 + i % 2):  # with gradients that are accumulated
                model(torch.randn(4, 16, generator=torch.Generator().manual_seed(i))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad() if i % 2 else torch.inference_mode():
                seen.append(model.eval()(torch.ones(1, 16)).tolist())
            model.train()
        found.append((digest(model), seen))
    assert found[0] == found[1]


def test_legacy_hooks_that_read_parameters(strict):
    found = []
    for overlap in (None, "forward"):
        model = network()
        with pytest.warns(FutureWarning):
            torch.nn.utils.weight_norm(model[0])
        torch.nn.utils.parametrizations.weight_norm(model[2])
        optimizer = make(model, overlap, lr=1e-2)
        train(model, optimizer, 5)
        optimizer.synchronize()
        found.append(digest(model))
        assert overlap is None or not optimizer._overlap._uses.at_step
    assert found[0] == found[1]


# Copies, forks, interrupts and ends


def test_copies_of_the_model_have_no_hooks_that_wait(strict):
    model = network()
    optimizer = make(model, "forward")
    train(model, optimizer, 2)
    optimizer.synchronize()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(1, 16))
        assert_same(model, other, 0, 0)


def test_a_forked_child_has_the_parameters_of_the_step(strict):
    model, wanted = network(torch.bfloat16), network(torch.bfloat16)
    serial = make(wanted, None)
    train(wanted, serial, 3)
    expected = str(wanted(torch.ones(2, 16).bfloat16()).tolist())
    serial.close()
    optimizer = make(model, "forward")
    train(model, optimizer, 3)
    finish = in_child(lambda: str(model(torch.ones(2, 16).bfloat16()).tolist()))
    assert not underway(optimizer) and finish() == expected
    train(model, optimizer, 1)
    finish = in_child(lambda: str(model(torch.ones(2, 16).bfloat16()).tolist()))
    optimizer.step()
    train(model, optimizer, 1)
    with contextlib.suppress(AssertionError):
        finish()


@contextlib.contextmanager
def interrupted_within(function, done):
    """Interrupts the main thread once it is in a function: anywhere else, Python may swallow the interrupt. Then sets an event.
    No interrupt comes behind the block: it would end the test run.
    """

    def interrupt():
        while not done.wait(0.001):
            frame = sys._current_frames()[threading.main_thread().ident]
            while frame and frame.f_code is not function.__code__:
                frame = frame.f_back
            if frame:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                done.set()

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        done.set()
        watcher.join()


def test_an_interrupt_in_the_middle_of_a_wait(service, begins_late):
    found = []
    for overlap in (None, "forward"):
        model = gpt()
        optimizer = make(model, overlap, socket=service.socket)
        losses = []
        for i in range(6):
            loss = model.loss(batch(DATA, i))
            loss.backward()
            if not overlap:
                optimizer.step()
            else:
                interrupted = threading.Event()  # until then the service stands still, so the model must wait for it
                wait = begins_late(optimizer.step, 30, interrupted)
                with interrupted_within(connection._receive, interrupted):
                    model.loss(batch(DATA, i))
                wait()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.synchronize()
        found.append((losses, digest(model)))
        optimizer.close(give_back=True)
    assert found[0] == found[1]


@pytest.mark.usefixtures("large_blocks")
def test_an_optimizer_that_nobody_closes(service):
    model, wanted = gpt(width=128, vocabulary=16384), gpt(width=128, vocabulary=16384)
    serial = make(wanted, None)
    steps(wanted, serial, 2)
    optimizer = make(model, "forward", socket=service.socket)
    steps(model, optimizer, 2)
    del optimizer
    gc.collect()
    assert_same(model, wanted, 0, 0)
    assert not any(m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())


@pytest.mark.first_way
@pytest.mark.usefixtures("large_blocks")
def test_the_service_is_killed_while_modules_wait(service):
    wanted, model = gpt(width=128, vocabulary=16384), gpt(width=128, vocabulary=16384)
    losses = steps(wanted, make(wanted, None), 12)
    optimizer, found = make(model, "forward", socket=service.socket), []
    for i in range(12):
        found += steps(model, optimizer, 1, i)
        kill_worker(service)
    optimizer.synchronize()
    assert found == losses and digest(model) == digest(wanted)


# What is refused


def test_what_is_refused(monkeypatch):
    model = network()
    with pytest.raises(ValueError, match=r"overlap is 'sideways': expected one of None, 'forward'"):
        make(model, "sideways")
    with pytest.raises(ValueError, match="overlap is 'forward', but there is no model"):
        plimsoll.torch.AdamW(model.parameters(), overlap="forward")
    with pytest.raises(ValueError, match="model has no parameters"):
        plimsoll.torch.AdamW(model.parameters(), model=torch.nn.Tanh(), overlap="forward")
    with pytest.raises(ValueError, match="model has DataParallel"):
        plimsoll.torch.AdamW(model.parameters(), model=torch.nn.DataParallel(model), overlap="forward")
    optimizer = make(model, "forward")
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="a replica of DataParallel"):
        model[0]._replicate_for_data_parallel()(torch.ones(1, 16))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        model(torch.ones(1, 16))
