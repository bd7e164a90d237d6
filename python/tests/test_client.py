"""Sessions, with a service that says what a test wants, and with the real one."""

import contextlib
import fcntl
import gc
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awaited import NEVER, ended
from plimsoll import PlimsollError, ProtocolError, Service, ServiceError, Session, StateLost, connection, protocol, trust
from plimsoll.protocol import Kind
from plimsoll.service import _end
from test_protocol import OPENED, answer

DOCUMENT = {
    "schema": "plimsoll.open/1", "job": "test", "rank": 0, "world": 1, "local_world": 1, "part": "bf16", "optimizer": "adamw", "state": "split",
    "moments": "fp32", "parameter": "bf16", "gradient": "bf16", "groups": 1,
    "parameters": [{"name": "weight", "shape": [10, 10], "group": 0, "first": 0, "count": 100}],
}  # fmt: skip
GROUP = (1e-2, 0.9, 0.999, 1e-8, 0.0, 0, 0)


@pytest.fixture(autouse=True)
def never_hangs():
    def hangs(*_):
        pytest.fail("this test hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(NEVER)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def memfd(size=4096, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
    descriptor = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class Scripted:
    """Answers each connection's requests by functions of a script: (connection, kind, number) -> None."""

    def __init__(self, directory, *connections):
        self.path = str(directory / "socket")
        self.seen = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, args=(connections,), daemon=True)
        self._thread.start()

    def _serve(self, connections):
        for script in connections:
            connection, _ = self._listener.accept()
            with connection:
                for act in script:
                    packet, descriptors, _, _ = socket.recv_fds(connection, 65536, 16)
                    for d in descriptors:
                        os.close(d)
                    if not packet:
                        break
                    _, _, kind, number, _ = protocol.HEADER.unpack_from(packet)
                    self.seen.append(Kind(kind).name.lower())
                    act(connection, kind, number)
        self._listener.close()


ARENAS = [memfd(), memfd()]
SHORT, UNSEALED, NO_MEMORY = memfd(100), memfd(seals=0), os.open("/dev/null", os.O_RDONLY)


def open_well(connection, kind, number, arenas=ARENAS, **changes):
    body = json.dumps({**OPENED, **changes}).encode()
    socket.send_fds(connection, [answer(kind, number, body)], arenas)


def send(body=b"", status=0):
    return lambda connection, kind, number: connection.send(answer(kind, number, body, status))


def nothing(connection, kind, number):
    """Leaves a request without an answer."""


def raw(packet):
    return lambda connection, kind, number: connection.send(packet)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_good_session(tmp_path):
    service = Scripted(tmp_path, [open_well, send(struct.pack("<d", 2.5)), send(struct.pack("<Qd", 1, 0.5)), send()])
    session = Session(service.path, DOCUMENT)
    session.parameters.memory[:4] = b"abcd"
    assert os.pread(ARENAS[0], 4, 0) == b"abcd"
    assert session.norm_result(session.norm()) == 2.5
    assert session.begun(session.begin(1.0, [GROUP], wait=True)) == 0.5 and session.step == 1
    session.close()
    assert service.seen == ["open", "norm", "step", "close"]
    with pytest.raises(PlimsollError, match="the session is closed"):
        session.norm()


@pytest.mark.parametrize(
    "opening, message",
    [
        (lambda c, k, n: open_well(c, k, n, ARENAS[:1]), "1 file descriptors came with 2 arenas"),
        (lambda c, k, n: open_well(c, k, n, [ARENAS[0], SHORT]), "has 100 bytes: expected 4096"),
        (lambda c, k, n: open_well(c, k, n, [ARENAS[0], UNSEALED]), "not sealed against shrinking"),
        (lambda c, k, n: open_well(c, k, n, [ARENAS[0], NO_MEMORY]), "has 0 bytes"),
        (lambda c, k, n: open_well(c, k, n, elements=7), "expected 100"),
        (send(b"{}"), "schema is None"),
        (send(b"\xff"), "no JSON"),
        (send(b"the host is full", 3), "the host is full \\(does_not_fit\\)"),
        (raw(b"HTTP/1.1 400 Bad Request"), "an answer begins with"),
        (raw(b"x"), "an answer of 1 bytes"),
    ],
)
def test_bad_openings(tmp_path, opening, message):
    before = descriptors()
    service = Scripted(tmp_path, [opening])
    with pytest.raises(PlimsollError, match=message):
        Session(service.path, DOCUMENT)
    service._thread.join()
    assert descriptors() <= before  # the files that came are closed


