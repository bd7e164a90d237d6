"""Events that tests wait for, so that none waits for time to pass."""

import os
import select
import socket

from plimsoll import protocol
from plimsoll.protocol import Kind

#: Seconds after which what never comes fails a test. No test is quicker or slower for it.
NEVER = 120


def answers(service):
    """Waits until the service answers. The keeper holds its socket, where this request waits for one that is started again."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(NEVER)
            connection.connect(service.socket)
            connection.send(protocol.pack(Kind.STAT, 1, b""))
            try:
                if connection.recv(protocol.MAXIMUM_PACKET):
                    return
            except ConnectionError:
                pass  # the service has died with the request


def ended(pid):
    """Waits until a process has ended that need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], NEVER)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)
