"""A connection that survives a restart of the optimizer service: requests, their answers, and unanswered requests."""

import array
import collections
import fcntl
import os
import socket
import threading
import time
import weakref
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple, Union

from plimsoll import protocol, trust
from plimsoll.descriptors import close_all
from plimsoll.errors import PlimsollError, ProtocolError, StateLost
from plimsoll.pipes import Pipes, folder_of, new_file
from plimsoll.protocol import Kind

# Unread answers fill the socket. The service would wait for this process while this process waits for the service.
_OUTSTANDING = 64
# A request that has ended the service this many times is not sent again.
_ATTEMPTS = 3


class Request:
    """A request that was sent. :meth:`Session.result` waits for its answer."""

    __slots__ = ("answer", "attempts", "count", "descriptors", "error", "kind", "number", "packet")

    def __init__(self, kind: Kind, number: int, packet: bytes, descriptors: Sequence[int]):
        self.kind, self.number, self.packet, self.descriptors = kind, number, packet, descriptors
        self.attempts = 0
        self.count = 0  # how many steps or accumulations are done once it is
        self.answer: Optional[bytes] = None
        self.error: Optional[Exception] = None

    @property
    def body(self) -> bytes:
        return self.packet[protocol.HEADER.size :]


class Connection:
    """Sends requests about one session, and takes their answers in order.

    If the service has died, it connects to the one that the keeper has started, for up to ``patience`` seconds, and
    repeats unanswered requests. Only :class:`plimsoll.Session` knows the meaning of a connection's requests, through
    the methods that it overrides.
    """

    #: The request that opens the session.
    opening = Kind.OPEN

    def __init__(self, path: str, document: Dict[str, Any], patience: float):
        self.path, self.document, self.patience = os.path.abspath(path), document, patience
        self._lock = threading.RLock()
        self._outstanding: Deque[Request] = collections.deque()
        self._number = 0
        self._socket: Union[socket.socket, Pipes, None] = None
        #: The folder of a service without sockets. Nothing can seal files there.
        self.folder = folder_of(self.path)
        self._broken: Optional[Exception] = None
        self._in_doubt = False  # whether more or less may have been sent and received than is noted
        _connections.add(self)

    def _count(self, kind: Kind) -> int:
        """How many requests of its kind are done once this one is."""
        return 0

    def _answered(self, request: Request) -> None:
        """Notes the changes that a request has made."""

    def _parse(self, result: bytes) -> Any:
        """What the answer to the opening request says."""
        raise NotImplementedError

    def _has_state(self, opened: Any, descriptors: Sequence[int]) -> bool:
        """Whether a service has the state of this session, after a reconnection."""
        return True

    def _greet(self, opened: Any) -> None:
        """Sends on a new connection what the service must know before any request."""

    # Requests and answers

    def send(self, kind: Kind, body: bytes = b"", descriptors: Sequence[int] = ()) -> Request:
        """Sends a request and does not wait for its answer."""
        with self._lock:
            self._number = (self._number + 1) & 0xFFFFFFFF
            request = Request(kind, self._number, protocol.pack(kind, self._number, body), descriptors)
            while len(self._outstanding) >= _OUTSTANDING:
                self._receive()
            self._check_open()
            request.count = self._count(kind)
            self._in_doubt = True
            self._outstanding.append(request)
            self._transmit(request)
            self._in_doubt = False
            return request

    def result(self, request: Request) -> bytes:
        """Waits for the result of a request."""
        with self._lock:
            while request.answer is None and request.error is None:
                self._receive()
            if request.error is not None:
                raise request.error
            assert request.answer is not None
            return request.answer

    def call(self, kind: Kind, body: bytes = b"", descriptors: Sequence[int] = ()) -> bytes:
        return self.result(self.send(kind, body, descriptors))

    def drain(self) -> None:
        """Takes all answers. Afterwards ``step`` is the state's step, whatever was interrupted."""
        with self._lock:
            while self._outstanding:
                self._receive()

    def _ask_first(self, packet: bytes, descriptors: Sequence[int]) -> bytes:
        """The answer to the first packet on a connection."""
        _send(self._socket, packet, descriptors)
        answer, came = _receive(self._socket)
        close_all(came)
        return answer

    def _check_open(self) -> None:
        if self._broken is not None:
            raise PlimsollError(f"the session is closed after an error: {self._broken}") from self._broken
        if self._in_doubt:
            self._recover(None)
        if self._socket is None:
            raise PlimsollError("the session is closed: open another one")

    def _transmit(self, request: Request) -> None:
        try:
            _send(self._socket, request.packet, request.descriptors)
        except ConnectionError as error:
            self._recover(error)
        except OSError:
            self._outstanding.pop()  # it was not sent
            self._in_doubt = False
            raise

    def _receive(self) -> None:
        """Takes the next answer, which answers the oldest request."""
        self._check_open()
        request = self._outstanding[0]
        self._in_doubt = True
        try:
            packet, descriptors = _receive(self._socket)
        except ConnectionError as error:
            self._recover(error)
            return
        try:
            close_all(descriptors)
            if descriptors:
                raise ProtocolError(
                    f"{request.kind.name.lower()}: file descriptors came with an answer: expected none; {protocol.MEND}"
                )
            request.answer = protocol.parse_answer(packet, request.kind, request.number)
            if request.kind in _WITHOUT_RESULT:
                protocol.parse_nothing(request.answer, request.kind)
            # Note it here, where it is certain: the caller that began the request may have been interrupted. This
            # code may be, too; then the answer comes again.
            self._answered(request)
        except ProtocolError as error:
            # The next packet cannot be matched to the expected one.
            self._broken = error
            self._disconnect()
            raise
        except PlimsollError as error:
            request.error = error
        self._outstanding.popleft()
        self._in_doubt = False
        if request.error is not None and request.kind in _WITHOUT_RESULT:
            # Nobody may ask for this result.
            raise request.error

    # Connecting

    def _connect(self) -> Tuple[Any, List[int]]:
        document = protocol.pack_document(self.document)
        try:
            connection = trust.connect_in(self.folder, self.path) if self.folder else trust.connect(self.path)
        except OSError as error:
            raise ConnectionError(
                f"no optimizer service answers at {self.path}: {error}; start one (plimsoll serve --socket {self.path}), "
                "or leave PLIMSOLL_SOCKET unset and each process starts its own"
            ) from None
        descriptors: List[int] = []
        try:
            file = _sealed("plimsoll-open", document, self.folder)
            try:
                _send(connection, protocol.pack(self.opening, 0, protocol.pack_number(len(document))), [file])
            finally:
                os.close(file)
            packet, descriptors = _receive(connection)
            opened = self._parse(protocol.parse_answer(packet, self.opening, 0))
            if len(descriptors) != len(opened.arenas):
                raise ProtocolError(
                    f"{self.opening.name.lower()}: {len(descriptors)} file descriptors came with {len(opened.arenas)} arenas; {protocol.MEND}"
                )
        except BaseException:
            close_all(descriptors)
            connection.close()
            raise
        self._socket = connection
        return opened, descriptors

    def _is_over(self) -> bool:
        """Whether the service has closed the connection."""
        assert self._socket is not None
        if isinstance(self._socket, Pipes):
            return self._socket.is_over()
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _recover(self, cause: Optional[Exception]) -> None:
        """Connects again, and repeats unanswered requests.

        With a ``cause`` it connects to a restarted service; without one to the same service, after an interrupt.
        """
        deadline = time.monotonic() + self.patience
        try:
            while True:
                self._disconnect()
                try:
                    self._reattach(counts=cause is not None)
                    self._in_doubt = False
                    return
                except ConnectionError as error:
                    if time.monotonic() > deadline:
                        raise PlimsollError(
                            f"the optimizer service at {self.path} has ended ({cause or error}), and no other was started "
                            f"within {self.patience:g} s: {error}"
                        ) from error
                time.sleep(0.02)
        except PlimsollError as error:
            self._broken = error
            self._disconnect()
            raise

    def _reattach(self, counts: bool) -> None:
        opened, descriptors = self._connect()
        try:
            is_same = self._has_state(opened, descriptors)
        finally:
            close_all(descriptors)
        if not is_same:
            raise StateLost(
                f"the optimizer service at {self.path} was started again without its state: the state of rank "
                f"{self.document['rank']} is gone; load the last checkpoint"
            )
        for request in list(self._outstanding)[:1]:
            request.attempts += counts
            if request.attempts > _ATTEMPTS:
                raise PlimsollError(
                    f"the optimizer service at {self.path} has ended {_ATTEMPTS} times at the same request, "
                    f"{request.kind.name.lower()}; see its output"
                )
        self._greet(opened)
        for request in self._outstanding:
            _send(self._socket, request.packet, request.descriptors)

    def abandon(self) -> None:
        """Drops the connection without a message, as the end of the process does."""
        self._disconnect()
        self._in_doubt = False


