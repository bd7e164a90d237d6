"""Marks without torch: what they say, and what they cost where nobody records."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import timeit

import pytest

import plimsoll
from gpt import ROOT
from marked import Marks, received  # noqa: F401
from plimsoll import marks, resident


def test_marks_number_the_steps(received):
    for name in ("initialize", "forward", "backward", "forward", "backward", "step", "forward", "backward", "step"):
        plimsoll.mark(name)
    plimsoll.mark("checkpoint")
    plimsoll.mark("evaluation")
    assert received.places() == [
        "initialize 0", "forward 1", "backward 1", "forward 1", "backward 1", "step 1", "forward 2", "backward 2", "step 2",
        "checkpoint 2", "evaluation",
    ]  # fmt: skip
    assert [m.get("iteration", "") for m in received.all()] == [""] + ["first"] * 5 + ["steady"] * 3 + ["", ""]
    assert received.all()[0]["ended"]["phase"] == "load"
    for before, after in zip(received.all(), received.all()[1:]):
        assert {k: before.get(k) for k in ("phase", "step", "iteration")} == {
            k: after["ended"].get(k) for k in ("phase", "step", "iteration")
        }
    assert {(m["rank"], m["pid"], m["source"]) for m in received.all()} == {(0, os.getpid(), "client")}


def test_a_program_that_marks_only_its_steps(received):
    for _ in range(3):
        plimsoll.mark("step")
    assert received.places() == ["step 1", "step 2", "step 3"]


def test_contexts_nest(received):
    with plimsoll.phase("forward"):
        with plimsoll.phase("tokenize"):
            pass
        with pytest.raises(KeyError), plimsoll.phase("checkpoint"):
            raise KeyError
    with plimsoll.phase("step"):
        pass
    assert [(m["phase"], m.get("name"), m["step"]) for m in received.all()] == [
        ("forward", None, 1), ("forward", "tokenize", 1), ("forward", None, 1), ("checkpoint", None, 1), ("forward", None, 1),
        ("", None, 1), ("step", None, 1), ("", None, 1),
    ]  # fmt: skip


def test_the_peak_is_that_of_the_phase(received):
    plimsoll.mark("forward")
    memory = bytearray(200 << 20)
    del memory
    plimsoll.mark("backward")
    plimsoll.mark("step")
    forward, backward = received.ended("forward", 1), received.ended("backward", 1)
    assert forward["peak_resident_bytes"] >= forward["resident_bytes"] + (190 << 20)
    assert backward["peak_resident_bytes"] < backward["resident_bytes"] + (20 << 20)
    assert forward["free_heap_bytes"] >= 0


def test_a_kernel_that_does_not_reset_the_peak(received, monkeypatch):
    def refuse(path, *rest, **named):
        if path == "/proc/self/clear_refs":
            raise PermissionError(13, "Permission denied")
        return open(path, *rest, **named)

    monkeypatch.setattr(resident, "open", refuse, raising=False)
    monkeypatch.setattr(resident, "_can_reset", True)
    with pytest.warns(UserWarning, match="cannot be reset .*since the process began") as warned:
        plimsoll.mark("forward")
        plimsoll.mark("backward")
    assert len(warned) == 1 and len(received.all()) == 2


def test_dropped_marks_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_MARKS", str(tmp_path / "marks"))
    monkeypatch.setattr(marks, "_recorder", None)
    plimsoll.mark("forward")
    plimsoll.mark("backward")
    received = Marks(tmp_path / "marks")
    plimsoll.mark("x" * (64 << 10))  # longer than a datagram
    plimsoll.mark("step")
    plimsoll.mark("forward")
    assert [m.get("dropped_marks") for m in received.all()] == [3, None]


def test_a_full_socket_holds_nobody_up(tmp_path, monkeypatch):
    """A receiver that is stopped: the kernel keeps a few datagrams (net.unix.max_dgram_qlen), and refuses the others."""
    monkeypatch.setenv("PLIMSOLL_MARKS", str(tmp_path / "marks"))
    monkeypatch.setattr(marks, "_recorder", None)
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(tmp_path / "marks"))
    for _ in range(2000):
        plimsoll.mark("step")
    kept = 2000 - marks.recorder()._sender._dropped
    assert 0 < kept < 2000
    for _ in range(kept):
        assert "dropped_marks" not in json.loads(receiver.recv(1 << 17))
    plimsoll.mark("forward")
    assert json.loads(receiver.recv(1 << 17))["dropped_marks"] == 2000 - kept


def test_forked_children_are_silent(received):
    plimsoll.mark("forward")
    child = os.fork()
    if child == 0:
        with plimsoll.phase("backward"):
            plimsoll.mark("evaluation")
        os._exit(0)
    os.waitpid(child, 0)
    plimsoll.mark("step")
    assert received.places() == ["forward 1", "step 1"]


def test_threads(received):
    plimsoll.mark("forward")
    threads = [threading.Thread(target=lambda: [plimsoll.mark("evaluation") for _ in range(20)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(received.all()) == 81


def test_nobody_records(monkeypatch):
    monkeypatch.delenv("PLIMSOLL_MARKS", raising=False)
    monkeypatch.setattr(marks, "_recorder", None)
    monkeypatch.setattr(resident, "read", None)  # would fail

    with plimsoll.phase("forward"):
        plimsoll.mark("backward")


@pytest.mark.nightly
def test_cost_where_nobody_records(monkeypatch):
    monkeypatch.delenv("PLIMSOLL_MARKS", raising=False)
    monkeypatch.setattr(marks, "_recorder", None)

    def phase():
        with plimsoll.phase("forward"):
            plimsoll.mark("backward")

    # The least of some, of this thread: a busy host takes its time from others.
    assert min(timeit.repeat(phase, timer=time.thread_time, number=100, repeat=10)) / 100 < 100e-6


def test_import_without_torch():
    program = "import sys, plimsoll; plimsoll.mark('forward'); sys.exit('torch' in sys.modules)"
    # A fresh interpreter: it is about the import.
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT / "python")
