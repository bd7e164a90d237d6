"""Runs Python programs in forks of this process, which has imported their modules: importing takes seconds.

Arguments are the modules. Descriptor 3 is a socket of packets. A request is a JSON list, what would follow the name of the
interpreter, with three descriptors: for standard output, for standard error, and for the exit status.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types


def run(arguments):
    """Runs a file, or the program after -c, as the interpreter does."""
    if arguments[0] != "-c":
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv = ["-c", *arguments[2:]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(arguments[1], "<string>", "exec"), main.__dict__)


def is_child(output, errors, status):
    """Forks a process for a program, and a second one that waits for it. Is true in the first."""
    if os.fork():
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        return True
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(status, str(code).encode())
    os._exit(0)


for name in sys.argv[1:]:
    importlib.import_module(name)
requests = socket.socket(fileno=3)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the kernel forgets the processes that wait
while True:
    request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
    if not request:
        break  # the test has ended
    if is_child(*descriptors):
        requests.close()
        for descriptor in descriptors:
            os.close(descriptor)
        run(json.loads(request))
        break
    for descriptor in descriptors:
        os.close(descriptor)
