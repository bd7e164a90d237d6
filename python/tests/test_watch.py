"""plimsoll.torch.watch: hooks that mark the phases, and tensors that are counted."""

import copy
import gc
import os
import pickle
import subprocess
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import plimsoll.torch
from gpt import ROOT
from marked import bytes_of, received  # noqa: F401
from nightly import nightly_rows
from plimsoll import marks, resident
from plimsoll.torch import watching
from preloaded import python

STEP = ["forward {}", "backward {}", "step {}", "between steps"]


def steps(*numbers):
    return [place.format(n) for n in numbers for place in STEP]


@pytest.fixture(autouse=True)
def unwatched(monkeypatch):
    monkeypatch.setattr(watching, "_loop", None)
    backward = torch.autograd.backward
    yield
    for watch in list(watching._loop._watches) if watching._loop else ():
        watch.remove()
    assert torch.autograd.backward is backward


def network(width=16):
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))


def train(model, optimizer, count=1, accumulate=1, width=16):
    for _ in range(count):
        for _ in range(accumulate):
            model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def nbytes(tensors):
    """Of tensors that share no storage."""
    return sum(t.nbytes for t in tensors)


def test_phases_of_a_plain_loop(received):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with plimsoll.torch.watch(model, optimizer):
        train(model, optimizer, 3)
    assert received.places() == ["initialize 0", *steps(1, 2, 3), ""]
    assert [m.get("iteration") for m in received.all()[1:4]] == ["first"] * 3
    assert [m.get("iteration") for m in received.all()[5:8]] == ["steady"] * 3
    train(model, optimizer)
    assert len(received.all()) == 14  # nothing is watched any more


def test_accumulation(received):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plimsoll.torch.watch(model, optimizer)
    train(model, optimizer, 2, accumulate=2)
    passes = ["forward {0}", "backward {0}"]
    once = passes + passes + ["step {0}", "between steps"]
    assert received.places() == ["initialize 0"] + [p.format(n) for n in (1, 2) for p in once]


def test_an_evaluation_is_no_training(received):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plimsoll.torch.watch(model, optimizer)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.randn(4, 16)), model(torch.randn(4, 16))
    torch.save(model.state_dict(), os.devnull)
    train(model, optimizer)
    loss = model(torch.randn(4, 16)).square().mean()
    with torch.inference_mode():  # a teacher within the forward pass
        model(torch.randn(4, 16))
    loss.backward()
    places = ["initialize 0", *steps(1), "evaluation", "checkpoint 1", *steps(2), "forward 3", "backward 3"]
    assert received.places() == places


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_stays_backward(received, reentrant):
    class Recomputes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network(256)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Recomputes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plimsoll.torch.watch(model, optimizer)
    x = torch.randn(1024, 256, requires_grad=True)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    model.inner[0].register_forward_pre_hook(lambda *_: None)
    assert received.places() == ["initialize 0", *steps(1, 2)]
    saved = bytes_of(received.ended("forward", 2)["holdings"])
    # The input, the output and what square() saves of it. The activations between them are computed again.
    assert saved["batch"] == x.nbytes and saved["logits_and_loss"] == x.nbytes and saved.get("activations", 0) < x.nbytes


def test_a_model_that_is_a_checkpoint_itself(received):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plimsoll.torch.watch(model, optimizer)
    for _ in range(2):
        checkpoint(model, torch.randn(4, 16), use_reentrant=False).square().mean().backward()
        optimizer.step()
    assert received.places() == ["initialize 0", *steps(1, 2)]


def test_two_models(received):
    generator, critic = network(), network()
    optimizers = [torch.optim.Adam(m.parameters()) for m in (generator, critic)]
    for model, optimizer in zip((generator, critic), optimizers):
        plimsoll.torch.watch(model, optimizer)
    for _ in range(2):
        train(critic, optimizers[1])
        critic(generator(torch.randn(4, 16))).mean().backward()
        optimizers[0].step()
    assert received.places() == ["initialize 0", *steps(1, 2, 3, 4)]
    of_steps = [m["iteration"] for m in received.all() if m["phase"] == "step"]
    assert of_steps == ["first", "first", "steady", "steady"]
    sizes = bytes_of(received.ended("step", 2)["holdings"])
    assert sizes["parameters"] == nbytes([*generator.parameters(), *critic.parameters()])


