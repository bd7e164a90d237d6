"""Marks on their way to the recorder: one JSON object a datagram."""

import json
import socket
from typing import Any, Dict

_LARGEST = 64 << 10  # bytes of a datagram


class Sender:
    """Sends marks to the Unix socket of a recorder, and never waits for it.

    A mark that cannot be sent is dropped and counted. The next mark that can be sent says how many were dropped.
    """

    def __init__(self, path: str):
        self._path = path
        self._dropped = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def send(self, mark: Dict[str, Any]) -> None:
        if self._dropped:
            mark = {**mark, "dropped_marks": self._dropped}
        datagram = json.dumps(mark, separators=(",", ":")).encode()
        try:
            if len(datagram) > _LARGEST:
                raise OSError("the mark is too long")
            self._socket.sendto(datagram, self._path)
            self._dropped = 0
        except OSError:  # the recorder is busy, or has ended
            self._dropped += 1
