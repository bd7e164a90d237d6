"""A connection to the optimizer service without sockets: two named pipes in a folder that is this user's alone.

Descriptors do not go through pipes. The receiver opens the sender's through ``/proc`` (docs/protocol.md).
"""

import collections
import contextlib
import os
import secrets
import select
import stat
import struct
import tempfile
from typing import Deque, List, Optional, Sequence, Tuple

from plimsoll import protocol
from plimsoll.descriptors import close_all
from plimsoll.errors import ProtocolError

#: The named pipe in the folder that clients write their names to.
REQUESTS = "requests"

_HEAD = struct.Struct("<II")  # the bytes of a packet, and the number of its files
_FILE = struct.Struct("<QQQ")  # a descriptor of the sender, and the device and inode of its file
_GREETING = struct.Struct("<I")  # the service's process
_ANNOUNCE = 500  # milliseconds until a client says once more that it is there: a service that dies may have read its name


def folder_of(path: str) -> Optional[str]:
    """The folder of the service at ``path``, if clients connect to it through a pipe."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.stat(path).st_mode):
            return os.path.dirname(path)
    return None


def is_listening(path: str) -> bool:
    """Whether a keeper holds the pipe at ``path``."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def new_file(folder: str, size: int = 0) -> int:
    """A file without a name in the folder, whose blocks are allocated: a descriptor."""
    descriptor, name = tempfile.mkstemp(prefix="text-", dir=folder)
    try:
        os.unlink(name)
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Pipes:
    """A connection to the service whose pipe is at ``path``. Raises OSError where no keeper holds that.

    It waits for a service that is being started again.
    """

    def __init__(self, path: str):
        folder, name = os.path.dirname(path), f"client-{os.getpid()}-{secrets.token_hex(8)}"
        self._open: List[int] = []
        self._sent = self._answered = 0
        self._lent: Deque[Tuple[int, int]] = collections.deque()  # copies of descriptors, each with the number of its packet
        names = [os.path.join(folder, f"{name}.{end}") for end in ("to", "from")]
        try:
            for each in names:
                os.mkfifo(each, 0o600)
                # Both ends, until the service has its own: a pipe without a writer is at its end.
                self._open.append(os.open(each, os.O_RDWR | os.O_NONBLOCK))
            self._out, both = self._open
            self._in = os.open(names[1], os.O_RDONLY | os.O_NONBLOCK)
            self._open.append(self._in)
            self.process = self._announce(path, name)
            os.set_blocking(self._in, True)
            # Without its other end, writing fails once the service is gone.
            out = os.open(f"/proc/self/fd/{self._out}", os.O_WRONLY)
            self._open.append(out)
            for old in (self._out, both):
                self._open.remove(old)
                os.close(old)
            self._out = out
        except BaseException:
            self.close()
            raise
        finally:
            for each in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each)

    def _announce(self, path: str, name: str) -> int:
        while True:
            listener = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(listener, name.encode() + b"\n")
            finally:
                os.close(listener)
            if self._poll(_ANNOUNCE) & select.POLLIN:
                length, files = _HEAD.unpack(self._read(_HEAD.size))
                if (length, files) != (_GREETING.size, 0):
                    raise ProtocolError(f"a greeting of {length} bytes and {files} files; {protocol.MEND}")
                return _GREETING.unpack(self._read(length))[0]

    def _poll(self, milliseconds: int) -> int:
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        return sum(events for _, events in poll.poll(milliseconds))

    def close(self) -> None:
        """Ends the connection. A second time it does nothing."""
        close_all(self._open)
        close_all([descriptor for _, descriptor in self._lent])
        self._open.clear()
        self._lent.clear()

    def is_over(self) -> bool:
        """Whether the service has closed the connection, and nothing is unread."""
        return self._poll(0) & (select.POLLIN | select.POLLHUP) == select.POLLHUP

    def send(self, packet: bytes, descriptors: Sequence[int]) -> None:
        """Sends a packet. The descriptors may be closed afterwards: copies stay open until the packet is answered."""
        self._sent += 1
        files = b""
        for descriptor in descriptors:
            copy = os.dup(descriptor)
            self._lent.append((self._sent, copy))
            status = os.fstat(copy)
            files += _FILE.pack(copy, status.st_dev, status.st_ino)
        message = memoryview(_HEAD.pack(len(packet), len(descriptors)) + files + packet)
        while message:
            message = message[os.write(self._out, message) :]

    def receive(self) -> Tuple[bytes, List[int]]:
        """Receives one packet and its descriptors. Raises ConnectionError at the end."""
        length, count = _HEAD.unpack(self._read(_HEAD.size))
        if length > protocol.MAXIMUM_PACKET or count > protocol.MAXIMUM_DESCRIPTORS:
            raise ProtocolError(
                f"an answer of more than {protocol.MAXIMUM_PACKET} bytes or {protocol.MAXIMUM_DESCRIPTORS} descriptors; {protocol.MEND}"
            )
        files = self._read(_FILE.size * count)
        packet = self._read(length)
        descriptors: List[int] = []
        try:
            for file in _FILE.iter_unpack(files):
                descriptors.append(self._open_of_service(*file))
        except BaseException:
            close_all(descriptors)
            raise
        self._answered += 1
        while self._lent and self._lent[0][0] <= self._answered:
            os.close(self._lent.popleft()[1])
        return packet, descriptors

    def _open_of_service(self, number: int, device: int, inode: int) -> int:
        try:
            descriptor = os.open(f"/proc/{self.process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ConnectionResetError("the service has ended before its files were opened") from None
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (device, inode):
            os.close(descriptor)
            raise ConnectionResetError("the service has closed its files before they were opened")
        return descriptor

    def _read(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            part = os.read(self._in, size - len(read))
            if not part:
                raise ConnectionResetError("the service has closed the connection")
            read += part
        return bytes(read)
