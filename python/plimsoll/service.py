"""A service of this process's own, for where none was started for it."""

import atexit
import contextlib
import importlib.metadata
import itertools
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
import weakref
from typing import List, Optional, Sequence, Tuple

from plimsoll import folders, pipes
from plimsoll.errors import PlimsollError

#: The job of a process that names none.
UNNAMED = "job"

_PATIENCE = 30.0  # seconds until a service listens


def find_program() -> str:
    """The program plimsoll: what $PLIMSOLL names, what was installed with this package, or what is on PATH."""
    named = os.environ.get("PLIMSOLL")
    program = shutil.which(named) if named else _installed() or shutil.which("plimsoll")
    if program is None:
        raise PlimsollError(
            f"the program {named or 'plimsoll'} was not found {'($PLIMSOLL)' if named else 'on PATH'}: put it "
            "on PATH, or set PLIMSOLL to its path"
        )
    return program


def _installed() -> Optional[str]:
    """The program that was installed with this package, wherever pip has put it."""
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin")  # pip install --target
    places = [os.path.join(folder, "plimsoll") for folder in (sysconfig.get_path("scripts"), beside)]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a folder of sources
        files = importlib.metadata.files("plimsoll-training") or ()
        places += [str(file.locate()) for file in files if file.name == "plimsoll"]  # pip install --user
    return next(filter(None, map(shutil.which, places)), None)


class Service:
    """A running ``plimsoll serve``, in a folder that only this user may enter.

    It reads from a pipe that this process holds, and ends when that ends: with
    :meth:`close`, or with this process, however that ends. ``socket`` is the
    path to give to :class:`plimsoll.Session`. With a ``tier`` the state is in
    files in these folders, with so much ``memory`` for what is under way.

    Where the host forbids sockets or memory files, the state is in files of a
    folder, and requests go through pipes there. A warning says so. The state of
    a named ``job`` then outlives a process that dies, for the next one of the
    job.
    """

    def __init__(self, *, tier: Sequence[str] = (), memory: Optional[str] = None, job: Optional[str] = None) -> None:
        #: Why the state is in a folder, or None.
        self.reason = folders.reason()
        if self.reason is None:
            # The name of a socket has at most 107 bytes.
            parent = tempfile.gettempdir()
            # The service makes the folder, and so removes it also where this
            # process is killed.
            directory = os.path.join(parent if len(parent) <= 60 else "/tmp", f"plimsoll-{os.getpid()}-{secrets.token_hex(8)}")
            self.socket = os.path.join(directory, "socket")
            where = ["--socket", self.socket]
        else:
            candidates = folders.candidates(job)
            directory = candidates[0]
            self.socket = os.path.join(directory, pipes.REQUESTS)
            where = ["--folder", ",".join(candidates)]
        command: List[str] = [find_program(), "serve", *where, "--until-stdin-closes"]
        self.tier, self.memory = tuple(tier), memory
        if tier:
            command += ["--tier", ",".join(tier)]
        if memory:
            command += ["--memory", memory]
        # In a process group of its own: the interrupt of a terminal is this
        # process's to handle, and the state must outlive its handling.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        self.instances = itertools.count()
        self.close = weakref.finalize(self, _end, self.process, directory if self.reason is None else None, os.getpid())
        atexit.register(_note_failure)  # runs before the states of services are given back
        _services.add(self)
        try:
            self._await()
        except BaseException:
            self.close()
            raise
        if self.reason is not None:
            self._tell(job)

    def _tell(self, job: Optional[str]) -> None:
        directory = os.path.dirname(self.socket)
        if job is not None:
            _say(self.process, "keep")
            lasts = f"it stays there for the next process of job {job} if this one dies (rm -r {directory} gives it back)"
        else:
            lasts = "it ends with this process; name the job (PLIMSOLL_JOB), and it stays for the next process if this one dies"
        warnings.warn(f"plimsoll: {self.reason}: the optimizer's state is in files, {directory} first; {lasts}", stacklevel=2)

    def _await(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self.reason is not None:
            if pipes.is_listening(self.socket):
                return
            self._check_start(deadline, None)
            time.sleep(0.005)
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(self.socket)
                    return
                except OSError as error:
                    self._check_start(deadline, error)
            time.sleep(0.005)

    def _check_start(self, deadline: float, error: Optional[OSError]) -> None:
        if self.process.poll() is not None:
            raise PlimsollError(
                f"{self.process.args[0]} serve has ended with code {self.process.returncode} before it listened; see its output"
            ) from None
        if time.monotonic() > deadline:
            why = f": {error}" if error else ""
            raise PlimsollError(f"{self.process.args[0]} serve does not listen at {self.socket} after {_PATIENCE:g} s{why}") from None


_services: "weakref.WeakSet[Service]" = weakref.WeakSet()
_shared: "weakref.WeakValueDictionary[str, Service]" = weakref.WeakValueDictionary()  # by job
_sharing = threading.Lock()


def shared_service(job: str, tier: Sequence[str] = (), memory: Optional[str] = None) -> Tuple[Service, int]:
    """The service of this process for a job, and the instance that tells the caller's sessions there from those of others.

    The service is started for the first caller, and ends when none holds it any more.
    """
    with _sharing:
        service = _shared.get(job)
        if service is None or service.process.poll() is not None:
            named = job if job != UNNAMED or os.environ.get("PLIMSOLL_JOB") else None
            service = _shared[job] = Service(tier=tier, memory=memory, job=named)
        elif (service.tier, service.memory) != (tuple(tier), memory):
            raise PlimsollError(
                f"this process has a service of job {job} with tier {list(service.tier)} and memory {service.memory}, and another "
                f"optimizer asks for tier {list(tier)} and memory {memory}: give all optimizers of a job the same, or another job"
            )
        return service, next(service.instances)


def _leave_to_parent() -> None:
    """A child that is forked must not hold the pipe open beyond this process. Its optimizers have a service of their own."""
    global _sharing
    _sharing = threading.Lock()
    _shared.clear()
    for service in _services:
        # The object, which would close its number once more later, when that is another file's.
        service.process.stdin.close()


os.register_at_fork(after_in_child=_leave_to_parent)


# The service writes its checkpoints first. Where nothing of them reaches the disk, it gives up by itself.
_LONGEST_END = 3600


_failed = False  # this process ends with an exception that nobody has handled


def _note_failure() -> None:
    global _failed
    _failed = getattr(sys, "last_value", None) is not None


def _say(process: subprocess.Popen, word: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the keeper has ended
        os.write(process.stdin.fileno(), word.encode() + b"\n")


def _end(process: subprocess.Popen, directory: Optional[str], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child is not the one to end it
    assert process.stdin is not None
    if not _failed:
        _say(process, "discard")
    process.stdin.close()
    try:
        process.wait(_LONGEST_END)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
