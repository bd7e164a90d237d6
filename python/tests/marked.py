"""A socket that receives marks, as plimsoll run --record has one."""

import json
import socket
import threading

import pytest

from plimsoll import marks


class Marks:
    """The marks that this process and its children have sent. A thread receives them: a socket holds only a few."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._ask = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.path, self._all, self._asked = str(path), [], threading.Event()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self):
        while True:
            datagram = self._socket.recv(1 << 17)
            if datagram == b"asked":
                self._asked.set()
            elif datagram:
                self._all.append(json.loads(datagram))

    def all(self):
        """Those that were sent before."""
        self._asked.clear()
        self._ask.sendto(b"asked", self.path)
        assert self._asked.wait(60)
        return self._all

    def places(self):
        """The phases and steps that began, such as forward 1, and the names of what is none of the phases."""
        return [f"{m['phase']} {m['step']}" if m["phase"] else m.get("name", "") for m in self.all()]

    def ended(self, phase, step):
        """What the last part of a phase has held."""
        return [m["ended"] for m in self.all() if (m["ended"]["phase"], m["ended"]["step"]) == (phase, step)][-1]


def bytes_of(holdings):
    return {h["component"]: h["bytes"] for h in holdings}


@pytest.fixture
def received(tmp_path, monkeypatch):
    """The marks of a test. No mark is dropped: the sender waits here, which it never does else."""
    monkeypatch.setenv("PLIMSOLL_MARKS", str(tmp_path / "marks"))
    monkeypatch.setattr(marks, "_recorder", None)
    found = Marks(tmp_path / "marks")
    marks.recorder()._sender._socket.setblocking(True)
    return found
