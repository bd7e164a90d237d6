"""An interpreter that has imported modules runs programs in forks of itself: to import torch takes seconds.

Tests begin a command with what :func:`python` returns, where they would begin it with ``sys.executable``. What follows are
``-c`` and a program, or a file, and arguments. A program has a process, an environment, a folder, standard streams and an
exit status of its own. The process that a test starts waits for it, hands on the signals that can be handed on, and ends as
it ends. Where that process is killed, the program is killed, but its end may come later: that of its standard output says
when.

Go tests have such interpreters, too: see forks_linux.go of internal/base/torchtest. All test processes share them, by leases.

Nobody sees here what happens when Python or torch starts, or when Python has called what is to be called at its exit. A test
of imports, of the memory of a process, or of an environment that is read at the start takes a fresh interpreter.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types

HANDED_ON = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
READY = b"ready"
PACKET = 1 << 16
ENDED = "the interpreter of preloaded modules has ended: see its standard error"

# The first step of an optimizer imports torch._dynamo.
TRAINING = (
    "plimsoll.torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh", "hypothesis", "pytest"
)  # fmt: skip


@functools.cache
def python(*modules, environment=()):
    """The beginning of a command. Its interpreter has imported modules, else those of training, and ends with this process.

    It starts with variables of an environment, as pairs, that libraries read when they are loaded.
    """
    address = f"plimsoll-tests-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen(64)
        command = [sys.executable, __file__, "serve", str(listener.fileno()), "0", *(modules or TRAINING)]
        started = {**os.environ, **dict(environment)}
        server = subprocess.Popen(command, env=started, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    _servers.append(server)
    return [sys.executable, "-I", "-S", __file__, "run", address]


_servers = []


def close():
    """Ends the interpreters. They would end with this process, but nobody would count what their programs have cost."""
    while _servers:
        server = _servers.pop()
        server.stdin.close()
        server.wait()


def run(address, *arguments):
    """The process that a test starts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect("\0" + address)
        greeting = connection.recv(PACKET)
        if greeting != READY:
            sys.exit(greeting.decode() or ENDED)
        request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
        # A packet has a size, and an environment none. Its file is the fourth one.
        body = os.memfd_create("request")
        os.write(body, request)
        socket.send_fds(connection, [b"run"], [0, 1, 2, body])
        for number in HANDED_ON:
            signal.signal(number, lambda number, _: connection.send(str(number).encode()))
        answer = connection.recv(PACKET)
    if not answer:
        sys.exit(ENDED)
    status = int(answer)
    if status < 0:
        if -status in HANDED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(number, idle_seconds, *modules):
    """Serves the listener of that number. In the process of a program it returns that program's arguments.

    A connection is a lease until it asks for something. Standard input is one until it ends. This process ends when nobody
    has had a lease for idle_seconds, or at once where modules could not be imported.
    """
    listener, greeting = socket.socket(fileno=int(number)), READY
    try:
        for name in modules:
            importlib.import_module(name)
    except BaseException:
        greeting, idle_seconds = traceback.format_exc().encode()[-PACKET:], 0
    gc.freeze()  # a program that looked for garbage among modules would copy their pages
    leases, children = {sys.stdin}, set()
    while ready := select.select([listener, *leases], [], [], None if leases else float(idle_seconds))[0]:
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        for one in ready:
            if one is listener:
                leases |= accepted(listener, greeting)
                continue
            leases.remove(one)
            what, descriptors = asked(one)
            if what and not (pid := os.fork()):
                for other in (listener, *leases - {sys.stdin}):
                    other.close()
                return serve_further(one, descriptors) if what == b"serve" else start(one, descriptors)
            if what:
                children.add(pid)
            for descriptor in descriptors:
                os.close(descriptor)
            if one is not sys.stdin:
                one.close()
    listener.close()
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)


def accepted(listener, greeting):
    """A new connection that has been greeted, as a set. That of another user of the machine is closed."""
    connection, _ = listener.accept()
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        connection.close()
        return set()
    with contextlib.suppress(BrokenPipeError):  # who connected was killed
        connection.send(greeting)
    return {connection}


def asked(lease):
    """What a lease asks for, and its descriptors. At its end it asks for nothing."""
    what, descriptors = b"", []
    if lease is not sys.stdin:
        with contextlib.suppress(ConnectionResetError):
            what, descriptors, _, _ = socket.recv_fds(lease, PACKET, 4)
    return what, descriptors


def serve_further(connection, descriptors):
    """Serves one more listener, whose interpreter has the modules of this one and imports others."""
    connection.close()
    number, body = descriptors
    return serve(number, *enter([body]))


def start(connection, descriptors):
    """Forks a process for a program, where it returns that program's arguments, and waits for it here."""
    child = os.fork()
    if child == 0:
        connection.close()
        return enter(descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    watch(child, connection)
    os._exit(0)


def watch(child, connection):
    """Hands on signals to a program and its exit status to who waits for it. Kills it when nobody does any more."""
    ended = os.pidfd_open(child)
    while ended not in select.select([ended, connection], [], [])[0]:
        number = connection.recv(PACKET)
        os.kill(child, int(number) if number else signal.SIGKILL)
        if not number:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # who waited was killed
        connection.send(str(status).encode())


def enter(descriptors):
    """Gives this process the environment and the folder of a request, whose arguments it returns, and the last standard
    streams: all, or output and errors, or none."""
    *streams, body = descriptors
    for number, descriptor in enumerate(streams, 3 - len(streams)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with open(body, "rb") as file:
        file.seek(0)
        request = json.load(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[1:1] = [p for p in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if p not in ("", *sys.path[1:])]
    return request["arguments"]


def execute(arguments):
    """Runs a program as the interpreter does."""
    if arguments[0] != "-c":
        sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(arguments[1], "<string>", "exec"), main.__dict__)


def finish(arguments):
    """Runs a program, and ends its process. An interpreter takes its modules apart at the end, and would copy their pages."""
    status = 0
    try:
        execute(arguments)
    except SystemExit as ended:
        status = status_of(ended.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def status_of(code):
    """The exit status of what a program has given to sys.exit."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:])
    finish(serve(*sys.argv[2:]))
