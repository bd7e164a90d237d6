"""What steps change, as messages, and copies that take them."""

import io
import json
import math
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import plimsoll.delta
import plimsoll.torch
from gpt import GPT, batch, text
from nightly import nightly
from plimsoll.delta import DeltaError, Receiver
from plimsoll.errors import ServiceError
from plimsoll.service import find_program

DATA = text()
OPTIMIZERS = {
    "AdamW": (plimsoll.torch.AdamW, {}),
    "Adam": (plimsoll.torch.Adam, {}),
    "Lion": (plimsoll.torch.Lion, {}),
    "Adagrad": (plimsoll.torch.Adagrad, {}),
    "SGD": (plimsoll.torch.SGD, {"momentum": 0.9}),
}


def train(model, optimizer, i):
    model.loss(batch(DATA, i)).backward()
    optimizer.step()
    optimizer.zero_grad()


def copy_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(copy, model):
    """To the bit: a NaN is equal to itself."""
    for name, p in model.named_parameters():
        word = {2: torch.int16, 4: torch.int32}[p.element_size()]
        assert torch.equal(copy[name].view(word), p.detach().view(word)), name


def check(model, optimizer, steps):
    """Trains, and applies the delta of each step to a copy."""
    copy = copy_of(model)
    optimizer.open()
    receiver = Receiver(copy)
    sizes = []
    for i in range(steps):
        train(model, optimizer, i)
        delta = optimizer.delta()
        before = {name: tensor.clone() for name, tensor in copy.items()}
        for message in delta.messages:
            assert receiver.apply(message) == i + 1 == delta.step
        assert_equal(copy, model)
        for name, indices, values in delta:  # the same, by hand
            before[name].view(-1)[indices] = values
        assert_equal(before, model)
        sizes.append(sum(map(len, delta.messages)))
    receiver.verify()
    return sizes


@pytest.mark.each_choice
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("state", ["split", "fp32", "split24"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4, 1e-3])
def test_copies_follow_to_the_bit(kind, dtype, state, moments, lr, request):
    optimizer, options = OPTIMIZERS[kind]
    if moments == "int8" and not kind.startswith("Adam"):
        moments = "fp32"
    model = GPT().to(dtype)
    optimizer = optimizer(model.parameters(), lr=lr, state=state, moments=moments, model=model, delta=True, **options)
    long = 2000 if (dtype, state, moments) == (torch.bfloat16, "split", "fp32") else 100
    check(model, optimizer, long if request.config.getoption("--nightly") else 12)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_copies_follow_steps_behind_other_passes(overlap):
    model = GPT().to(torch.bfloat16)
    check(model, plimsoll.torch.AdamW(model.parameters(), lr=1e-4, model=model, overlap=overlap, delta=True), 12)


def test_parameters_without_gradients_are_in_no_delta():
    model = GPT().to(torch.bfloat16)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-3, model=model, delta=True)
    check(model, optimizer, 2)
    model.blocks[0].requires_grad_(False)
    train(model, optimizer, 3)
    names = {name for name, _, _ in optimizer.delta()}
    assert names and not any(name.startswith("blocks.0") for name in names)


def moved(model, lr=1e-3, **options):
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=lr, model=model, delta=True, **options)
    optimizer.open()
    return optimizer


def test_a_gap_is_said_and_a_whole_delta_closes_it():
    model = GPT().to(torch.bfloat16)
    copy = copy_of(model)
    optimizer = moved(model)
    messages = []
    for i in range(3):
        train(model, optimizer, i)
        messages.append(optimizer.delta().messages[0])
    receiver = Receiver(copy)
    receiver.apply(messages[0])
    before = {name: tensor.clone() for name, tensor in copy.items()}
    with pytest.raises(DeltaError, match="leads from step 2 to step 3.*it is at step 1"):
        receiver.apply(messages[2])
    with pytest.raises(DeltaError, match="leads from step 2 to step 3"):
        plimsoll.delta.apply(messages[2], copy)
    assert all(torch.equal(copy[name], before[name]) for name in copy)
    receiver.apply(optimizer.delta(whole=True).messages[0])
    assert_equal(copy, model)