_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Closes connections in a forked child, such as a data loader: it must not keep a session from the next trainer.
    """
    for connection in list(_connections):
        connection.abandon()


os.register_at_fork(after_in_child=_leave_to_parent)

_WITHOUT_RESULT = frozenset(
    (Kind.WINDOW, Kind.WRITE, Kind.READ, Kind.SET_STEP, Kind.READY, Kind.ACCUMULATE, Kind.CLEAR, Kind.CLOSE, Kind.PREPARE, Kind.ORDER)
)


def _sealed(name: str, content: bytes, folder: Optional[str]) -> int:
    descriptor = new_file(folder) if folder else os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    if folder:
        return descriptor
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return descriptor


def _send(connection: Union[socket.socket, Pipes, None], packet: bytes, descriptors: Sequence[int]) -> None:
    assert connection is not None
    if isinstance(connection, Pipes):
        connection.send(packet, descriptors)
    elif descriptors:
        socket.send_fds(connection, [packet], list(descriptors))
    else:
        connection.send(packet)


def _receive(connection: Union[socket.socket, Pipes, None]) -> Tuple[bytes, List[int]]:
    """Receives one packet and its descriptors. Raises ConnectionError at the end."""
    assert connection is not None
    if isinstance(connection, Pipes):
        return connection.receive()
    room = socket.CMSG_SPACE(protocol.MAXIMUM_DESCRIPTORS * array.array("i").itemsize)
    packet, ancillary, flags, _ = connection.recvmsg(protocol.MAXIMUM_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    descriptors = list(numbers)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(descriptors)
        raise ProtocolError(
            f"an answer of more than {protocol.MAXIMUM_PACKET} bytes or {protocol.MAXIMUM_DESCRIPTORS} descriptors; {protocol.MEND}"
        )
    if not packet:
        close_all(descriptors)
        raise ConnectionResetError("the service has closed the connection")
    return packet, descriptors