@given(
    st.one_of(
        st.binary(min_size=1, max_size=100),
        st.binary(max_size=60).map(lambda b: answer(Kind.STEP, 1, b)),
        st.binary(max_size=60).map(lambda b: answer(Kind.STEP, 1, b, 6)),
    )
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bad_answers(tmp_path_factory, packet):
    if packet == answer(Kind.STEP, 1, struct.pack("<Qd", 1, 0)):
        return
    service = Scripted(tmp_path_factory.mktemp("service"), [open_well, raw(packet)])
    session = Session(service.path, DOCUMENT, patience=0)
    with pytest.raises(PlimsollError):
        session.begun(session.begin(1.0, [GROUP], wait=True))
    session.abandon()


def test_a_session_that_went_wrong_says_so_from_then_on(tmp_path):
    service = Scripted(tmp_path, [open_well, raw(b"nonsense")])
    session = Session(service.path, DOCUMENT)
    with pytest.raises(ProtocolError, match="norm: an answer of 8 bytes"):
        session.norm_result(session.norm())
    with pytest.raises(PlimsollError, match="closed after an error: norm: an answer of 8 bytes"):
        session.norm()


def test_a_refusal_of_what_nobody_waits_for_is_raised(tmp_path):
    service = Scripted(tmp_path, [open_well, send(b"no such elements", 2), send(struct.pack("<d", 1.0))])
    session = Session(service.path, DOCUMENT)
    session.ready(1000, 1)
    request = session.norm()
    with pytest.raises(ServiceError, match="no such elements"):
        session.norm_result(request)
    assert session.norm_result(request) == 1.0


def test_what_had_no_answer_is_sent_again(tmp_path):
    # The first service dies with two requests that it has not answered.
    service = Scripted(tmp_path, [open_well, nothing, nothing], [open_well, send(), send(struct.pack("<d", 4.0))])
    session = Session(service.path, DOCUMENT)
    session.ready(0, 100)
    assert session.norm_result(session.norm()) == 4.0
    assert service.seen == ["open", "ready", "norm", "open", "ready", "norm"]


def test_the_order_is_sent_again(tmp_path):
    ranges = [(i % 100, 1) for i in range(5000)]  # more than a message holds
    first = [open_well, send(), send(), send(), nothing]
    service = Scripted(tmp_path, first, [open_well, send(), send(), send(struct.pack("<d", 4.0))])
    session = Session(service.path, DOCUMENT)
    session.order([(7, 1)])
    session.order(ranges)
    assert session.norm_result(session.norm()) == 4.0
    assert service.seen == ["open", "order", "order", "order", "norm", "open", "order", "order", "norm"]


def test_a_wait_says_whether_the_step_is_finished(service):
    session = Session(service.socket, DOCUMENT)
    session.set_step(0)
    session.order([(50, 50), (0, 10)])
    session.begun(session.begin(1.0, [GROUP], wait=False))
    assert 0 < session.waited(session.wait(0, 100)) < 10
    with pytest.raises(ServiceError, match="order: 2 elements from 99 on: expected a range within the shard's 100"):
        session.order([(99, 2)])
        session.drain()


def test_a_request_that_ends_the_service_is_not_sent_forever(tmp_path):
    service = Scripted(tmp_path, *[[open_well, nothing]] * 10)
    session = Session(service.path, DOCUMENT)
    with pytest.raises(PlimsollError, match="has ended 3 times at the same request, norm"):
        session.norm_result(session.norm())


def test_lost_state_is_noticed(tmp_path):
    anew = [memfd(), memfd()]
    service = Scripted(tmp_path, [open_well, nothing], [lambda c, k, n: open_well(c, k, n, anew)])
    session = Session(service.path, DOCUMENT)
    with pytest.raises(StateLost, match="was started again without its state: the state of rank 0 is gone; load the last checkpoint"):
        session.norm_result(session.norm())


def test_a_service_that_does_not_come_back(tmp_path):
    service = Scripted(tmp_path, [open_well, nothing])
    session = Session(service.path, DOCUMENT, patience=0.2)
    with pytest.raises(PlimsollError, match="has ended .* no other was started within 0.2 s"):
        session.norm_result(session.norm())


def test_there_is_no_service(tmp_path):
    with pytest.raises(PlimsollError, match="no optimizer service answers at .*; start one \\(plimsoll serve --socket"):
        Session(str(tmp_path / "socket"), DOCUMENT)


ANOTHER = 65534


@pytest.fixture
def become(monkeypatch):
    """Makes this process one of another user than before: in earnest where it may, else as far as it asks."""

    def become(user):
        if own == 0:
            os.seteuid(user)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: user)

    own = os.geteuid()
    yield become
    if own == 0:
        os.seteuid(0)