def test_what_is_not_known_is_not_told():
    model = GPT().to(torch.bfloat16)
    optimizer = moved(model)
    train(model, optimizer, 0)
    train(model, optimizer, 1)
    with pytest.raises(ServiceError, match="ask for one after every step"):
        optimizer.delta()
    optimizer.delta(whole=True)
    train(model, optimizer, 2)
    assert optimizer.delta().step == 3
    assert optimizer.delta().messages == optimizer.delta().messages  # as after a connection that was lost
    train(model, optimizer, 3)
    assert optimizer.delta().step == 4
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ServiceError, match="after a load"):
        optimizer.delta()
    with pytest.raises(RuntimeError, match="delta=True"):
        plimsoll.torch.AdamW(model.parameters()).delta()


def test_changes_beside_steps_are_found():
    model = GPT().to(torch.bfloat16)
    optimizer = moved(model)
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    train(model, optimizer, 0)
    with pytest.raises(ServiceError, match="after a load, a write"):
        optimizer.delta()


def test_damage_changes_nothing():
    model = GPT().to(torch.bfloat16)
    copy = copy_of(model)
    optimizer = moved(model)
    train(model, optimizer, 0)
    message = optimizer.delta().messages[0]
    generator = random.Random(1)
    for _ in range(300):
        at = generator.randrange(len(message))
        bad = bytearray(message)
        bad[at] ^= 1 << generator.randrange(8)
        with pytest.raises(DeltaError):
            plimsoll.delta.apply(bytes(bad), copy)
        with pytest.raises(DeltaError):
            plimsoll.delta.apply(message[:at], copy)
    plimsoll.delta.apply(message, copy)
    assert_equal(copy, model)


def resealed(data):
    import hashlib

    return data + hashlib.sha256(data).digest()


def test_nonsense_with_a_right_checksum_is_refused():
    """What a reader makes of messages that a broken writer might send: it raises DeltaError, or takes them."""
    model = GPT().to(torch.bfloat16)
    optimizer = moved(model)
    train(model, optimizer, 0)
    message = optimizer.delta().messages[0][:-32]
    generator = random.Random(2)
    refused = 0
    for _ in range(2000):
        bad = bytearray(message)
        for _ in range(generator.randrange(1, 4)):
            bad[generator.randrange(len(bad) if generator.random() < 0.5 else 192)] = generator.randrange(256)
        copy = copy_of(model)
        try:
            plimsoll.delta.apply(resealed(bytes(bad)), copy)
        except DeltaError:
            refused += 1
            assert_equal(copy, model)
    assert refused > 1900


def save(tensors, path):
    """A safetensors file."""
    header, body = {}, io.BytesIO()
    for name, t in tensors.items():
        begin = body.tell()
        body.write(t.contiguous().view(torch.uint8).numpy().tobytes())
        header[name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [begin, body.tell()]}
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body.getvalue())


