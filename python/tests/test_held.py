"""States that the service holds between steps: sessions that outlive this process and the service."""


import numpy as np
import pytest

from plimsoll import ServiceError
from plimsoll.held import HeldStates
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
    with pytest.raises(ServiceError, match="hold: session rank0/states of job test exists and differs: settings_bytes is 1, and was"):
        HeldStates(service.socket, document(settings_bytes=1))
    with pytest.raises(ServiceError, match="hold: there are no chunks"):
        HeldStates(service.socket, {**document(part="other"), "chunks": [], "settings_bytes": 1})