def test_a_service_of_another_user_is_not_spoken_to(tmp_path, monkeypatch, become):
    own = os.geteuid()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "socket"))
    # The credentials of a socket are those of whoever listens.
    become(ANOTHER if own == 0 else own)
    listener.listen()
    become(0 if own == 0 else ANOTHER)
    monkeypatch.setattr(trust, "check_directory", lambda name: None)  # which is another's, too, in some of these cases
    with pytest.raises(PlimsollError, match="process [0-9]+ of user [0-9]+ answers: expected user [0-9]+ or root"):
        Session(str(tmp_path / "socket"), DOCUMENT)
    connection, _ = listener.accept()
    assert connection.recv(1) == b""  # it was told nothing


@pytest.mark.parametrize("which", ["directory", "link", "directory behind a link"])
def test_a_socket_in_a_directory_of_another_user_is_not_opened(tmp_path, become, which):
    directory, link = tmp_path / "directory", tmp_path / "link"
    directory.mkdir(mode=0o755)
    link.symlink_to(directory)
    if os.geteuid() == 0:
        os.chown(link if which == "link" else directory, ANOTHER, ANOTHER, follow_symlinks=False)
    else:
        become(ANOTHER)
    with pytest.raises(PlimsollError, match="the directory of the socket, .*, belongs to user [0-9]+: expected user [0-9]+ or root"):
        Session(str((directory if which == "directory" else link) / "socket"), DOCUMENT)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_socket_in_a_directory_that_others_may_write_to_is_not_opened(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(PlimsollError, match=f"has mode {mode:#o}, so that other users may write to it .* expected 0700"):
        Session(str(tmp_path / "socket"), DOCUMENT)


def test_a_link_of_ones_own_to_the_directory_of_a_socket(tmp_path):
    (tmp_path / "service").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "service")
    Scripted(tmp_path / "service", [open_well, send()])
    Session(str(tmp_path / "link" / "socket"), DOCUMENT).close()


def test_program_is_not_found(monkeypatch):
    monkeypatch.setenv("PLIMSOLL", "/nowhere/plimsoll")
    with pytest.raises(PlimsollError, match="/nowhere/plimsoll was not found .*set PLIMSOLL to its path"):
        Service()


def test_program_that_does_not_serve(monkeypatch):
    monkeypatch.setenv("PLIMSOLL", "/bin/false")
    with pytest.raises(PlimsollError, match="has ended with code 1 before it listened"):
        Service()


def test_state_is_moved_through_the_window(service):
    count = 5_000_001  # three halves of a window
    document = {**DOCUMENT, "parameters": [{"name": "weight", "shape": [count], "group": 0, "first": 0, "count": count}]}
    session = Session(service.socket, document)
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    for stream in (protocol.MASTER_WEIGHTS, protocol.FIRST_MOMENT, protocol.SECOND_MOMENT):
        session.write(stream, 0, values)
        np.testing.assert_array_equal(session.read(stream, 0, count), values)
        np.testing.assert_array_equal(session.read(stream, 4_999_990, 11), values[-11:])
        session.write(stream, 17, values[:3])
        np.testing.assert_array_equal(session.read(stream, 16, 5), [values[16], *values[:3], values[20]])
    session.set_step(12)
    session.close()
    again = Session(service.socket, document)
    assert again.attached and again.initialized and again.step == 12
    again.close(give_back=True)
    anew = Session(service.socket, document)
    assert not anew.attached and not anew.initialized
    with pytest.raises(ServiceError, match="refused"):
        anew.read(protocol.FIRST_MOMENT, count, 1)
    with pytest.raises(ServiceError, match="busy|held by process"):
        Session(service.socket, document)


