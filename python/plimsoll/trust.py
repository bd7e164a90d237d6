"""Who may be the optimizer service of this process: its own user, or root, as systemd listens for services.

Whoever answers gets all weights, and says which memory this process maps.
"""

import os
import socket
import stat
import struct

from plimsoll.errors import PlimsollError
from plimsoll.pipes import Pipes

_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


def connect(path: str) -> socket.socket:
    """A connection to the service at ``path``.

    Raises OSError where nobody listens, and PlimsollError where another user does, or could.
    """
    check_directory(os.path.dirname(path))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
        check_peer(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_in(folder: str, path: str) -> Pipes:
    """A connection to the service in a folder, through the pipe at ``path``: as :func:`connect`."""
    check_directory(folder)
    if os.stat(folder).st_uid != os.geteuid():
        raise PlimsollError(f"the folder of the service, {folder}, belongs to another user: expected user {os.geteuid()}")
    return Pipes(path)


def check_directory(name: str) -> None:
    """Refuses a directory in which another user could put a socket in the place of the service's.

    The rule is that of sshd's StrictModes. A link counts as a directory: who owns it says where it leads.
    """
    for status in (os.lstat(name), os.stat(name)):
        if not _is_trusted(status.st_uid):
            raise PlimsollError(
                f"the directory of the socket, {name}, belongs to user {status.st_uid}: expected user {os.geteuid()} or root, "
                "or that user could put another service in its place"
            )
        if stat.S_ISDIR(status.st_mode) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PlimsollError(
                f"the directory of the socket, {name}, has mode {stat.S_IMODE(status.st_mode):#o}, so that other users may "
                f"write to it and put another service in its place: expected 0700 (chmod 700 {name})"
            )


def check_peer(connection: socket.socket, path: str) -> None:
    """Refuses a connection to a process of another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    if not _is_trusted(user):
        raise PlimsollError(
            f"the optimizer service at {path}: process {process} of user {user} answers: expected user {os.geteuid()} or "
            "root, as the service gets the weights; start a service of your own (plimsoll serve)"
        )


def _is_trusted(user: int) -> bool:
    return user in (0, os.geteuid())
