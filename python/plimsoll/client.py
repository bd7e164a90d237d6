"""A session with the optimizer service: requests over a socket, data in shared pages."""

import array
import collections
import ctypes
import fcntl
import mmap
import os
import socket
import threading
import time
import weakref
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

import numpy as np

from plimsoll import protocol, trust
from plimsoll.descriptors import by_file, make_room
from plimsoll.errors import PlimsollError, ProtocolError, StateLost
from plimsoll.protocol import Kind

# Answers that were not read yet fill the socket, and the service would wait
# for this process while this process waits for the service.
_OUTSTANDING = 64
# A request that has ended the service this many times is not sent again.
_ATTEMPTS = 3
_WINDOW_BYTES = 16 << 20


class Arena:
    """Memory of a session that the service has mapped, too.

    ``memory`` is the mapping, ``bytes`` long up to the rest of its last page;
    ``type`` is that of the elements: "bf16", "fp16" or "fp32".
    """

    def __init__(self, description: protocol.ArenaDescription, descriptor: int):
        self.name, self.component, self.type = description.name, description.component, description.type
        self.bytes = description.bytes
        self.identity = _identity(descriptor)
        _check_file(description, descriptor)
        # The mapping has a descriptor of its own, for as long as anything uses it.
        self.memory = mmap.mmap(descriptor, description.mapped_bytes, mmap.MAP_SHARED, _READ_AND_WRITE)
        _mapped[self.memory] = self.identity

    @property
    def descriptor(self) -> int:
        """That of the mapping, as long as ``memory`` is there."""
        return by_file()[self.identity]


_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_mapped: "weakref.WeakKeyDictionary[mmap.mmap, Tuple[int, int]]" = weakref.WeakKeyDictionary()  # to identities of files


# Looked up now: a forked child may not, as another thread may have been at it.
_map_at = ctypes.CDLL(None, use_errno=True).mmap
_map_at.restype = ctypes.c_void_p
_map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def _keep_changes_to_oneself() -> None:
    """What a forked child changes is a copy of its own, as it is of all other memory."""
    if not _mapped:
        return
    descriptors = by_file()
    for memory, identity in _mapped.items():
        descriptor = descriptors[identity]
        at = np.frombuffer(memory, np.uint8).ctypes.data
        if _map_at(at, len(memory), _READ_AND_WRITE, _A_COPY_OF_ONES_OWN, descriptor, 0) != at:
            raise OSError(ctypes.get_errno(), "mmap of an arena in a forked child")


_A_COPY_OF_ONES_OWN = mmap.MAP_PRIVATE | 0x10 | 0x4000  # MAP_FIXED | MAP_NORESERVE
os.register_at_fork(after_in_child=_keep_changes_to_oneself)


def _identity(descriptor: int) -> Tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _check_file(description: protocol.ArenaDescription, descriptor: int) -> None:
    """A file that is too short, or could shrink, would end this process with a signal."""
    size = os.fstat(descriptor).st_size
    if size != description.mapped_bytes:
        raise ProtocolError(f"open: the file of arena {description.name} has {size} bytes: expected {description.mapped_bytes}")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"open: the file of arena {description.name} is no memfd: {error}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"open: the file of arena {description.name} is not sealed against shrinking")


class Request:
    """A request that was sent. :meth:`Session.result` waits for its answer."""

    __slots__ = ("answer", "attempts", "count", "descriptors", "error", "kind", "number", "packet")

    def __init__(self, kind: Kind, number: int, packet: bytes, descriptors: Sequence[int]):
        self.kind, self.number, self.packet, self.descriptors = kind, number, packet, descriptors
        self.attempts = 0
        self.count = 0  # what there is when it is done, of steps or of what was accumulated
        self.answer: Optional[bytes] = None
        self.error: Optional[Exception] = None


