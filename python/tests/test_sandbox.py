"""Where the host forbids sockets or memory files, or the program is not on PATH, an optimizer has its state in a folder."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from awaited import NEVER, ended
from nightly import nightly_rows

HERE = pathlib.Path(__file__).parent
ALL = "socket,socketpair,memfd_create"

TRAIN = """
import json, os, signal, subprocess, sys, warnings
import torch
from plimsoll.service import find_program
from plimsoll.torch import AdamW
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(int(os.environ.get("ELEMENTS", "1000"))))
    optimizer = AdamW([weight], lr=0.1)
    began = optimizer.resumed_step
    for step in range(began, began + 3):
        weight.grad = torch.full_like(weight, 1.0 + step)
        optimizer.step()
        if os.environ.get("KILL_SERVICE"):
            stat = json.loads(subprocess.run([find_program(), "stat", "--json", "--socket", optimizer._shards.service.socket], capture_output=True, check=True).stdout)
            os.kill(stat["process"], signal.SIGKILL)
    optimizer.state_dict()
service = optimizer._shards.service
stat = json.loads(subprocess.run([find_program(), "stat", "--json", "--socket", service.socket], capture_output=True, check=True).stdout)
print(json.dumps({
    "began": began, "reason": service.reason, "socket": service.socket, "keeper": service.process.pid, "weights": weight.tolist()[:100],
    "restarts": stat["restarts"], "sessions": stat["sessions"], "warnings": [str(w.message) for w in warned if "plimsoll:" in str(w.message)],
}), flush=True)
"""


def trained(denied=None, end="", before=(), **environment):
    """What a trainer says in a sandbox, and its process, which has ended."""
    command = [*before, *([sys.executable, str(HERE / "sandboxed.py"), denied] if denied else ()), sys.executable, "-c", TRAIN + end]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    out, said = process.communicate(timeout=NEVER)
    assert out, said
    return json.loads(out.splitlines()[0]), process


@functools.cache
def usual():
    """What a trainer without a sandbox says."""
    said, process = trained()
    assert process.returncode == 0
    return said


@pytest.mark.parametrize("files", [("test_layouts.py", "test_entries.py"), *nightly_rows((("test_optimizer.py",),))], ids=str)
def test_the_optimizers_tests(files):
    command = [sys.executable, HERE / "sandboxed.py", ALL, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    run = subprocess.run([*command, *(HERE / f for f in files)], cwd=HERE.parents[1], capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:]


@pytest.mark.parametrize(
    "denied, reason",
    [
        ("socket,socketpair", "Unix sockets are forbidden here (Operation not permitted)"),
        ("memfd_create", "memory files are forbidden here (memfd_create: Operation not permitted)"),
        (ALL, "memory files are forbidden here (memfd_create: Operation not permitted)"),
        (None, None),
    ],
)
def test_it_is_chosen_and_named(denied, reason):
    said, process = trained(denied) if denied else (usual(), None)
    assert said["reason"] == reason and said["weights"] == usual()["weights"]
    (session,) = said["sessions"]
    if reason is None:
        assert not said["warnings"] and "folder" not in session
        return
    (warning,) = said["warnings"]
    folder = os.path.dirname(said["socket"])
    assert reason in warning and folder in warning and "PLIMSOLL_JOB" in warning
    assert session["folder"] == folder and session["file_system"] == "tmpfs"
    ended(said["keeper"])
    assert not os.path.exists(folder)


def test_without_path():
    """Neither the client nor the program looks for another on PATH: test_wheel.py has the program where pip puts it."""
    said, _ = trained(ALL, PATH="/nonexistent")
    assert said["weights"] == usual()["weights"]


def test_the_death_of_its_service():
    said, _ = trained(ALL, KILL_SERVICE="1")
    assert said["restarts"] == 3 and said["weights"] == usual()["weights"]


KILLED = "\nos.kill(os.getpid(), signal.SIGKILL)\n"
RAISED = "\nraise RuntimeError('the program has failed')\n"


@pytest.mark.parametrize(
    "end, job, stays", [(KILLED, "sandbox-a", True), (RAISED, "sandbox-b", True), ("", "sandbox-c", False), (KILLED, "", False)]
)
def test_what_a_named_job_leaves(end, job, stays, tmp_path):
    folders = {"PLIMSOLL_FOLDER": str(tmp_path), "PLIMSOLL_JOB": job}
    first, process = trained(end=end, **folders)
    assert process.returncode == {KILLED: -signal.SIGKILL, RAISED: 1}.get(end, 0) and first["began"] == 0
    ended(first["keeper"])
    assert bool(os.listdir(tmp_path)) == stays
    second, _ = trained(**folders)
    assert second["began"] == (3 if stays else 0)
    assert (second["weights"] == first["weights"]) == (not stays)
    ended(second["keeper"])
    assert not os.listdir(tmp_path)


def test_another_boot_of_the_host(tmp_path):
    """What the kernel had written of the files when the host died is of different instants."""
    folders = {"PLIMSOLL_FOLDER": str(tmp_path), "PLIMSOLL_JOB": "sandbox-boot"}
    said, _ = trained(end=KILLED, **folders)
    ended(said["keeper"])
    folder = pathlib.Path(said["socket"]).parent
    (folder / "boot").write_text("another\n")
    run = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, env={**os.environ, **folders})
    assert run.returncode == 1 and "ran before this host was started" in run.stderr and "last checkpoint" in run.stderr
    assert (folder / "1").exists()


def test_two_programs_of_one_job(tmp_path):
    """The second one is refused while the first one lives: it must not take its state."""
    folders = {"PLIMSOLL_FOLDER": str(tmp_path), "PLIMSOLL_JOB": "sandbox-twice"}
    first = subprocess.Popen(
        [sys.executable, "-c", TRAIN + "\nsys.stdin.read()\n"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **folders},
    )  # fmt: skip
    assert first.stdout.readline()
    run = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, env={**os.environ, **folders})
    assert run.returncode == 1 and "another service has its state in" in run.stderr
    first.communicate("")
    assert first.returncode == 0


def in_small_memory():
    """A command that has /dev/shm with 64 MB, as docker gives a container, or None where this user may not mount it."""
    script = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    return command if allowed else None


def test_a_small_dev_shm(tmp_path):
    """Memory files need none of it. Files of a folder that lack room there are in the next one."""
    command = in_small_memory()
    if command is None:
        pytest.skip("this user may not mount a file system in a namespace")
    elements = {"ELEMENTS": str(8_000_000), "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""}  # 128 MB with fp32
    in_memory, _ = trained(before=command, **elements)
    assert in_memory["reason"] is None
    said, _ = trained(ALL, before=command, **elements)
    assert os.path.dirname(said["socket"]).startswith("/dev/shm/")
    (session,) = said["sessions"]
    assert session["folder"].startswith(str(tmp_path)) and session["file_system"] != "tmpfs" and said["weights"] == in_memory["weights"]
    ended(said["keeper"])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kills", [6, *nightly_rows((50,))])
def test_trainers_are_killed(kills):
    program = [sys.executable, HERE / "killed_in_folder.py", str(kills), "1"]
    run = subprocess.run(program, capture_output=True, text=True, cwd=HERE, env={**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}"})
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout.split()[0]) == kills
