"""Launchers: what they are told is read by their own parsers, and one rank runs in this process."""

import os
import runpy
import shutil
import sys
from typing import Any, Dict, List


class Refused(Exception):
    """A launch that cannot be played."""


def run(arguments: List[str], settings: Dict[str, Any]) -> None:
    """Runs the program of a command line: ``python FILE``, ``python -m MODULE``, a launcher, or a script of the
    environment such as ``trl``.
    """
    program, rest = os.path.basename(arguments[0]), arguments[1:]
    if program.startswith("python"):
        python(rest, settings)
        return
    path = arguments[0] if os.path.exists(arguments[0]) else shutil.which(arguments[0])
    if program in ("torchrun", "torch-distributed-run"):
        torchrun(rest, settings)
    elif program == "deepspeed":
        deepspeed(rest, settings)
    elif path is None:
        raise Refused(f"{arguments[0]}: there is no such program")
    else:
        _prepare(settings)
        _run_file(path, arguments)


def python(arguments: List[str], settings: Dict[str, Any]) -> None:
    """``python`` with a file or a module. Its own options that change nothing here are left out."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        taken = rest.pop(0)
        if taken in ("-W", "-X") and rest:
            rest.pop(0)
    if not rest:
        raise Refused("python without a program: expected a file, or -m and a module")
    if rest[0] == "-c":
        _prepare(settings)
        sys.argv = ["-c", *rest[2:]]
        exec(compile(rest[1], "<string>", "exec"), {"__name__": "__main__"})
    elif rest[0] == "-m" and rest[1:2] and rest[1] in ("torch.distributed.run", "torch.distributed.launch"):
        torchrun(rest[2:], settings)
    elif rest[0] == "-m":
        _prepare(settings)
        _run_module(rest[1], [rest[1], *rest[2:]])
    else:
        _prepare(settings)
        _run_file(rest[0], rest)


def torchrun(arguments: List[str], settings: Dict[str, Any]) -> None:
    """torchrun: its own parser says how many ranks there are."""
    import torch.distributed.run as launcher

    play(launcher.parse_args(arguments), settings)


def play(arguments: Any, settings: Dict[str, Any]) -> None:
    """Plays one rank of a launch, with the arguments of torch.distributed.run."""
    each, nodes = str(arguments.nproc_per_node), str(arguments.nnodes).split(":")[-1]
    local = int(each) if each.isdigit() else settings["gpus"]
    _world(local, int(nodes), settings)
    rest = [arguments.training_script, *arguments.training_script_args]
    if arguments.module:
        _run_module(rest[0], rest)
    else:
        _run_file(rest[0], rest)


def deepspeed(arguments: List[str], settings: Dict[str, Any]) -> None:
    """deepspeed's launcher."""
    from deepspeed.launcher import runner

    parsed = runner.parse_args(arguments)
    local = parsed.num_gpus if parsed.num_gpus > 0 else settings["gpus"]
    _world(local, max(1, parsed.num_nodes), settings)
    rest = [parsed.user_script, *parsed.user_args]
    if parsed.module:
        _run_module(rest[0], rest)
    else:
        _run_file(rest[0], rest if parsed.no_local_rank else [rest[0], "--local_rank=0", *rest[1:]])


def _prepare(settings: Dict[str, Any]) -> None:
    """Has launchers that a program calls play, too: accelerate's commands end in torch.distributed.run."""
    from plimsoll_stage import imports

    def replace(module: Any) -> None:
        module.run = lambda arguments: play(arguments, settings)

    imports.after("torch.distributed.run", replace)
    imports.after("accelerate.commands.launch", lambda module: _play_one(module, settings))
    if "RANK" in os.environ or settings["ranks"] > 1:
        _world(settings["gpus"], max(1, settings["ranks"] // settings["gpus"]), settings)


def _play_one(launch: Any, settings: Dict[str, Any]) -> None:
    """accelerate starts a single rank as a process of its own."""

    def simple_launcher(arguments: Any) -> None:
        command, environment = launch.prepare_simple_launcher_cmd_env(arguments)
        os.environ.update(environment)
        run(command, settings)

    launch.simple_launcher = simple_launcher


def _world(local: int, nodes: int, settings: Dict[str, Any]) -> None:
    rank = settings["rank"]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % local),
        WORLD_SIZE=str(local * nodes),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        GROUP_WORLD_SIZE=str(nodes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )


def _run_file(path: str, arguments: List[str]) -> None:
    if not os.path.exists(path):
        raise Refused(f"{path}: there is no such file")
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _run_module(name: str, arguments: List[str]) -> None:
    sys.argv = list(arguments)
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)