def test_two_optimizers_of_one_model(received):
    model = network()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    plimsoll.torch.watch(model, optimizers)
    model(torch.randn(4, 16)).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    model(torch.randn(4, 16)).mean().backward()
    assert received.places()[-2:] == ["forward 2", "backward 2"]
    assert {p for p in received.places() if p.startswith("step")} == {"step 1"}


def test_a_closure(received):
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, line_search_fn=None)
    plimsoll.torch.watch(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    places = received.places()
    assert [places.count(f"forward {n}") > 1 for n in (1, 2)] == [True, True] and "forward 3" not in places
    assert places.count("between steps") == 2


def test_an_optimizer_that_is_made_later(received):
    model = network()
    plimsoll.torch.watch(model)
    other = network()
    train(other, torch.optim.Adam(other.parameters()))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    assert received.places() == ["initialize 0", "backward 1", *steps(1)]
    assert bytes_of(received.ended("step", 1)["holdings"])["exp_avg"] == nbytes(model.parameters())


ADAMW = {
    "foreach": dict(foreach=True), "fused": dict(fused=True), "for-loop": dict(foreach=False), "amsgrad": dict(amsgrad=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", ADAMW)
def test_holdings_are_exact(received, kind):
    model = network(64)
    model.register_buffer("positions", torch.zeros(100))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW[kind])
    plimsoll.torch.watch(model, optimizer)
    x = torch.randn(32, 64)
    y = model(x)
    loss = y.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del y, loss
    y = model(x)
    size = nbytes(model.parameters())
    held = {"parameters": size, "buffers": 400}
    states = {"exp_avg": size, "exp_avg_sq": size, "optimizer_states": 4 * 4 + (size if kind == "amsgrad" else 0)}
    passing = {"batch": x.nbytes, "logits_and_loss": y.nbytes}
    # tanh saves its result, and square() what the model returns. A linear layer saves its input.
    forward, backward, step = (received.ended(phase, 1) for phase in ("forward", "backward", "step"))
    assert named(forward) == {**held, **passing, "activations": y.nbytes}
    assert named(backward) == {**held, **passing, "gradients": size}
    assert named(step) == {**held, **passing, "gradients": size, **states}  # the first step has made the states
    assert named(received.ended("", 1)) == {**held, "batch": x.nbytes, **states}
    for ended in (m["ended"] for m in received.all()):
        assert ended["peak_resident_bytes"] >= ended["resident_bytes"]
    process = [bytes_of(m["ended"]["holdings"])["python_process"] for m in received.all()]
    assert len(set(process)) == 1 and 0 < process[0] < forward["resident_bytes"]


def named(ended):
    """What was counted, without what belongs to the process."""
    return {c: n for c, n in bytes_of(ended["holdings"]).items() if c not in ("python_process", "matmul_workspaces")}


@pytest.mark.parametrize("gradients", ["torch", "shared"])
def test_our_optimizers(received, gradients):
    """The service holds the states. Parameters and gradients are memory shared with it."""
    model = network(64)
    optimizer = plimsoll.torch.AdamW(model.parameters(), model=model)
    plimsoll.torch.watch(model, optimizer)
    if gradients == "shared":
        optimizer.open()
    train(model, optimizer, 2, width=64)
    plimsoll.mark("end")
    size = nbytes(model.parameters())
    for phase, step in (("step", 1), ("", 1), ("backward", 2), ("step", 2)):
        found = named(received.ended(phase, step))
        assert (found["parameters"], found["gradients"]) == (size, size), (phase, step)
        assert not {"exp_avg", "exp_avg_sq"} & set(found)
    assert received.places() == ["initialize 0", *steps(1, 2), "end"]


def test_tied_frozen_and_master_weights(received):
    model = network()
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    plimsoll.torch.watch(model, optimizer)
    model(torch.randn(4, 16).bfloat16()).float().mean().backward()
    for master, p in zip(masters, (p for p in model.parameters() if p.requires_grad)):
        master.grad = p.grad.float()
    optimizer.step()
    weight, bias = model[0].weight.nbytes, model[0].bias.nbytes
    found = named(received.ended("step", 1))
    assert found["parameters"] == weight + 2 * bias and found["gradients"] == weight + bias
    assert found["master_weights"] == found["master_gradients"] == found["momentum_buffer"] == 2 * (weight + bias)


def test_views_of_a_flat_buffer(received):
    model = network()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()) + 24)  # with padding
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    plimsoll.torch.watch(model)
    model(torch.randn(4, 16))
    assert named(received.ended("initialize", 0)) == {"parameters": flat.nbytes}


