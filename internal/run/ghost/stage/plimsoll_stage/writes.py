"""Writes: what a program saves goes nowhere, or to the scratch folder.

Python's own ways to write are turned away quietly, so that a program that saves goes on. Landlock, a feature of Linux
since 5.13, forbids all others, in this process and in those that it starts.
"""

import builtins
import ctypes
import errno
import functools
import io
import os
import shutil
import stat
from typing import Any, Callable, Dict, List, Optional

from plimsoll_stage import imports

_REFUSED = "was not written: the program runs to be planned"


def guard(settings: Dict[str, Any], recorder: Any) -> None:
    """Has files and folders that a program makes lie in the scratch folder, where it finds them again."""
    scratch = os.path.realpath(settings["scratch"])
    _shadow(scratch, lambda file: recorder.note("writes", f"{os.fsdecode(file)} {_REFUSED}"))
    # Devices are written, and stay. Locks and shared memory of processes are files of /dev/shm.
    shared = [settings["mailbox"]["folder"]] if settings.get("mailbox") else []
    if not _confine(whole=[scratch, "/dev/shm", *shared], written=["/dev", "/proc"]):
        recorder.note("safety", "this kernel has no Landlock: what the program writes in other ways than Python's is written")
    for name in ("multiprocessing.spawn", "multiprocess.spawn"):
        imports.after(name, lambda module: _follow_spawned(module, scratch))


def _shadow(scratch: str, note: Callable[[Any], None]) -> None:
    shadows = _Shadows(scratch)
    really_open = builtins.open

    def guarded(file, mode="r", *arguments, **options):
        if isinstance(file, int) or shadows.are_not_for(file):
            return really_open(file, mode, *arguments, **options)
        shadow = shadows.of(file)
        if any(c in mode for c in "wax+"):
            note(file)
            shadow = shadow or shadows.make(file, "w" not in mode)
        if shadow is not None:  # the file has its own name, which the program may go on with
            options["opener"] = lambda path, flags: os.open(shadow, flags, 0o600)
        return really_open(file, mode, *arguments, **options)

    def opened(path, flags, mode=0o777, *, dir_fd=None):
        if dir_fd is not None or shadows.are_not_for(path):
            return os_open(path, flags, mode, dir_fd=dir_fd)
        shadow = shadows.of(path)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not flags & os.O_TMPFILE == os.O_TMPFILE:
            if flags & os.O_EXCL and os.path.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            note(path)
            shadow = shadow or shadows.make(path, not flags & os.O_TRUNC)
        return os_open(path if shadow is None else shadow, flags, mode)

    os_open, os.open = os.open, opened
    builtins.open = io.open = guarded  # pathlib opens by the second name
    shadows.install()


def _follow_spawned(module: Any, scratch: str) -> None:
    """Has processes that multiprocessing spawns find what the program has made, and the program what they make."""
    line = module.get_command_line

    def get_command_line(**options):
        words = line(**options)
        at = words.index("-c") + 1 if "-c" in words else 0
        if at:
            words[at] = f"import sys; sys.path.insert(0, {scratch!r}); from plimsoll_stage import writes; " \
                f"writes.share({scratch!r}); {words[at]}"  # fmt: skip
        return words

    module.get_command_line = get_command_line


def share(scratch: str) -> None:
    """Has this process share the files and folders that the program has made."""
    _shadow(scratch, lambda file: None)


class _Shadows:
    """Files and folders that the program believes to have made. They are in the scratch folder under their own paths, where
    the processes that the program starts find them, too."""

    def __init__(self, scratch: str):
        self._scratch, self._made = scratch, os.path.join(scratch, "made")
        self._make_folders, self._stat, self._lstat = os.makedirs, os.stat, os.lstat

    def are_not_for(self, path: Any) -> bool:
        full = self._full(path)
        return full == self._scratch or full.startswith((self._scratch + os.sep, "/dev/", "/proc/"))

    def of(self, path: Any) -> Optional[str]:
        """Where something is that was made. A folder that was there before stays where it is."""
        place = self._place(path)
        try:
            self._lstat(place)
        except OSError:
            return None
        return None if self._is_folder(place) and self._is_folder(path) else place

    def make(self, path: Any, goes_on: bool) -> str:
        """A place for a file. One that goes on begins with what there is."""
        place = self._place(path)
        self._make_folders(os.path.dirname(place), exist_ok=True)
        if goes_on and os.path.isfile(path):
            shutil.copyfile(path, place)
        return place

    def make_folders(self, path: Any) -> None:
        if not self._is_folder(path):
            self._make_folders(self._place(path), exist_ok=True)

    def install(self) -> None:
        """Replaces what makes, looks for, moves and removes files."""
        make = os.mkdir

        def mkdir(path, *arguments, **options):
            if self.are_not_for(path):
                make(path, *arguments, **options)
            else:
                self.make_folders(path)

        def makedirs(name, mode=0o777, exist_ok=False):
            if self.are_not_for(name):
                self._make_folders(name, mode, exist_ok)
            else:
                self.make_folders(name)

        os.listdir, os.scandir = self._listing(os.listdir, list), self._listing(os.scandir, _Entries)
        os.rename, os.replace = self._moving(os.rename), self._moving(os.replace)
        for name in ("stat", "chmod", "utime", "access", "rmdir", "remove", "unlink"):
            setattr(os, name, self._seeing(getattr(os, name)))
        shutil.rmtree = self._seeing(shutil.rmtree)
        os.mkdir, os.makedirs = mkdir, makedirs

    def _seeing(self, really: Any) -> Any:
        @functools.wraps(really)
        def look(path, *arguments, **options):
            shadow = None if isinstance(path, int) or options.get("dir_fd") is not None else self.of(path)
            return really(path if shadow is None else shadow, *arguments, **options)

        return look

    def _listing(self, really: Any, joined: Any) -> Any:
        """Lists what was made in a folder beside what was there."""

        def look(path="."):
            if isinstance(path, int) or self.are_not_for(path) or not self._is_folder(self._place(path)):
                return really(path)
            lists = [really(self._place(path))]
            if self._is_folder(path):
                lists.append(really(path))
            return joined({getattr(entry, "name", entry): entry for entries in reversed(lists) for entry in entries}.values())

        return look

    def _moving(self, really: Any) -> Any:
        def move(src, dst, **options):
            shadow = self.of(src)
            if shadow is None or self.are_not_for(dst):
                return really(src if shadow is None else shadow, dst, **options)
            place = self._place(dst)
            self._make_folders(os.path.dirname(place), exist_ok=True)
            return really(shadow, place, **options)

        return move

    def _is_folder(self, path: Any) -> bool:
        try:
            return stat.S_ISDIR(self._stat(path).st_mode)
        except OSError:
            return False

    def _place(self, path: Any) -> str:
        return self._made + self._full(path)

    @staticmethod
    def _full(path: Any) -> str:
        return os.path.realpath(os.fsdecode(path))


class _Entries(list):
    """What os.scandir returns."""

    def __iter__(self):
        while self:
            yield self.pop(0)

    def __next__(self):
        if not self:
            raise StopIteration
        return self.pop(0)

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        self.clear()

    def close(self):
        self.clear()


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


def save_no_tokenizer(module: Any, recorder: Any) -> None:
    """Tokenizers are written past Python, too, and into folders that are not there."""

    def skip(self, save_directory, *arguments, **options):
        recorder.note("writes", f"{os.fspath(save_directory)} {_REFUSED}")
        return ()

    module.PreTrainedTokenizerBase.save_pretrained = skip


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