class Session:
    """The optimizer state of one rank's shard, held by the service.

    ``path`` is the service's socket and ``document`` the JSON document of open
    (docs/protocol.md). The service makes the state, or attaches this process to
    the state that is there: ``attached`` and ``initialized`` say which.

    A service that has died is started again by its keeper. The session then
    connects again, for up to ``patience`` seconds, and sends what had no answer
    once more; every request that it sends may be made twice with the result of
    once. Where the state did not survive, that is :class:`StateLost`. So it does
    when a KeyboardInterrupt came between a message and the note of it.

    Raises ServiceError for what the service refuses, ProtocolError for answers
    that make no sense, and PlimsollError where there is no service. Methods may
    be called from any thread.
    """

    def __init__(self, path: str, document: Dict[str, Any], *, patience: float = 60.0):
        self.path, self.document, self.patience = os.path.abspath(path), document, patience
        self.elements = sum(p["count"] for p in document["parameters"])
        self._lock = threading.RLock()
        self._outstanding: Deque[Request] = collections.deque()
        self._number = 0
        self._socket: Optional[socket.socket] = None
        self._window: Optional[int] = None
        self._window_halves: List[np.ndarray] = []
        self._broken: Optional[Exception] = None
        self._in_doubt = False  # whether what was sent and received may be more or less than is noted
        make_room()
        try:
            opened, descriptors = self._connect()
        except ConnectionError as error:
            raise PlimsollError(str(error)) from error
        try:
            self.arenas = {a.component: Arena(a, d) for a, d in zip(opened.arenas, descriptors)}
        except BaseException:
            self._disconnect()
            raise
        finally:
            _close(descriptors)
        self.attached, self.initialized = opened.attached, opened.initialized
        self.step, self.service, self.kernel = opened.step, opened.service, opened.kernel
        self.accumulated = opened.accumulated
        self.opened = opened
        _sessions.add(self)

    @property
    def parameters(self) -> Arena:
        """The parameters after the last step: 16-bit copies, or fp32 master weights."""
        return self.arenas.get("parameters") or self.arenas["master_weights"]

    @property
    def gradients(self) -> Arena:
        return self.arenas["gradients"]

    # Requests and answers

    def send(self, kind: Kind, body: bytes = b"", descriptors: Sequence[int] = ()) -> Request:
        """Sends a request and does not wait for its answer."""
        with self._lock:
            self._number = (self._number + 1) & 0xFFFFFFFF
            request = Request(kind, self._number, protocol.pack(kind, self._number, body), descriptors)
            while len(self._outstanding) >= _OUTSTANDING:
                self._receive()
            self._check_open()
            if kind is not Kind.CLEAR:
                request.count = 1 + (self.step if kind is Kind.STEP else self.accumulated)
            self._in_doubt = True
            self._outstanding.append(request)
            self._transmit(request)
            self._in_doubt = False
            return request

    def result(self, request: Request) -> bytes:
        """The result of a request, when it is there."""
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
        """Takes all answers. Then ``step`` is that of the state, whatever was interrupted."""
        with self._lock:
            while self._outstanding:
                self._receive()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise PlimsollError(f"the session is closed, because of this: {self._broken}") from self._broken
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
        """Takes the next answer, which is that of the oldest request."""
        self._check_open()
        request = self._outstanding[0]
        self._in_doubt = True
        try:
            packet, descriptors = _receive(self._socket)
        except ConnectionError as error:
            self._recover(error)
            return
        try:
            _close(descriptors)
            if descriptors:
                raise ProtocolError(
                    f"{request.kind.name.lower()}: file descriptors came with an answer: expected none; {protocol.MEND}"
                )
            request.answer = protocol.parse_answer(packet, request.kind, request.number)
            if request.kind in _WITHOUT_RESULT:
                protocol.parse_nothing(request.answer, request.kind)
            # Here, where it is certain: whoever began the request may have been interrupted. So may this be, and then
            # the answer comes again.
            if request.kind is Kind.STEP:
                self._stepped(request)
            elif request.kind in (Kind.ACCUMULATE, Kind.CLEAR):
                self.accumulated = request.count
        except ProtocolError as error:
            # What comes next cannot be told from what should have come.
            self._broken = error
            self._disconnect()
            raise
        except PlimsollError as error:
            request.error = error
        self._outstanding.popleft()
        self._in_doubt = False
        if request.error is not None and request.kind in _WITHOUT_RESULT:
            # Nobody may ask for this one.
            raise request.error

    # Connections

    def _connect(self) -> Tuple[protocol.Opened, List[int]]:
        document = protocol.pack_document(self.document)
        try:
            connection = trust.connect(self.path)
        except OSError as error:
            raise ConnectionError(
                f"no optimizer service answers at {self.path}: {error}; start one (plimsoll serve --socket {self.path}), "
                "or leave PLIMSOLL_SOCKET unset and each process starts its own"
            ) from None
        descriptors: List[int] = []
        try:
            file = _sealed("plimsoll-open", document)
            try:
                _send(connection, protocol.pack(Kind.OPEN, 0, protocol.pack_number(len(document))), [file])
            finally:
                os.close(file)
            packet, descriptors = _receive(connection)
            opened = protocol.parse_opened(protocol.parse_answer(packet, Kind.OPEN, 0), self.elements)
            if len(descriptors) != len(opened.arenas):
                raise ProtocolError(
                    f"open: {len(descriptors)} file descriptors came with {len(opened.arenas)} arenas; {protocol.MEND}"
                )
        except BaseException:
            _close(descriptors)
            connection.close()
            raise
        self._socket = connection
        return opened, descriptors

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _recover(self, cause: Optional[Exception]) -> None:
        """Connects again, and sends what had no answer once more.

        To a service that was started again; without a ``cause`` to the same one, after an interrupt.
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
                            f"the optimizer service at {self.path} has ended ({cause or error}), and none took its place "
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
            found = {a.component: _identity(d) for a, d in zip(opened.arenas, descriptors)}
        finally:
            _close(descriptors)
        if found != {a.component: a.identity for a in self.arenas.values()}:
            raise StateLost(
                f"the optimizer service at {self.path} was started anew, and the state of rank {self.document['rank']} is gone; "
                "load the last checkpoint"
            )
        for request in list(self._outstanding)[:1]:
            request.attempts += counts
            if request.attempts > _ATTEMPTS:
                raise PlimsollError(
                    f"the optimizer service at {self.path} has ended {_ATTEMPTS} times at the same request, {request.kind.name.lower()}; "
                    "see what it has printed"
                )
        if self._window is not None:
            self._announce_window()
        for request in self._outstanding:
            _send(self._socket, request.packet, request.descriptors)

    # The window

    def _announce_window(self) -> None:
        """Tells the service of the window, before anything else on this connection."""
        assert self._window is not None
        packet = protocol.pack(Kind.WINDOW, 0, protocol.pack_window(_WINDOW_BYTES))
        _send(self._socket, packet, [self._window])
        answer, descriptors = _receive(self._socket)
        _close(descriptors)
        protocol.parse_nothing(protocol.parse_answer(answer, Kind.WINDOW, 0), Kind.WINDOW)

    def _halves(self) -> List[np.ndarray]:
        """The window, as two halves of fp32 numbers: one is filled while the other is worked on."""
        if self._window is None:
            descriptor = os.memfd_create("plimsoll-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, _WINDOW_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.call(Kind.WINDOW, protocol.pack_window(_WINDOW_BYTES), [descriptor])
            self._window = descriptor
            numbers = np.frombuffer(mmap.mmap(descriptor, _WINDOW_BYTES), np.float32)
            self._window_halves = [numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]]
        return self._window_halves

    def _blocks(self, first: int, count: int):
        """Cuts a stretch into blocks that fit half of the window: (slice of the whole, half, first element, offset)."""
        self.drain()  # an earlier transfer may have been interrupted
        halves = self._halves()
        block = len(halves[0])
        for i, start in enumerate(range(0, count, block)):
            length = min(block, count - start)
            yield slice(start, start + length), halves[i % 2][:length], first + start, i % 2 * block * 4

    def write(self, stream: int, first: int, values: np.ndarray) -> None:
        """Writes fp32 ``values`` of shape (count,) into a stream of the state, from element ``first`` on.

        ``stream`` is MASTER_WEIGHTS, FIRST_MOMENT or SECOND_MOMENT of plimsoll.protocol. With int8 moments the second
        is written before the first.
        """
        self._bring(Kind.WRITE, first, values, lambda *where: protocol.pack_transfer(stream, *where))

    def accumulate(self, first: int, values: np.ndarray) -> None:
        """Adds fp32 ``values`` of shape (count,) to the gradients, from element ``first`` on.

        They are added once, whatever becomes of the service. ``accumulated`` counts the requests that were made of it
        since :meth:`clear`, which a trainer that attaches to a session calls first: the one before may have died in
        the middle, and even with something half added (``opened.accumulating``).
        """
        self._bring(Kind.ACCUMULATE, first, values, lambda *where: protocol.pack_accumulate(self.accumulated + 1, *where))

    def _bring(self, kind: Kind, first: int, values: np.ndarray, pack: Callable[[int, int, int], bytes]) -> None:
        """Makes requests about numbers in the window, the next when the last is answered: that alone can be repeated."""
        with self._lock:
            sent: Optional[Request] = None
            for where, half, start, offset in self._blocks(first, len(values)):
                half[:] = values[where]
                if sent is not None:
                    self.result(sent)
                sent = self.send(kind, pack(start, len(half), offset))
            if sent is not None:
                self.result(sent)

    def clear(self) -> None:
        """Sets all gradients to 0."""
        with self._lock:
            self.drain()
            self.call(Kind.CLEAR)

    def read(self, stream: int, first: int, count: int) -> np.ndarray:
        """The fp32 numbers of a stream of the state, as an array of shape (count,)."""
        values = np.empty(count, np.float32)
        with self._lock:
            sent: Deque[Tuple[slice, np.ndarray, Request]] = collections.deque()

            def take() -> None:
                where, half, request = sent.popleft()
                self.result(request)
                values[where] = half

            for where, half, start, offset in self._blocks(first, count):
                if len(sent) == 2:
                    take()
                body = protocol.pack_transfer(stream, start, len(half), offset)
                sent.append((where, half, self.send(Kind.READ, body)))
            while sent:
                take()
        return values

    # Steps

    def set_step(self, step: int) -> None:
        """Says that the state was written as a whole, and which step it is of: 0 for new weights."""
        self.call(Kind.SET_STEP, protocol.pack_number(step))
        self.step, self.initialized = step, True

    def ready(self, first: int, count: int) -> None:
        """Says that the gradients of a stretch of elements are final until the next step."""
        self.send(Kind.READY, protocol.pack_stretch(first, count))

    def norm(self) -> Request:
        """Asks for the sum of the squares of all gradients: see :meth:`norm_result`."""
        return self.send(Kind.NORM)

    def norm_result(self, request: Request) -> float:
        return protocol.parse_norm(self.result(request))

    def prepare(self, groups: Sequence[Sequence[float]]) -> Request:
        """Says that all gradients are final, and gives seven numbers for each group, for the next step.

        When the answer is there, whoever opens the session can make that step, whatever dies.
        """
        with self._lock:
            self.drain()
            return self.send(Kind.PREPARE, protocol.pack_prepare(self.step + 1, groups))

    def begin(self, grad_scale: float, groups: Optional[Sequence[Sequence[float]]], *, wait: bool) -> Request:
        """Begins the next step. Gradients are multiplied by ``grad_scale``; each group has seven numbers.

        Without ``groups`` it is the step that was prepared. With ``wait`` the answer comes when the step is done. See
        :meth:`begun`.
        """
        with self._lock:
            self.drain()
            return self.send(Kind.STEP, protocol.pack_step(self.step + 1, grad_scale, wait, groups))

    def begun(self, request: Request) -> float:
        """Waits for the answer of :meth:`begin`. The seconds that the step took, where it was waited for."""
        return protocol.parse_stepped(self.result(request), Kind.STEP)[1]

    def _stepped(self, request: Request) -> None:
        step, _ = protocol.parse_stepped(request.answer, Kind.STEP)
        if step != request.count:
            raise ProtocolError(f"step: the service has made step {step}: expected {request.count}")
        self.step, self.initialized = step, True

    def wait(self, first: int, count: int) -> Request:
        """Asks for an answer when the parameters of that stretch are those after the last step."""
        return self.send(Kind.WAIT, protocol.pack_wait(self.step, first, count))

    # Checkpoints

    def save(self, directory: str, training: Any = None, replica: int = 0, replicas: int = 1, *, identity: str = "") -> int:
        """Begins to save the state as it is now, in the background. The step that is saved.

        ``directory`` must be there; ``training`` is a JSON document of at most 64 KiB. Of several ranks that hold the
        same, each saves the share of ``replica``, counted from 0. ``identity`` tells this save from any other: all
        ranks give the same, and :meth:`commit` takes the files of that alone.
        """
        document: Dict[str, Any] = {"directory": os.path.abspath(directory), "training": training}
        document.update(replica=replica, replicas=replicas, identity=identity)
        return protocol.parse_number(self.call(Kind.SAVE, protocol.pack_document(document)), Kind.SAVE)

    def saved(self) -> int:
        """Waits until nothing is being saved any more. The step that was saved last."""
        return protocol.parse_number(self.call(Kind.SAVED), Kind.SAVED)

    def commit(self, directory: str, step: int, without: Sequence[int] = (), *, identity: str = "") -> None:
        """Makes what all ranks have saved at that step a checkpoint; the ranks ``without`` any state have saved nothing."""
        document: Dict[str, Any] = {"directory": os.path.abspath(directory), "step": step, "identity": identity}
        if without:
            document["ranks_without_state"] = list(without)
        protocol.parse_number(self.call(Kind.COMMIT, protocol.pack_document(document)), Kind.COMMIT)

    def load(self, directory: str, *, several: bool = False) -> Tuple[int, Any]:
        """Loads a checkpoint, or the newest in a folder. Its step, and its training document.

        Where ``several`` sessions load it together, the state is whole when :meth:`set_step` says that all have.
        """
        document = {"directory": os.path.abspath(directory), "several": several}
        step, training = protocol.parse_loaded(self.call(Kind.LOAD, protocol.pack_document(document)))
        self.step, self.initialized = step, not several
        return step, training

    def close(self, *, give_back: bool = False) -> None:
        """Ends the session. The state stays for who attaches next, unless it is given back."""
        with self._lock:
            try:
                if self._socket is not None:
                    self.call(Kind.CLOSE, protocol.pack_flags(int(give_back)))
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Lets go of the connection without a word, as the end of the process does."""
        self._disconnect()
        self._in_doubt = False
        if self._window is not None:
            os.close(self._window)
            self._window = None


