"""A session with the optimizer service: requests over a socket, data in shared pages."""

import collections
import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

import numpy as np

from plimsoll import protocol
from plimsoll.connection import Connection, Request
from plimsoll.descriptors import by_file, close_all, make_room
from plimsoll.errors import PlimsollError, ProtocolError
from plimsoll.pipes import new_file
from plimsoll.protocol import Kind

_WINDOW_BYTES = 16 << 20


class Arena:
    """Memory of a session that the service has mapped, too.

    ``memory`` is the mapping, ``bytes`` long up to the rest of its last page;
    ``type`` is that of the elements: "bf16", "fp16" or "fp32".
    """

    def __init__(self, description: protocol.ArenaDescription, descriptor: int, *, sealed: bool = True):
        self.name, self.component, self.type = description.name, description.component, description.type
        self.bytes = description.bytes
        self.identity = _identity(descriptor)
        _check_file(description, descriptor, sealed)
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


def _check_file(description: protocol.ArenaDescription, descriptor: int, sealed: bool) -> None:
    """A file that is too short, or could shrink, would end this process with a signal."""
    size = os.fstat(descriptor).st_size
    if size != description.mapped_bytes:
        raise ProtocolError(f"open: the file of arena {description.name} has {size} bytes: expected {description.mapped_bytes}")
    if not sealed:
        return
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"open: the file of arena {description.name} is no memfd: {error}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"open: the file of arena {description.name} is not sealed against shrinking")


class Holder(Connection):
    """A connection with the arenas of its session, which this process has mapped. It saves and loads what they hold."""

    def __init__(self, path: str, document: Dict[str, Any], patience: float):
        super().__init__(path, document, patience)
        make_room()
        try:
            opened, descriptors = self._connect()
        except ConnectionError as error:
            raise PlimsollError(str(error)) from error
        try:
            self.arenas = {a.component: Arena(a, d, sealed=self.folder is None) for a, d in zip(opened.arenas, descriptors)}
        except BaseException:
            self._disconnect()
            raise
        finally:
            close_all(descriptors)
        self.attached, self.service, self.opened = opened.attached, opened.service, opened

    def _has_state(self, opened: Any, descriptors: Sequence[int]) -> bool:
        found = {a.component: _identity(d) for a, d in zip(opened.arenas, descriptors)}
        return found == {a.component: a.identity for a in self.arenas.values()}

    def saved(self) -> int:
        """Waits until nothing is being saved any more. The step that was saved last."""
        return protocol.parse_number(self.call(Kind.SAVED), Kind.SAVED)

    def commit(self, directory: str, step: int, without: Sequence[int] = (), *, identity: str = "") -> None:
        """Makes what all ranks have saved at that step a checkpoint; the ranks ``without`` any state have saved nothing."""
        document: Dict[str, Any] = {"directory": os.path.abspath(directory), "step": step, "identity": identity}
        if without:
            document["ranks_without_state"] = list(without)
        protocol.parse_number(self.call(Kind.COMMIT, protocol.pack_document(document)), Kind.COMMIT)

    def close(self, *, give_back: bool = False, keep_tier: bool = False) -> None:
        """Ends the session. The state stays for who attaches next, unless it is given back. With ``keep_tier`` the files of a
        tier stay, which hold its last step.
        """
        with self._lock:
            try:
                if self._socket is not None:
                    self.call(Kind.CLOSE, protocol.pack_close(give_back, keep_tier))
            finally:
                self.abandon()


