"""States that the service holds between steps: sessions that outlive this process and the service."""


import json
import os
import pathlib
import re
import signal
import subprocess

import numpy as np
import pytest

from awaited import answers
from plimsoll import ProtocolError, ServiceError, protocol
from plimsoll.errors import StateDamaged
from plimsoll.held import HeldStates
from plimsoll.service import find_program
from plimsoll.states import Layout, Moment


def document(**change):
    tensors = [
        {"name": "a", "key": "exp_avg", "dtype": "fp32", "shape": [10, 6], "offset": 0},
        {"name": "a", "key": "exp_avg_sq", "dtype": "bf16", "shape": [10, 6], "offset": 256},
    ]
    chunks = [
        {"bytes": 512, "tensors": tensors, "scalars": [{"name": "a", "key": "step", "dtype": "fp32"}]},
        {"bytes": 1024, "tensors": [{"name": "b", "key": "exp_avg", "dtype": "fp32", "shape": [256], "offset": 0}]},
    ]
    whole = {
        "schema": "plimsoll.hold/1", "job": "test", "rank": 0, "world": 1, "local_world": 1, "part": "states",
        "recovery": True, "gradient_bytes": 1000, "settings_bytes": 4096, "chunks": chunks,
    }  # fmt: skip
    return {**whole, **change}


def fill(held, value):
    """Makes a step, as a trainer does: every byte of the new regions is the step's."""
    memory = np.frombuffer(held.arenas["states"].memory, np.uint8)
    sizes = [c["bytes"] for c in held.document["chunks"]]
    for _ in sizes:
        moment = held.moment
        chunk = held.layout.next(moment)
        held.wait_until_read(held.layout.position(moment))
        begin = held.layout.offset(chunk, moment.steps + 1)
        memory[begin : begin + sizes[chunk]] = value
        held.control.scalars(moment.steps + 1)[:] = value
        held.control.position += 1


def whole(held):
    """The values of all bytes of the regions, and of the scalars."""
    memory, steps = np.frombuffer(held.arenas["states"].memory, np.uint8), held.moment.steps
    regions = [
        memory[held.layout.offset(i, steps) :][: c["bytes"]][:120] for i, c in enumerate(held.document["chunks"])
    ]
    return {*np.concatenate([*regions, held.control.scalars(steps)[:, :4].ravel()]).tolist()}


