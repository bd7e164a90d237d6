"""Prints the sizes of all storages that a program holds after each forward pass, backward pass and step: on the GPU,
or on the host if there is no GPU. So the plan of a program is held to its run on the CPU.

    live.py PROGRAM MODULES NAME...

imports modules, which are separated by commas, and runs a program once for each name, which is its argument; "NAME@2" on two
ranks. Each run is a fork of this process, and the last is this process itself. A line of the output is "LIVE", the name and
its places, each with [bytes, count, where] of what is held.
"""
import collections
import importlib
import json
import os
import runpy
import socket
import sys

import torch
from torch.autograd.profiler import record_function
from torch.optim import optimizer

POINTS = 6  # two steps, or one of two batches and the beginning of another
MARK = "after the "
LEAST = 1024  # bytes: smaller ones are counters and scalars
on_gpu = "plimsoll_stage" in sys.modules  # asking CUDA would forbid forks
torch.set_num_threads(1)
points, depth, profiler = [], 0, None


def on_device():
    """What is held of the GPU, by size and the line that asked for it."""
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    return collections.Counter(
        (block["requested_size"], line_of(block.get("frames", ()))) for block in blocks if block["state"] == "active_allocated"
    )


def line_of(frames):
    own = (f for f in frames if "/torch/" not in f["filename"] and "plimsoll_stage" not in f["filename"])
    return next((f"{os.path.basename(f['filename'])}:{f['line']}" for f in own), "autograd")


def on_host():
    """What was held of the host at each mark, by size and the operations that made it."""
    from torch._C._profiler import _EventType

    def each(events):
        for event in events:
            yield event
            yield from each(event.children)

    live, found = {}, {}
    for event in sorted(each(profiler.profiler.kineto_results.experimental_event_tree()), key=lambda e: e.start_time_ns):
        kind, fields = event.typed
        if kind == _EventType.Allocation and fields.alloc_size > 0:
            live[fields.ptr] = fields.alloc_size, operations(event)
        elif kind == _EventType.Allocation:
            live.pop(fields.ptr, None)
        elif event.name.startswith(MARK):
            found[event.name] = collections.Counter(live.values())
    return found


def operations(event):
    names = []
    while event.parent is not None and len(names) < 3:
        event = event.parent
        names.append(event.name)
    return " < ".join(names)


def mark(name):
    if len(points) == POINTS:
        return
    name = f"{MARK}{name}, {len(points) + 1} of {POINTS}"
    points.append([name, on_device() if on_gpu else None])
    if not on_gpu:
        with record_function(name):
            pass
    if len(points) == POINTS:
        show()


def show():
    if not on_gpu:
        profiler.stop()
        found = on_host()
        for point in points:
            point[1] = found[point[0]]
    if int(os.environ.get("RANK", "0")) != 0:
        return  # rank 0 needs the others until it has all of its points
    all = {name: [[size, n, by] for (size, by), n in sorted(held.items()) if size >= LEAST] for name, held in points}
    print("\nLIVE", running, json.dumps(all), flush=True)
    if not on_gpu or is_fork:
        os._exit(0)


def backward(*arguments, **options):
    global depth
    if depth == 0:
        mark("forward")
    depth += 1
    try:
        return really(*arguments, **options)
    finally:
        depth -= 1
        if depth == 0:
            mark("backward")


def run(path, name):
    global profiler
    if not on_gpu:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        profiler.start()
    sys.argv = [path, name]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork(path, name, ranks):
    """Runs a program in processes of its own: on the GPU that is not there, one rank is played."""
    children, port = [], free_port() if ranks > 1 and not on_gpu else 29500
    for rank in range(1 if on_gpu else ranks):
        if (child := os.fork()) == 0:
            if ranks > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
            try:
                run(path, name)
            except BaseException as error:
                print(f"\n{name} ended with {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


really, torch.autograd.backward = torch.autograd.backward, backward
optimizer.register_optimizer_step_post_hook(lambda *arguments: mark("step"))
path, modules, *names = sys.argv[1:]
for module in modules.split(","):
    importlib.import_module(module)
is_fork = True
for running in names[:-1]:
    name, _, ranks = running.partition("@")
    fork(path, name, int(ranks or 1))
is_fork, running = False, names[-1]
run(path, running)
