"""Writes: what a program saves goes nowhere, or to the scratch folder.

Python's own ways to write are turned away quietly, so that a program that saves goes on. Landlock, a feature of Linux
since 5.13, forbids all others, in this process and in those that it starts.
"""

import builtins
import ctypes
import io
import os
import shutil
from typing import Any, Dict, List, Optional

_REFUSED = "was not written: the program runs to be planned"


def guard(settings: Dict[str, Any], recorder: Any) -> None:
    """Has files and folders that a program makes lie in the scratch folder, where it finds them again."""
    scratch = os.path.realpath(settings["scratch"])
    shadows = _Shadows(scratch)
    really_open = builtins.open

    def guarded(file, mode="r", *arguments, **options):
        if isinstance(file, int) or shadows.are_not_for(file):
            return really_open(file, mode, *arguments, **options)
        if any(c in mode for c in "wax+"):
            recorder.note("writes", f"{os.fsdecode(file)} {_REFUSED}")
            shadow = shadows.of(file) or shadows.make(file, "w" not in mode)
        else:
            shadow = shadows.of(file)
        if shadow is not None:  # the file has its own name, which the program may go on with
            options["opener"] = lambda path, flags: os.open(shadow, flags, 0o600)
        return really_open(file, mode, *arguments, **options)

    builtins.open = io.open = guarded  # pathlib opens by the second name
    shadows.install()
    # Devices are written, and stay. Locks and shared memory of processes are files of /dev/shm.
    if not _confine(whole=[scratch, "/dev/shm"], written=["/dev", "/proc"]):
        recorder.note("safety", "this kernel has no Landlock: what the program writes in other ways than Python's is written")


class _Shadows:
    """Files and folders that the program believes to have made, and where they are in the scratch folder."""

    def __init__(self, scratch: str):
        self._scratch, self._count = scratch, 0
        self._made: Dict[str, str] = {}
        self._make_folders = os.makedirs

    def are_not_for(self, path: Any) -> bool:
        full = self._full(path)
        return full == self._scratch or full.startswith((self._scratch + os.sep, "/dev/", "/proc/"))

    def of(self, path: Any) -> Optional[str]:
        return self._made.get(self._full(path))

    def make(self, path: Any, goes_on: bool) -> str:
        """A place for a file. One that goes on begins with what there is."""
        there = self._next()
        if goes_on and os.path.isfile(path):
            shutil.copyfile(path, there)
        return self._made.setdefault(self._full(path), there)

    def make_folders(self, path: Any) -> None:
        full = self._full(path)
        while full not in self._made and not os.path.exists(full):
            self._made[full] = self._next()
            self._make_folders(self._made[full])
            full = os.path.dirname(full)

    def install(self) -> None:
        """Replaces what makes, looks for, moves and removes files."""
        make, makes = os.mkdir, os.makedirs

        def mkdir(path, *arguments, **options):
            if self.are_not_for(path):
                make(path, *arguments, **options)
            else:
                self.make_folders(path)

        def makedirs(name, mode=0o777, exist_ok=False):
            if self.are_not_for(name):
                makes(name, mode, exist_ok)
            else:
                self.make_folders(name)

        os.mkdir, os.makedirs = mkdir, makedirs
        os.stat, os.listdir, os.scandir = map(self._seeing, (os.stat, os.listdir, os.scandir))
        os.rename, os.replace = self._moving(os.rename), self._moving(os.replace)
        os.remove, os.unlink = self._removing(os.remove), self._removing(os.unlink)

    def _seeing(self, really: Any) -> Any:
        def look(path=".", *arguments, **options):
            shadow = None if isinstance(path, int) or options.get("dir_fd") is not None else self.of(path)
            return really(path if shadow is None else shadow, *arguments, **options)

        return look

    def _moving(self, really: Any) -> Any:
        def move(src, dst, **options):
            shadow = self.of(src)
            if shadow is None:
                return really(src, dst, **options)
            del self._made[self._full(src)]
            if self.are_not_for(dst):
                return really(shadow, dst, **options)
            self._made[self._full(dst)] = shadow

        return move

    def _removing(self, really: Any) -> Any:
        def remove(path, **options):
            shadow = self.of(path)
            if shadow is None:
                return really(path, **options)
            del self._made[self._full(path)]
            return really(shadow, **options)

        return remove

    def _next(self) -> str:
        self._count += 1
        return os.path.join(self._scratch, f"made-{os.getpid()}-{self._count}")

    @staticmethod
    def _full(path: Any) -> str:
        return os.path.realpath(os.fsdecode(path))


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