def test_lora(received):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0", "2"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    plimsoll.torch.watch(model, optimizer)
    train(model, optimizer, 2)
    found = named(received.ended("step", 2))
    assert found["parameters"] == nbytes(model.parameters())
    assert found["gradients"] == found["exp_avg"] == nbytes(trained) < found["parameters"]


def test_activations_are_what_autograd_saves(received):
    """Counted by hooks on saved tensors, which watch() does without."""
    model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    plimsoll.torch.watch(model)
    x, saved = torch.randn(8, 32, 64), {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
        loss = y.square().mean()
    del loss, y
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), x)}
    wanted = sum(s.nbytes() for address, s in saved.items() if address not in known)
    saved.clear()
    loss = model(x).square().mean()
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    found = named(received.ended("forward", 1))
    # The output of the model is held beside what was saved; square() has saved it, too.
    assert found["activations"] + found["logits_and_loss"] == wanted


def test_a_hook_that_moves_saved_tensors(received):
    """What was saved is not unpacked: that would run the hook."""
    model = network()
    unpacked = []
    plimsoll.torch.watch(model)
    hooks = lambda t: ("moved", t.double()), lambda moved: unpacked.append(1) or moved[1].float()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        loss = model(torch.randn(4, 16)).square().mean()
    graph = watching.Graph([loss], [])
    assert sum(s.nbytes() for node in graph.model for s in watching_saved(node)) > 0
    assert not unpacked
    loss.backward()
    assert unpacked and received.places()[-1] == "backward 1"


def watching_saved(node):
    from plimsoll.torch.saved import saved_by

    return saved_by(node)


def test_training_is_the_same(received):
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        if watched:
            plimsoll.torch.watch(model, optimizer)
        train(model, optimizer, 4, accumulate=2)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_an_exception_in_a_phase(received):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plimsoll.torch.watch(model, optimizer)
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 5))
    with pytest.raises(RuntimeError, match="scalar"):
        model(torch.randn(4, 16)).backward()
    broken = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    broken.remove()
    train(model, optimizer, 2)
    assert received.places() == ["initialize 0", "forward 1", "backward 1", "step 1", *steps(1, 2)]


def test_a_measurement_that_fails_ends_the_watch_alone(received, monkeypatch):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plimsoll.torch.watch(model, optimizer)
    monkeypatch.setattr(watching.holdings, "count", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="no longer watched.*ZeroDivisionError"):
        train(model, optimizer, 2)


def test_copies_of_the_model_are_not_watched(received):
    model = network()
    plimsoll.torch.watch(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(4, 16))
        other.state_dict()
    assert received.places() == ["initialize 0"]


def test_a_model_that_is_collected(received):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plimsoll.torch.watch(model, optimizer)
    train(model, optimizer)
    del model, optimizer
    gc.collect()
    assert not watching._loop._watches and received.places()[-1] == ""


def test_a_data_loader_is_silent(received):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plimsoll.torch.watch(model, optimizer)

    def collate(rows):
        plimsoll.mark("worker")
        with torch.no_grad():
            return model(torch.stack(rows))

    options = dict(batch_size=8, num_workers=2, collate_fn=collate, multiprocessing_context="fork")
    for rows in DataLoader(torch.randn(16, 16), **options):
        model(rows).mean().backward()
        optimizer.step()
    assert received.places() == ["initialize 0", *steps(1, 2)]


