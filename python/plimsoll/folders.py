"""Where a service of this process's own has its state if the host forbids sockets or memory files."""

import hashlib
import os
import re
import secrets
import socket
import tempfile
from typing import List, Optional

from plimsoll.errors import PlimsollError

#: The variable that names folders for the state. With it, the state is there also where sockets are allowed.
VARIABLE = "PLIMSOLL_FOLDER"


def reason() -> Optional[str]:
    """Why the state must be in files of a folder, or None where sockets and memory files can be had."""
    if os.environ.get(VARIABLE):
        return f"{VARIABLE} is set"
    try:
        os.close(os.memfd_create("plimsoll-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return f"memory files are forbidden here (memfd_create: {error.strerror})"
    try:
        for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
            each.close()
        with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(os.path.join(folder, "probe"))
    except OSError as error:
        return f"Unix sockets are forbidden here ({error.strerror})"
    return None


def candidates(job: Optional[str]) -> List[str]:
    """The folders for the state of a job, the best first: those of a named job are the same for the next process."""
    named = os.environ.get(VARIABLE)
    if named:
        bases = [os.path.abspath(base) for base in named.split(",")]
    else:
        found = ["/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp", os.getcwd()]
        bases = list(dict.fromkeys(os.path.abspath(base) for base in found if base))
    usable = [base for base in bases if _is_usable(base)]
    if not usable:
        raise PlimsollError(
            f"no folder can hold the optimizer's state: {', '.join(bases)} cannot be written to, or has no named pipes; "
            f"name one that can with {VARIABLE}"
        )
    name = f"plimsoll-{os.geteuid()}-{_name_of(job)}"
    return [os.path.join(base, name) for base in usable]


def _name_of(job: Optional[str]) -> str:
    if job is None:
        return f"{os.getpid()}-{secrets.token_hex(8)}"
    plain = re.sub(r"[^a-zA-Z0-9_.-]", "_", job)[:64]
    return f"{plain}-{hashlib.sha256(job.encode()).hexdigest()[:8]}-rank{os.environ.get('RANK', '0')}"


def _is_usable(base: str) -> bool:
    if "," in base:  # they are given to the service with commas between
        return False
    try:
        with tempfile.TemporaryDirectory(prefix="plimsoll-", dir=base) as folder:
            os.mkfifo(os.path.join(folder, "probe"))
    except OSError:
        return False
    return True