def test_checkpoints_are_of_one_step_while_the_next_goes_on(service, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    held = HeldStates(service.socket, document())
    for step in (1, 2):
        fill(held, step)
    assert held.save(str(tmp_path), 2, {"epoch": 7}) == 2
    for step in (3, 4, 5):
        fill(held, step)
    assert held.saved() == 2
    held.commit(str(tmp_path), 2)
    loaded = safetensors.load_file(str(tmp_path / "step-00000002" / "rank-00000-of-00001-states.safetensors"))
    saved = {name: tensor.float().numpy() for name, tensor in loaded.items()}
    assert {name: saved[name].shape for name in ("a.exp_avg", "a.step", "b.exp_avg")} == {
        "a.exp_avg": (10, 6), "a.step": (), "b.exp_avg": (256,),
    }  # fmt: skip
    assert {*saved["b.exp_avg"].tobytes(), *saved["a.exp_avg"].tobytes(), *saved["a.step"].tobytes()} == {2}
    assert whole(held) == {5}
    for verb, says in (("inspect", "b.exp_avg"), ("verify", "every byte is as it was written")):
        shown = subprocess.run([find_program(), "checkpoint", verb, str(tmp_path)], capture_output=True, text=True, check=True)
        assert says in shown.stdout
    assert held.load(str(tmp_path)) == (2, {"epoch": 7})
    assert whole(held) == {2} and held.moment == Moment(2, 0)
    fill(held, 3)
    assert whole(held) == {3}
    with pytest.raises(ServiceError, match="save of step 7: the states have had step 3"):
        held.save(str(tmp_path), 7)
    other = document(part="other")
    with pytest.raises(ServiceError, match='it has no tensor "a.exp_avg" in part other'):
        HeldStates(service.socket, other).load(str(tmp_path))
    assert held.found == "whole"


def test_a_save_waits_for_copies_under_way(service, tmp_path):
    held = HeldStates(service.socket, document())
    fill(held, 1)
    send = held.send

    def send_and_copy(*request):
        sent = send(*request)
        for _ in range(20):
            answers(service)  # a save that did not wait would have ended by now
        fill(held, 2)
        return sent

    held.send = send_and_copy
    held.save(str(tmp_path), 2)
    held.send = send
    held.saved()
    held.commit(str(tmp_path), 2)
    fill(held, 3)
    assert held.load(str(tmp_path)) == (2, None) and whole(held) == {2}


def test_states_outlive_their_trainer(service):
    held = HeldStates(service.socket, document())
    assert held.is_new and sorted(held.arenas) == ["control", "gradients", "states"]
    assert held.arenas["states"].bytes == 512 + 1024 + 1024 and held.arenas["gradients"].bytes == 1000
    layout = Layout([512, 1024])
    for chunk in (0, 1):
        assert held.layout.next(held.moment) == chunk
        at = layout.offset(chunk, 1)
        np.frombuffer(held.arenas["states"].memory, np.uint8)[at : at + 512] = chunk + 1
        held.control.position += 1
    held.control.scalars(1)[0] = 7
    held.control.settings = b'[{"lr": 0.1}]'
    held.abandon()
    again = HeldStates(service.socket, document())
    assert again.attached and again.found == "whole" and again.moment == Moment(1, 0)
    assert list(again.control.scalars(1)[0]) == [7] * 8 and again.control.settings == b'[{"lr": 0.1}]'
    memory = np.frombuffer(again.arenas["states"].memory, np.uint8)
    assert list(memory[:512]) == [1] * 512 and list(memory[512:1024]) == [2] * 512
    again.control.gradients_of = 2
    again.control.position += 1
    again.abandon()
    assert HeldStates(service.socket, document()).found == "redo"


def test_another_layout_is_refused(service):
    HeldStates(service.socket, document()).abandon()
    with pytest.raises(ServiceError, match="hold: session rank0/states of job test exists and differs: settings_bytes is 1"):
        HeldStates(service.socket, document(settings_bytes=1))
    with pytest.raises(ServiceError, match="hold: there are no chunks"):
        HeldStates(service.socket, {**document(part="other"), "chunks": [], "settings_bytes": 1})


ARITHMETIC = pathlib.Path(__file__).resolve().parents[2] / "internal" / "state" / "states" / "testdata" / "arithmetic.json"


def test_the_service_computes_the_same():
    for expected in json.loads(ARITHMETIC.read_text()):
        layout = Layout(expected["sizes"])
        assert layout.bytes == expected["bytes"]
        for position, p in enumerate(expected["positions"]):
            moment = layout.at(position)
            assert layout.position(moment) == p["position"] == position
            assert moment == (p["steps"], p["committed"])
            assert layout.next(moment) == p["next"]
            assert layout.offset(p["next"], moment.steps + 1) == p["offset"]
            assert [layout.steps_of(i, moment) for i in range(layout.chunks)] == p["steps_of"]
            assert layout.condition(position, 2, True) == p["condition"]


HELD = {
    "schema": "plimsoll.held/1",
    "attached": False,
    "condition": "new",
    "step": 0,
    "service": "v0.1.0",
    "arenas": [
        {"name": "rank0/states/held_states", "component": "held_states", "type": "uint8", "bytes": 200, "mapped_bytes": 4096},
    ],
}


@pytest.mark.parametrize(
    "change, what",
    [
        ({"schema": "plimsoll.session/1"}, "schema is 'plimsoll.session/1'"),
        ({"condition": "lost"}, "condition is 'lost'"),
        ({"step": -1}, "step is -1"),
        ({"attached": 1}, "attached is 1"),
        ({"arenas": []}, "the arenas are {}"),
        ({"arenas": [{**HELD["arenas"][0], "bytes": 199}]}, "'held_states': 199"),
        ({"arenas": [{**HELD["arenas"][0], "mapped_bytes": 199}]}, "the arenas are"),
    ],
)
def test_wrong_answers_are_refused(change, what):
    parse = lambda document: protocol.parse_held(json.dumps(document).encode(), {"held_states": 200})
    assert parse(HELD).condition == "new"
    with pytest.raises(ProtocolError, match=re.escape(what)):
        parse({**HELD, **change})


def test_a_service_that_dies_is_not_waited_for(service, tmp_path):
    held = HeldStates(service.socket, document())
    fill(held, 1)
    held.control.read = 0  # as a service leaves it that dies in a save
    (process,) = children(service.process.pid)
    os.kill(process, signal.SIGKILL)
    fill(held, 2)
    assert held.moment == Moment(2, 0) and whole(held) == {2}
    assert held.save(str(tmp_path), 2) == 2


def test_an_interrupted_request_hides_no_service_that_has_died(service):
    held = HeldStates(service.socket, document())
    fill(held, 1)
    held.send(protocol.Kind.SAVED)  # an interrupt has come before its answer
    held.control.read = 0
    (process,) = children(service.process.pid)
    os.kill(process, signal.SIGKILL)
    fill(held, 2)
    assert held.moment == Moment(2, 0) and whole(held) == {2}


def children(process):
    tasks = pathlib.Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_numbers_that_have_changed_in_memory_decide_nothing(service):
    held = HeldStates(service.socket, document())
    held.control.settings = b"{}"
    for offset, read in (
        (64, lambda: held.moment), (128, lambda: held.control.gradients_of), (136, lambda: held.control.settings),
        (144, lambda: held.control.settings), (192, lambda: held.wait_until_read(1)),
    ):  # fmt: skip
        for bit in range(64):
            held.control.memory[offset + bit // 8] ^= 1 << bit % 8
            with pytest.raises(StateDamaged, match="memory has changed since it was written; begin again from"):
                read()
            held.control.memory[offset + bit // 8] ^= 1 << bit % 8
    held.control.memory[held.control._settings] ^= 1
    with pytest.raises(StateDamaged, match="the hyperparameters, 2 bytes at offset .*, have another checksum"):
        held.control.settings
    held.control.memory[held.control._settings] ^= 1
    held.close(give_back=True)