class Session(Holder):
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
        self._window: Optional[int] = None
        self._window_halves: List[np.ndarray] = []
        self._order: List[Tuple[int, int]] = []
        self._arriving = 0  # the step that was begun before its gradients were there, 0 for none
        self._arrived: List[bytes] = []  # the requests that said which of them are there
        self.elements = sum(p["count"] for p in document["parameters"])
        self.parameter_count = len(document["parameters"])
        super().__init__(path, document, patience)
        opened = self.opened
        self.initialized, self.step, self.kernel = opened.initialized, opened.step, opened.kernel
        self.accumulated = opened.accumulated

    @property
    def parameters(self) -> Arena:
        """The parameters after the last step: 16-bit copies, or fp32 master weights."""
        return self.arenas.get("parameters") or self.arenas["master_weights"]

    @property
    def gradients(self) -> Arena:
        return self.arenas["gradients"]

    # What a connection is about

    def _count(self, kind: Kind) -> int:
        if kind is Kind.CLEAR:
            return 0
        return 1 + (self.step if kind is Kind.STEP else self.accumulated)

    def _answered(self, request: Request) -> None:
        if request.kind is Kind.STEP:
            self._stepped(request)
        elif request.kind in (Kind.ACCUMULATE, Kind.CLEAR):
            self.accumulated = request.count
        elif request.kind is Kind.READY and protocol.is_arrived(request.body):
            self._arrived.append(request.body)
        elif request.kind is Kind.DECIDE:
            self.step, self._arriving, self._arrived = protocol.step_after(request.body), 0, []
        elif request.kind is Kind.WAIT:
            step, seconds = protocol.parse_stepped(request.answer, Kind.WAIT)
            if step == self._arriving and seconds > 0:
                self._arriving, self._arrived = 0, []

    def _parse(self, result: bytes) -> protocol.Opened:
        return protocol.parse_opened(result, self.elements)

    def _greet(self, opened: protocol.Opened) -> None:
        if self._window is not None:
            self._tell(Kind.WINDOW, protocol.pack_window(_WINDOW_BYTES), [self._window])
        for body in protocol.pack_order(self._order) if self._order else ():
            self._tell(Kind.ORDER, body)
        # A step that has all gradients, or was given up by a load that had no answer, needs none.
        for body in self._arrived if opened.arriving_step else ():
            self._tell(Kind.READY, body)

    def _tell(self, kind: Kind, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Makes a request on a new connection, before the unanswered ones."""
        answer = self._ask_first(protocol.pack(kind, 0, body), descriptors)
        protocol.parse_nothing(protocol.parse_answer(answer, kind, 0), kind)

    # The window

    def _halves(self) -> List[np.ndarray]:
        """The window, as two halves of fp32 numbers: one is filled while the other is worked on."""
        if self._window is None:
            descriptor = self._new_window()
            self.call(Kind.WINDOW, protocol.pack_window(_WINDOW_BYTES), [descriptor])
            self._window = descriptor
            numbers = np.frombuffer(mmap.mmap(descriptor, _WINDOW_BYTES), np.float32)
            self._window_halves = [numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]]
        return self._window_halves

    def _new_window(self) -> int:
        if self.folder:
            return new_file(self.folder, _WINDOW_BYTES)
        descriptor = os.memfd_create("plimsoll-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _WINDOW_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return descriptor

    def _blocks(self, first: int, count: int):
        """Cuts a range into blocks that fit half of the window: (slice of the whole, half, first element, offset)."""
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

    def set_step(self, step: int, *, keep_own: bool = False) -> None:
        """Says that the state was written as a whole, and which step it is of: 0 for new weights.

        With ``keep_own`` each parameter has had the steps that it had before, or those of :meth:`set_own_steps`; without,
        each has had all.
        """
        self.call(Kind.SET_STEP, protocol.pack_set_step(step, keep_own))
        self.step, self.initialized = step, True

    def go_back(self, step: int) -> None:
        """Makes the state before the last step the state: a tier still has it where ``opened.can_go_back`` says so."""
        self.call(Kind.SET_STEP, protocol.pack_go_back(step))
        self.step = step

    def own_steps(self) -> List[int]:
        """How many steps each parameter has had, in the order of the document: fewer than the state where it had no
        gradient.
        """
        steps: List[int] = []
        while len(steps) < self.parameter_count:
            count = min(protocol.OWN_STEPS, self.parameter_count - len(steps))
            steps += protocol.parse_own_steps(self.call(Kind.OWN_STEPS, protocol.pack_range(len(steps), count)), count)
        return steps

    def set_own_steps(self, steps: Sequence[int]) -> None:
        """Says how many steps each parameter of a state has had that is being written: see :meth:`set_step`."""
        for first in range(0, len(steps), protocol.OWN_STEPS):
            self.call(Kind.SET_OWN_STEPS, protocol.pack_own_steps(first, steps[first : first + protocol.OWN_STEPS]))

    def ready(self, first: int, count: int) -> None:
        """Says that the gradients of a range of elements are final until the next step.

        While a step is under way that was begun before its gradients were there, that is what they are of.
        """
        with self._lock:
            if self._arriving:
                self.send(Kind.READY, protocol.pack_arrived(first, count, self._arriving))
            else:
                self.send(Kind.READY, protocol.pack_range(first, count))

    def missing(self, first: int, count: int) -> None:
        """Says that the parameters of a range of elements get no gradients in the step under way, which was begun before:
        it leaves them alone.
        """
        with self._lock:
            self.send(Kind.READY, protocol.pack_missing(first, count, self._arriving))

    def norm(self) -> Request:
        """Asks for the sum of the squares of all gradients: see :meth:`norm_result`."""
        return self.send(Kind.NORM)

    def norm_result(self, request: Request) -> float:
        return protocol.parse_norm(self.result(request))

    def prepare(self, groups: Sequence[Sequence[float]], left_alone: Sequence[int] = ()) -> Request:
        """Says that all gradients are final, and gives seven numbers for each group, for the next step.

        The step leaves the parameters of some numbers alone, in the order of the document, as they have no gradients.
        When the answer is there, whoever opens the session can make that step, whatever dies.
        """
        with self._lock:
            self.drain()
            left = protocol.bits(left_alone, self.parameter_count)
            return self.send(Kind.PREPARE, protocol.pack_prepare(self.step + 1, groups, left))

    def begin(
        self,
        grad_scale: float,
        groups: Optional[Sequence[Sequence[float]]],
        *,
        wait: bool,
        arriving: bool = False,
        left_alone: Sequence[int] = (),
        speculates: bool = False,
    ) -> Request:
        """Begins the next step. Gradients are multiplied by ``grad_scale``; each group has seven numbers.

        ``left_alone`` is as in :meth:`prepare`. Without ``groups`` it is the step that was prepared. With ``wait`` the answer comes when the step is done. See
        :meth:`begun`.

        With ``arriving`` the step begins before its gradients are there. The service updates parameters as :meth:`ready`
        says that their gradients are final, and the parameters of a range may be waited for when its gradients are
        there. Until all gradients are there, nothing else but :meth:`load` and :meth:`close` may be asked for. If this
        process ends before, the state is lost: the next one finds it not initialized, with its ``torn_step``.

        An arriving step that ``speculates`` changes parameters before it is known what becomes of it: see :meth:`decide`. If
        this process ends before, the state is that of the step before.
        """
        with self._lock:
            self.drain()
            left = protocol.bits(left_alone, self.parameter_count) if groups is not None else b""
            body = protocol.pack_step(self.step + 1, grad_scale, wait, groups, arriving, left, speculates)
            request = self.send(Kind.STEP, body)
            if arriving:
                self.result(request)  # at once; what follows is about this step
            return request

    def begun(self, request: Request) -> float:
        """Waits for the answer of :meth:`begin`. The seconds that the step took, where it was waited for."""
        return protocol.parse_stepped(self.result(request), Kind.STEP)[1]

    def decide(self, grad_scale: Optional[float]) -> Request:
        """Says by what gradients are multiplied in the step under way, which speculates and whose gradients are all there.
        None skips the step: when the answer is there, the state is that of the step before.
        """
        with self._lock:
            self.drain()
            return self.send(Kind.DECIDE, protocol.pack_decide(self.step, grad_scale))

    def _stepped(self, request: Request) -> None:
        step, _ = protocol.parse_stepped(request.answer, Kind.STEP)
        if step != request.count:
            raise ProtocolError(f"step: the service has made step {step}: expected {request.count}")
        self.step, self.initialized = step, True
        self._arriving, self._arrived = step * protocol.is_arriving(request.body), []

    def order(self, ranges: Sequence[Tuple[int, int]]) -> None:
        """Says in which order steps update ranges, each (first, count): these first, from the next step on.

        Without ranges, steps are in the service's own order. The order changes no result.
        """
        with self._lock:
            ranges = list(ranges)
            for body in protocol.pack_order(ranges):
                self.send(Kind.ORDER, body)
            self._order = ranges

    def wait(self, first: int, count: int) -> Request:
        """Asks for an answer when the parameters of that range are those after the last step, and makes them urgent.

        See :meth:`waited`.
        """
        return self.send(Kind.WAIT, protocol.pack_wait(self.step, first, count))

    def waited(self, request: Request) -> float:
        """Waits for the answer of :meth:`wait`. The seconds of the step if it is finished as a whole, else 0."""
        return protocol.parse_stepped(self.result(request), Kind.WAIT)[1]

    def delta(self, *, begin: bool = False, whole: bool = False) -> bytes:
        """The message about what the last step has changed of the parameters (docs/delta.md), or about all of them.

        With ``begin`` it says that nothing has changed. From then on, as after ``whole``, the service notes what steps
        change. Raises ServiceError where that is not known.
        """
        with self._lock:
            self.drain()
            descriptor = new_file(self.folder) if self.folder else os.memfd_create("plimsoll-delta", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                size = protocol.parse_number(self.call(Kind.DELTA, protocol.pack_delta(begin=begin, whole=whole), [descriptor]), Kind.DELTA)
                with open(descriptor, "rb", closefd=False) as file:
                    message = file.read()
            finally:
                os.close(descriptor)
        if len(message) != size:
            raise ProtocolError(f"delta: the service has written {len(message)} bytes: expected {size}; {protocol.MEND}")
        return message

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

    def load(self, directory: str, *, several: bool = False) -> Tuple[int, Any]:
        """Loads a checkpoint, or the newest in a folder. Its step, and its training document.

        Where ``several`` sessions load it together, the state is whole when :meth:`set_step` says that all have.
        """
        document = {"directory": os.path.abspath(directory), "several": several}
        step, training = protocol.parse_loaded(self.call(Kind.LOAD, protocol.pack_document(document)))
        self.step, self.initialized = step, not several
        self._arriving, self._arrived = 0, []
        return step, training

    def abandon(self) -> None:
        """Lets go of the connection without a word, as the end of the process does."""
        super().abandon()
        if self._window is not None:
            os.close(self._window)
            self._window = None