@pytest.mark.parametrize("way", ["the module that compile returns", "the function of the loss"])
def test_compile(received, way):
    model = network()
    if way == "the module that compile returns":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        plimsoll.torch.watch(compiled)
    else:
        plimsoll.torch.watch(model)
        compiled = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters())
    train(compiled, optimizer, 2)
    if way == "the module that compile returns":
        assert received.places() == ["initialize 0", *steps(1, 2)]
    else:  # hooks within a compiled function are compiled away
        assert [p for p in received.places() if p[0] != "f"] == [p for p in ["initialize 0", *steps(1, 2)] if p[0] != "f"]


def test_rarely_counted(received, monkeypatch):
    """From the third step on tensors are counted now and then. Resident memory is always read."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    plimsoll.torch.watch(model, optimizer)
    clock = [0.0]
    monkeypatch.setattr("plimsoll.torch.meter.time.monotonic", lambda: clock.__setitem__(0, clock[0] + 1e-3) or clock[0])
    train(model, optimizer, 4)
    clock[0] += 60
    train(model, optimizer, 2)
    counted = {n: received.ended("step", n)["holdings"] is not None for n in range(1, 7)}
    assert counted == {1: True, 2: True, 3: False, 4: False, 5: True, 6: False}
    assert all(m["ended"]["resident_bytes"] > 0 for m in received.all())


@pytest.fixture
def trimmed():
    """A heap of 1 GiB whose lower half malloc has given back to the kernel."""
    blocks = [bytearray(1 << 16) for _ in range(1 << 14)]
    del blocks[: 1 << 13]
    resident.trim_heap()
    return blocks


@pytest.mark.nightly
def test_cost(received, trimmed):
    """A mark takes less than a millisecond, whatever the size of the heap."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    plimsoll.torch.watch(model, optimizer)
    train(model, optimizer, 3)
    received.all()
    times = []
    for _ in range(50):
        began = time.thread_time()  # a busy host takes its time from others
        marks.recorder().begin("forward"), marks.recorder().begin("backward")
        times.append((time.thread_time() - began) / 2)
        received.all()
    assert sorted(times)[25] < 1e-3


def test_nobody_records(monkeypatch):
    monkeypatch.delenv("PLIMSOLL_MARKS", raising=False)
    monkeypatch.setattr(marks, "_recorder", None)
    model = network()
    with plimsoll.torch.watch(model) as watch:
        assert not model._forward_pre_hooks and not watch.handles


def test_no_optimizer():
    with pytest.raises(TypeError, match="watch: expected an optimizer, or a list of optimizers, found a float"):
        plimsoll.torch.watch(network(), 0.1)


TEMPORARIES = """
import ctypes, sys, torch, plimsoll.torch
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), **eval(sys.argv[2]))
plimsoll.torch.watch(model, optimizer)
for _ in range(2):
    model(torch.randn(4, 1024)).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "optimizer, options",
    [("AdamW", dict(fused=True)), ("AdamW", dict(foreach=True, amsgrad=True)), ("Adam", dict(foreach=False, weight_decay=0.1)),
     *nightly_rows(
         ("AdamW", dict(foreach=True)), ("AdamW", dict(foreach=False)),
         ("Adam", dict(foreach=True, weight_decay=0.1, maximize=True)),
     )],
)  # fmt: skip
def test_temporaries_by_formula(received, optimizer, options):
    """Against the peak of resident memory, in a process whose malloc keeps nothing."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    subprocess.run([*python(), "-c", TEMPORARIES, optimizer, repr(options)], check=True, env=environment)
    before, step = received.ended("backward", 2), received.ended("step", 2)
    formula = bytes_of(step.get("peak_holdings") or step["holdings"]).get("optimizer_temporaries", 0)
    measured = step["peak_resident_bytes"] - before["resident_bytes"]
    assert measured == pytest.approx(formula, abs=3 << 20), (measured, formula)
