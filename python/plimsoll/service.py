"""A service of this process's own, for where none was started for it."""

import itertools
import os
import secrets
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
import weakref
from typing import List, Optional, Sequence, Tuple

from plimsoll.errors import PlimsollError

_PATIENCE = 30.0  # seconds until a service listens


def find_program() -> str:
    """The program plimsoll: what $PLIMSOLL names, what was installed with this package, or what is on PATH."""
    named = os.environ.get("PLIMSOLL")
    program = shutil.which(named) if named else shutil.which(os.path.join(sysconfig.get_path("scripts"), "plimsoll"))
    if program is None and not named:
        program = shutil.which("plimsoll")
    if program is None:
        raise PlimsollError(
            f"the program {named or 'plimsoll'} was not found {'($PLIMSOLL)' if named else 'on PATH'}: put it "
            "on PATH, or set PLIMSOLL to its path"
        )
    return program


class Service:
    """A running ``plimsoll serve``, in a folder that only this user may enter.

    It reads from a pipe that this process holds, and ends when that ends: with
    :meth:`close`, or with this process, however that ends. ``socket`` is the
    path to give to :class:`plimsoll.Session`. With a ``tier`` the state is in
    files in these folders, with so much ``memory`` for what is under way.
    """

    def __init__(self, *, tier: Sequence[str] = (), memory: Optional[str] = None) -> None:
        # The name of a socket has at most 107 bytes.
        parent = tempfile.gettempdir()
        # The service makes the folder, and so removes it also where this
        # process is killed.
        directory = os.path.join(parent if len(parent) <= 60 else "/tmp", f"plimsoll-{os.getpid()}-{secrets.token_hex(8)}")
        self.socket = os.path.join(directory, "socket")
        command: List[str] = [find_program(), "serve", "--socket", self.socket, "--until-stdin-closes"]
        self.tier, self.memory = tuple(tier), memory
        if tier:
            command += ["--tier", ",".join(tier)]
        if memory:
            command += ["--memory", memory]
        # In a process group of its own: the interrupt of a terminal is this
        # process's to handle, and the state must outlive its handling.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        self.instances = itertools.count()
        self.close = weakref.finalize(self, _end, self.process, directory, os.getpid())
        _services.add(self)
        try:
            self._await()
        except BaseException:
            self.close()
            raise

    def _await(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(self.socket)
                    return
                except OSError as error:
                    if self.process.poll() is not None:
                        raise PlimsollError(
                            f"{self.process.args[0]} serve has ended with code {self.process.returncode} before it "
                            "listened; see its output"
                        ) from None
                    if time.monotonic() > deadline:
                        raise PlimsollError(
                            f"{self.process.args[0]} serve does not listen at {self.socket} after {_PATIENCE:g} s: {error}"
                        ) from None
            time.sleep(0.005)


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
            service = _shared[job] = Service(tier=tier, memory=memory)
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


def _end(process: subprocess.Popen, directory: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child is not the one to end it
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_LONGEST_END)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
