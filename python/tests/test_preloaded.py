"""Programs in forks of a preloaded interpreter are processes of their own, as those of a fresh one are."""

import signal
import subprocess

import pytest

from preloaded import python

PROGRAM = """
import os, sys
assert "torch" in sys.modules and __name__ == "__main__"
print(os.getcwd(), os.environ["HERE"], "OTHER" in os.environ, sys.argv, sys.stdin.read())
sys.exit("it fails")
"""


def test_as_a_fresh_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER", "1")
    environment = {"HERE": "x" * 100_000}
    command = [*python(), "-c", PROGRAM, "one", "two"]
    done = subprocess.run(command, input="in", capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == f"{tmp_path} {environment['HERE']} False ['-c', 'one', 'two'] in\n"
    assert (done.returncode, done.stderr) == (1, "it fails\n")


def test_files(tmp_path):
    (tmp_path / "beside.py").write_text("name = 'beside'")
    (tmp_path / "program.py").write_text("import beside, sys; print(beside.name, sys.argv[1:]); raise SystemExit(3)")
    done = subprocess.run([*python(), tmp_path / "program.py", "one"], stdout=subprocess.PIPE, text=True)
    assert (done.stdout, done.returncode) == ("beside ['one']\n", 3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_program_that_a_signal_ends(number):
    done = subprocess.run([*python(), "-c", f"import os; os.kill(os.getpid(), {int(number)})"])
    assert done.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program(number):
    program = "import time; print('begun', flush=True); time.sleep(600)"
    command = [*python(), "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.stdout.read() == ""  # nobody can write any more
    assert process.wait() == -number


def test_a_module_that_cannot_be_imported():
    """Each program says why."""
    for _ in range(2):
        done = subprocess.run([*python("absent"), "-c", ""], capture_output=True, text=True)
        assert done.returncode == 1 and "No module named 'absent'" in done.stderr


END = """
import atexit, sys, threading
begun = threading.Event()
threading.Thread(target=lambda: (begun.wait(), print("thread", end=" "))).start()
atexit.register(lambda: sys.stdout.write("exit"))
begun.set()
raise {ending}
"""


@pytest.mark.parametrize("ending, status, says", [
    ("SystemExit", 0, ""), ("SystemExit(300)", 44, ""), ("ValueError('no')", 1, "ValueError: no"),
    ("KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
])  # fmt: skip
def test_a_program_ends_as_python_does(ending, status, says):
    """Its threads are waited for, what it has registered is called, and what it has written is out."""
    done = subprocess.run([*python(), "-c", END.format(ending=ending)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("thread exit", status)
    assert says in done.stderr and bool(says) == bool(done.stderr)