def apply(*arguments):
    """What the program says, on one line."""
    done = subprocess.run([find_program(), "delta", "apply", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_files_follow(tmp_path):
    """A file takes each message, and a folder of messages leads a file to every step."""
    model = GPT().to(torch.bfloat16)
    for name in ("model", "base"):
        save(copy_of(model), tmp_path / name)
    optimizer = moved(model)
    for i in range(3):
        train(model, optimizer, i)
        (message,) = optimizer.delta().save(tmp_path / "deltas")
        apply(message, tmp_path / "model")
        save(copy_of(model), tmp_path / f"expected-{i + 1}")
        assert (tmp_path / "model").read_bytes() == (tmp_path / f"expected-{i + 1}").read_bytes()
    for step in (1, 2, 3):
        assert f"step {step}," in apply(tmp_path / "deltas", tmp_path / "base", "--step", step, "--out", tmp_path / "made")
        assert (tmp_path / "made").read_bytes() == (tmp_path / f"expected-{step}").read_bytes()
    optimizer.delta(whole=True).save(tmp_path / "deltas")
    assert len(list((tmp_path / "deltas").iterdir())) == 4
    assert "at step 3 already" in apply(tmp_path / "deltas", tmp_path / "model")


def test_files_are_on_the_disk(tmp_path, monkeypatch):
    """What is saved is brought to the disk, and then its name."""
    model = GPT().to(torch.bfloat16)
    optimizer = moved(model)
    train(model, optimizer, 0)
    delta, brought, fsync = optimizer.delta(), [], os.fsync

    def noted(descriptor):
        brought.append((os.readlink(f"/proc/self/fd/{descriptor}"), sorted(os.listdir(tmp_path))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    (path,) = delta.save(tmp_path)
    (data, before), (names, after) = brought
    assert [os.path.basename(data)] == before and data != path
    assert (names, after) == (str(tmp_path), [os.path.basename(path)])


def test_optimizers_share_a_folder(tmp_path):
    """Each has messages of its own, and a file takes both."""
    model = GPT().to(torch.bfloat16)
    save(copy_of(model), tmp_path / "base")
    halves = list(model.named_parameters())[:5], list(model.named_parameters())[5:]
    both = [plimsoll.torch.AdamW([p for _, p in half], lr=1e-3, model=model, delta=True, name=f"half{i}") for i, half in enumerate(halves)]
    for optimizer in both:
        optimizer.open()
    model.loss(batch(DATA, 0)).backward()
    paths = []
    for optimizer in both:
        optimizer.step()
        paths += optimizer.delta().save(tmp_path / "deltas")
    assert len(set(paths)) == len(paths) == len(list((tmp_path / "deltas").iterdir())) == 2
    apply(tmp_path / "deltas", tmp_path / "base")
    save(copy_of(model), tmp_path / "expected")
    assert (tmp_path / "base").read_bytes() == (tmp_path / "expected").read_bytes()


def test_sizes_are_near_the_entropy():
    """At a small learning rate a message takes some more than the entropy of which words change and how."""
    model = GPT(width=128).to(torch.bfloat16)
    optimizer = moved(model, lr=1e-6)
    elements = sum(p.numel() for p in model.parameters())
    for i in range(5):
        train(model, optimizer, i)
        delta = optimizer.delta()
        share = sum(indices.numel() for _, indices, _ in delta) / elements
        entropy = elements * (share - share * math.log2(share) - (1 - share) * math.log2(1 - share)) / 8
        assert len(delta.messages[0]) < 1.5 * entropy + 1500


TRAINER = """
    import sys
    import torch, plimsoll.torch
    from gpt import GPT, batch, text
    torch.manual_seed(0)
    model = GPT().to(torch.bfloat16)
    torch.save({n: p.detach().clone() for n, p in model.named_parameters()}, sys.argv[1] + "/base")
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-4, model=model, delta=True)
    optimizer.open()
    for i in range(10**6):
        model.loss(batch(text(), i)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.delta().save(sys.argv[1])
"""


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 100))])
def test_what_was_published_before_a_kill_is_whole(tmp_path, seed):
    """A trainer that is killed leaves a base and deltas that lead to the parameters of the last of them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(TRAINER), tmp_path], env=environment)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*.delta"))) < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(seed).random() / 10)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    copy = torch.load(tmp_path / "base")
    receiver = Receiver(copy)
    published = sorted(tmp_path.glob("*.delta"))
    assert len(published) >= 10
    for i, path in enumerate(published):
        assert receiver.apply(path.read_bytes()) == i + 1
    receiver.verify()


RANK = """
    import sys
    import torch, plimsoll.torch, plimsoll.delta
    from torch import distributed
    from gpt import GPT, batch, text
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT().to(torch.bfloat16)
    copy = {n: p.detach().clone() for n, p in model.named_parameters()}
    receiver = plimsoll.delta.Receiver(copy)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-4, model=model, sharding="zero1", delta=True)
    optimizer.open()
    for i in range(5):
        model.loss(batch(text(), i)).backward()
        optimizer.step()
        optimizer.zero_grad()
        every = [None] * distributed.get_world_size()
        distributed.all_gather_object(every, optimizer.delta().messages)
        for message in sum(every, []):
            receiver.apply(message)
        for n, p in model.named_parameters():
            assert torch.equal(copy[n], p), n
    receiver.verify()
"""


def test_ranks_have_a_delta_each(tmp_path):
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [find_program(), "run", "--nproc", "2", "--", sys.executable, str(tmp_path / "rank.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