_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A child that is forked, such as a data loader, must not keep a session from the next trainer."""
    for session in _sessions:
        session.abandon()


os.register_at_fork(after_in_child=_leave_to_parent)

_WITHOUT_RESULT = frozenset(
    (Kind.WINDOW, Kind.WRITE, Kind.READ, Kind.SET_STEP, Kind.READY, Kind.ACCUMULATE, Kind.CLEAR, Kind.CLOSE, Kind.PREPARE)
)


def _sealed(name: str, content: bytes) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return descriptor


def _send(connection: Optional[socket.socket], packet: bytes, descriptors: Sequence[int]) -> None:
    assert connection is not None
    if descriptors:
        socket.send_fds(connection, [packet], list(descriptors))
    else:
        connection.send(packet)


def _receive(connection: Optional[socket.socket]) -> Tuple[bytes, List[int]]:
    """One packet and the descriptors that came with it. ConnectionError at the end."""
    assert connection is not None
    room = socket.CMSG_SPACE(protocol.MAXIMUM_DESCRIPTORS * array.array("i").itemsize)
    packet, ancillary, flags, _ = connection.recvmsg(protocol.MAXIMUM_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    descriptors = list(numbers)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        _close(descriptors)
        raise ProtocolError(
            f"an answer of more than {protocol.MAXIMUM_PACKET} bytes or {protocol.MAXIMUM_DESCRIPTORS} descriptors; {protocol.MEND}"
        )
    if not packet:
        _close(descriptors)
        raise ConnectionResetError("the service has closed the connection")
    return packet, descriptors


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