def test_gradients_are_added_up(service):
    count = 2_500_001  # more than half a window
    document = {**DOCUMENT, "parameters": [{"name": "weight", "shape": [count], "group": 0, "first": 0, "count": count}]}
    session = Session(service.socket, document)
    session.set_step(0)
    session.clear()
    session.accumulate(0, np.full(count, 0.5, np.float32))
    assert session.accumulated == 2
    request = session.send(Kind.ACCUMULATE, protocol.pack_accumulate(3, 7, 1, 0))  # and is interrupted
    session.accumulate(count - 1, np.array([1.5], np.float32))
    assert request.answer is not None and session.accumulated == 4
    assert session.norm_result(session.norm()) == 0.25 * (count - 2) + 1 + 4
    session.begun(session.begin(1.0, [GROUP], wait=True))
    session.close()
    again = Session(service.socket, document)
    assert again.opened.accumulated == 4 and again.opened.accumulating == 0 and again.opened.cleared_step == 0
    again.clear()
    again.accumulate(0, np.ones(1, np.float32))
    assert again.accumulated == 1 and again.norm_result(again.norm()) == 1
    with pytest.raises(ServiceError, match="accumulate 5: 1 were finished since the gradients were cleared, so the next is 2"):
        again.call(Kind.ACCUMULATE, protocol.pack_accumulate(5, 0, 1, 0))


def test_numbers_are_sent_when_those_before_are_there(tmp_path):
    # The service dies with the second half of what is added, and only that is sent again.
    count = 2_500_000
    shared = [memfd(5_001_216), memfd(5_001_216)]
    arenas = [dict(a, bytes=2 * count, mapped_bytes=5_001_216) for a in OPENED["arenas"]]

    def opened(connection, kind, number):
        body = json.dumps({**OPENED, "elements": count, "arenas": arenas}).encode()
        socket.send_fds(connection, [answer(kind, number, body)], shared)

    service = Scripted(tmp_path, [opened, send(), send(), nothing], [opened, send(), send(), send()])
    document = {**DOCUMENT, "parameters": [{"name": "weight", "shape": [count], "group": 0, "first": 0, "count": count}]}
    session = Session(service.path, document)
    session.accumulate(0, np.ones(count, np.float32))
    assert session.accumulated == 2
    session.write(protocol.FIRST_MOMENT, 0, np.ones(10, np.float32))
    assert service.seen == ["open", "window", "accumulate", "accumulate", "open", "window", "accumulate", "write"]


def test_many_requests_need_no_reading(service):
    session = Session(service.socket, DOCUMENT)
    session.set_step(0)
    for i in range(5000):
        session.ready(i % 100, 1)
    assert session.norm_result(session.norm()) == 0


def test_a_step_that_was_interrupted_counts(service):
    session = Session(service.socket, DOCUMENT)
    session.set_step(0)
    session.begin(1.0, [GROUP], wait=True)  # nobody waits for its answer
    assert session.begun(session.begin(1.0, [GROUP], wait=True)) >= 0
    assert session.step == 2


@pytest.mark.parametrize("where", ["before it is sent", "after the answer", "after the step is noted"])
def test_an_interrupt_at_any_point_loses_nothing(service, monkeypatch, where):
    session = Session(service.socket, DOCUMENT)
    session.set_step(0)
    session._socket.settimeout(60)

    def interrupted(*of, after):
        act = getattr(*of)

        def once(*arguments):
            if after:
                act(*arguments)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(*of, once)

    for step in range(1, 6):  # more often than a request that ends the service is sent
        if where == "before it is sent":
            interrupted(session, "_transmit", after=False)
        elif where == "after the answer":
            interrupted(connection, "_receive", after=True)
        else:
            interrupted(session, "_stepped", after=True)
        with pytest.raises(KeyboardInterrupt):
            session.begun(session.begin(1.0, [GROUP], wait=True))
        session.drain()
        assert session.step == step
    request = session.norm()
    for _ in range(5):
        interrupted(connection, "_receive", after=True)
        with pytest.raises(KeyboardInterrupt):
            session.norm_result(request)
    assert session.norm_result(request) == 0
    assert session.begun(session.begin(1.0, [GROUP], wait=True)) >= 0 and session.step == 6


