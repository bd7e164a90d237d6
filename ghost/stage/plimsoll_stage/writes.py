"""Writes: what a program saves goes nowhere, or to the scratch folder.

Python's own ways to write are turned away quietly, so that a program that saves goes on. Landlock, a feature of Linux
since 5.13, forbids all others, in this process and in those that it starts.
"""

import builtins
import ctypes
import io
import os
from typing import Any, Dict, List

_REFUSED = "was not written: the program runs to be planned"


def guard(settings: Dict[str, Any], recorder: Any) -> None:
    """Opens files outside of the scratch folder as /dev/null where a program writes them, and makes folders in it."""
    scratch = os.path.realpath(settings["scratch"])
    really_open = builtins.open

    def is_ours(path: Any) -> bool:
        full = os.path.realpath(os.fsdecode(path))
        return full == scratch or full.startswith((scratch + os.sep, "/dev/", "/proc/"))

    def guarded(file, mode="r", *arguments, **options):
        if any(c in mode for c in "wax+") and not isinstance(file, int) and not is_ours(file):
            recorder.note("writes", f"{os.fsdecode(file)} {_REFUSED}")
            options["opener"] = _open_nothing  # so that the file has its own name, which the program may go on with
        return really_open(file, mode, *arguments, **options)

    builtins.open = io.open = guarded  # pathlib opens by the second name
    _believe_in_folders(scratch, is_ours)
    # Devices are written, and stay. Locks and shared memory of processes are files of /dev/shm.
    if not _confine(whole=[scratch, "/dev/shm"], written=["/dev", "/proc"]):
        recorder.note("safety", "this kernel has no Landlock: what the program writes in other ways than Python's is written")


def _believe_in_folders(scratch: str, is_ours: Any) -> None:
    """Makes folders in the scratch folder instead, where the program finds them again."""
    make, makes = os.mkdir, os.makedirs
    made: Dict[str, str] = {}  # folders that the program believes to have made, and those in the scratch folder

    def believe(path):
        full = os.path.realpath(os.fsdecode(path))
        while full not in made and not os.path.exists(full):
            made[full] = os.path.join(scratch, "folders", str(len(made)))
            makes(made[full])
            full = os.path.dirname(full)

    def mkdir(path, *arguments, **options):
        if is_ours(path):
            make(path, *arguments, **options)
        else:
            believe(path)

    def makedirs(name, mode=0o777, exist_ok=False):
        if is_ours(name):
            makes(name, mode, exist_ok)
        else:
            believe(name)

    def seeing(really: Any) -> Any:
        def look(path=".", *arguments, **options):
            try:
                return really(path, *arguments, **options)
            except FileNotFoundError:
                full = "" if isinstance(path, int) else os.path.realpath(os.fsdecode(path))
                if full not in made:
                    raise
                return really(made[full], *arguments, **options)

        return look

    os.mkdir, os.makedirs = mkdir, makedirs
    os.stat, os.listdir, os.scandir = seeing(os.stat), seeing(os.listdir), seeing(os.scandir)


def _open_nothing(path: str, flags: int) -> int:
    return os.open(os.devnull, flags & os.O_ACCMODE)


def make_caches(settings: Dict[str, Any]) -> None:
    """Gives Hugging Face's caches, which programs must write, a folder in the scratch folder that begins as they are."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    for name in ("datasets", "modules", "evaluate"):
        variable = f"HF_{name.upper()}_CACHE"
        cache = os.path.expanduser(os.environ.get(variable) or os.path.join(home, name))
        ours = os.path.join(settings["scratch"], "huggingface", name)
        os.environ[variable] = ours
        if os.path.exists(ours):  # the process that started this one has made it
            continue
        for folder, _, files in os.walk(cache):
            there = os.path.join(ours, os.path.relpath(folder, cache))
            os.makedirs(there, exist_ok=True)
            for file in files:
                if not file.endswith(".lock"):  # a lock is written
                    os.symlink(os.path.abspath(os.path.join(folder, file)), os.path.join(there, file))
    if "DATA_GYM_CACHE_DIR" not in os.environ:  # which tiktoken reads, and looks for in TMPDIR otherwise
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", os.path.join(os.environ.get("TMPDIR", "/tmp"), "data-gym-cache"))


def lock_nothing(module: Any) -> None:
    """Locks are files. Here no other process is there that would take one."""

    def acquire(self):
        self._context.lock_file_fd = os.open(os.devnull, os.O_RDWR)

    def release(self):
        os.close(self._context.lock_file_fd)
        self._context.lock_file_fd = None

    module.UnixFileLock._acquire, module.UnixFileLock._release = acquire, release


def keep_nothing(torch: Any, recorder: Any) -> None:
    """torch.save writes files past Python, too. What goes to memory is written."""
    save = torch.save

    def skip(value, file, *arguments, **options):
        if isinstance(file, (str, os.PathLike)):
            recorder.note("writes", f"{os.fspath(file)} {_REFUSED}")
        else:
            save(value, file, *arguments, **options)

    torch.save = skip


def save_nothing(module: Any, recorder: Any) -> None:
    """safetensors writes files past Python."""

    def skip(tensors, filename, *arguments, **options):
        recorder.note("writes", f"{os.fspath(filename)} {_REFUSED}")

    for name in ("save_file", "save_model"):
        if hasattr(module, name):
            setattr(module, name, skip)


# System calls and access rights of Landlock: linux/landlock.h.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_VERSION = 1  # a flag: asks which version of Landlock the kernel has
_WRITE_FILE = 1 << 1
# Removing and making files, folders, devices, sockets, pipes and links.
_CHANGES = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # moving between folders from version 2 on, shortening files from 3 on


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def _confine(whole: List[str], written: List[str]) -> bool:
    """Allows every change below folders, and writes to what is there below others. Whether the kernel can."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(_CREATE_RULESET, None, 0, _VERSION)
    handled = ctypes.c_uint64(_WRITE_FILE | _CHANGES | _REFER * (version >= 2) | _TRUNCATE * (version >= 3))
    rules = call(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    if rules < 0:
        return False
    try:
        writes = _WRITE_FILE | _TRUNCATE * (version >= 3)
        rights = [(folder, handled.value) for folder in whole] + [(folder, writes) for folder in written]
        for folder, allowed in rights:
            if not os.path.isdir(folder):
                continue
            opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            rule = _PathBeneath(allowed, opened)
            call(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), 0)
            os.close(opened)
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return call(_RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)