def test_interrupts_at_random(service):
    session = Session(service.socket, DOCUMENT)
    session.set_step(0)
    numbers = random.Random(0)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(1000):
            step = session.step
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    signal.setitimer(signal.ITIMER_REAL, numbers.uniform(1e-5, 4e-4))
                    session.ready(0, 50)
                    session.norm_result(session.norm())
                    session.begun(session.begin(1.0, [GROUP], wait=True))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            session.drain()
            assert session.step - step in (0, 1)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_interrupts_while_gradients_arrive(service):
    session, plain = (Session(service.socket, {**DOCUMENT, "part": part}) for part in ("arriving", "plain"))
    numbers, interrupted = random.Random(0), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    for s in (session, plain):
        s.set_step(0)
        np.frombuffer(s.gradients.memory, np.uint16, 100)[:] = 0x3F80
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(500):
            step = session.step
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, numbers.uniform(1e-5, 1e-3))
                    session.begun(session.begin(1.0, [GROUP], wait=False, arriving=True))
                    session.ready(0, 50)
                    session.ready(50, 50)
                    session.waited(session.wait(0, 100))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            session.drain()
            if session.step > step:  # it has begun, and perhaps only some gradients are there
                session.ready(0, 100)
                assert session.waited(session.wait(0, 100)) > 0 and session.step == step + 1
    finally:
        signal.signal(signal.SIGALRM, before)
    for _ in range(session.step):
        plain.begun(plain.begin(1.0, [GROUP], wait=True))
    assert interrupted > 20 and session.step > 20
    np.testing.assert_array_equal(session.read(protocol.MASTER_WEIGHTS, 0, 100), plain.read(protocol.MASTER_WEIGHTS, 0, 100))


def open_arriving(connection, kind, number):
    open_well(connection, kind, number, arriving_step=1)


def test_the_arrived_gradients_are_sent_again(tmp_path):
    stepped = send(struct.pack("<Qd", 1, 0.0))
    first = [open_well, stepped, send(), nothing]
    service = Scripted(tmp_path, first, [open_arriving, send(), send(), send(struct.pack("<Qd", 1, 0.5)), nothing])
    session = Session(service.path, DOCUMENT)
    session.begun(session.begin(1.0, [GROUP], wait=False, arriving=True))
    session.ready(0, 60)
    session.drain()
    session.ready(60, 40)
    assert session.waited(session.wait(0, 100)) == 0.5
    assert service.seen == ["open", "step", "ready", "ready", "open", "ready", "ready", "wait"]


def test_the_gradients_of_a_step_that_was_given_up_are_not_sent_again(tmp_path):
    first = [open_well, send(struct.pack("<Qd", 1, 0.0)), send(), nothing]
    service = Scripted(tmp_path, first, [open_well, send(struct.pack("<Q", 0))])
    session = Session(service.path, DOCUMENT)
    session.begin(1.0, [GROUP], wait=False, arriving=True)
    session.ready(0, 60)
    assert session.load("anywhere") == (0, None)  # the service has given up the step, and then died
    assert service.seen == ["open", "step", "ready", "load", "open", "load"]


def test_forked_children_do_not_hold_the_session(service):
    session = Session(service.socket, DOCUMENT)
    session.set_step(3)
    said, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            session.norm()
        except PlimsollError:
            os.write(says, b"!")
            signal.pause()
        os._exit(1)
    os.close(says)
    assert os.read(said, 1) == b"!"  # before it runs at all it has what this process has
    os.close(said)
    session.abandon()
    again = Session(service.socket, DOCUMENT)
    assert again.step == 3 and os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_service_ends_with_its_owner(tmp_path):
    program = "import os, sys, plimsoll; s = plimsoll.Service(); print(s.process.pid, s.socket, flush=True); sys.stdin.read()"
    for how in (signal.SIGKILL, None):
        owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        pid, path = owner.stdout.readline().split()
        assert os.path.exists(path) and os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
        owner.send_signal(how) if how else owner.stdin.close()
        owner.wait(NEVER)
        ended(int(pid))
        assert not os.path.exists(os.path.dirname(path))


def test_a_service_that_takes_its_time_to_end_is_not_killed(tmp_path):
    """It may be writing a checkpoint."""
    os.mkfifo(tmp_path / "disk")
    script = f"cat; read line < {tmp_path}/disk; touch {tmp_path}/saved"
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    wait = process.wait

    def goes_on(seconds):
        assert seconds >= 600
        (tmp_path / "disk").write_text("\n")
        return wait(seconds)

    process.wait = goes_on
    _end(process, str(tmp_path / "nothing"), os.getpid())
    assert process.returncode == 0 and (tmp_path / "saved").exists()


def test_a_forked_child_closes_no_file_that_is_not_its_own():
    service = Service()
    number = service.process.stdin.fileno()
    child = os.fork()
    if child == 0:
        found = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), number)  # a file of the child's, which may have that number now
            del service
            gc.collect()
            os.fstat(number)
            found = 0
        finally:
            os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    service.close()
