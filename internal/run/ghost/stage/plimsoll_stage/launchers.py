"""Launchers: what they are told is read by their own parsers, and one rank runs in this process."""

import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Optional, Tuple

from plimsoll_stage import Refused


class More(BaseException):
    """A launch on more GPUs than there are: PyTorch has counted them, so that the program begins again."""


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
    """``python`` with a file or a module."""
    rest = _without_options(arguments)
    if not rest or rest in (["-c"], ["-m"]):
        raise Refused("python without a program: expected a file, -m and a module, or -c and code")
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
    try:
        local = settings["gpus"] if each in ("auto", "gpu", "cpu", "xpu") else int(each)
        number = int(nodes)
    except ValueError:
        raise Refused(f"the launch is of {each} ranks on each of {arguments.nnodes} nodes: expected numbers, or gpu for ranks") from None
    _world(local, number, settings)
    rest = [arguments.training_script, *arguments.training_script_args]
    if arguments.module:
        _run_module(rest[0], rest)
    else:
        _run_file(rest[0], rest)


def deepspeed(arguments: List[str], settings: Dict[str, Any]) -> None:
    """deepspeed's launcher."""
    from deepspeed.launcher import runner

    parsed = runner.parse_args(arguments)
    _world(*hosts_of(runner, parsed, settings["gpus"]), settings)
    rest = [parsed.user_script, *parsed.user_args]
    if getattr(parsed, "no_python", False):
        run(rest, settings)
    elif parsed.module:
        _run_module(rest[0], rest)
    else:
        _run_file(rest[0], rest if parsed.no_local_rank else [rest[0], "--local_rank=0", *rest[1:]])


def hosts_of(runner: Any, parsed: Any, gpus: int) -> Tuple[int, int]:
    """The ranks of a node and the number of nodes that DeepSpeed's launcher would start, by its own rules."""
    if getattr(parsed, "autotuning", ""):
        raise Refused("--autotuning starts many jobs: expected one of them")
    nodes, local = max(0, parsed.num_nodes), max(0, parsed.num_gpus)
    if (parsed.num_nodes >= 0 or parsed.num_gpus >= 0) and (parsed.include or parsed.exclude):
        raise Refused("Cannot specify num_nodes/gpus with include/exclude")  # in DeepSpeed's words
    if not os.path.isfile(parsed.hostfile):
        if parsed.hostfile != runner.DLTS_HOSTFILE and not (nodes and local):
            raise Refused(f"the hostfile {parsed.hostfile} is not here: expected it, or --num_nodes and --num_gpus")
        if nodes > 1:
            return local or gpus, nodes
    try:
        pool = runner.fetch_hostfile(parsed.hostfile) if os.path.isfile(parsed.hostfile) else None
        if not pool:
            named = [slot for _, slots in map(runner.parse_node_config, (parsed.include or "").split("@")) for slot in slots]
            pool = {"localhost": max([gpus, *(slot + 1 for slot in named)])}
        found = runner.parse_inclusion_exclusion(pool, parsed.include, parsed.exclude)
    except ValueError as error:
        raise Refused(str(error)) from None
    counts = {host: local or len(slots) for host, slots in list(found.items())[: nodes or None]}
    first = next(iter(counts), None)
    if first is None:
        raise Refused("--include and --exclude leave no GPU: expected one")
    for host, count in counts.items():
        if count != counts[first]:
            raise Refused(f"{first} has {counts[first]} ranks, {host} has {count}: expected as many of each node")
    return counts[first], len(counts)


def follow(settings: Dict[str, Any], environment: Dict[str, str]) -> None:
    """Puts programs of Python that this one starts on the stage, too: commands start the program that trains.

    A program whose output is read by the one that starts it is left alone: it answers a question, and does not train.
    """
    start, execute = subprocess.Popen.__init__, os.execve

    def staged(words: List[str], of: Any, **more: Any) -> Any:
        """The command and the environment of a program of Python on the stage; of others, nothing."""
        interpreter = _interpreter(words)
        if interpreter is None:
            return None
        stage = json.dumps({**settings, **more})
        return [interpreter, "-m", "plimsoll_stage", *words], {**of, **environment, "PLIMSOLL_STAGE": stage}

    @functools.wraps(start)
    def started(self, args, *arguments, **options):
        plain = not arguments and options.get("stdout") != subprocess.PIPE
        if plain and not options.get("shell") and not options.get("executable") and isinstance(args, (list, tuple)):
            of = os.environ if options.get("env") is None else options["env"]
            if (found := staged([os.fsdecode(word) for word in args], of, is_started=True)) is not None:
                args, options["env"] = found
        start(self, args, *arguments, **options)

    def executed(path, args, env):
        found = staged([os.fsdecode(path), *map(os.fsdecode, args[1:])], env)
        if found is None:
            execute(path, args, env)
        else:
            execute(found[0][0], *found)

    subprocess.Popen.__init__ = started
    os.execve = executed
    os.execv = lambda path, args: executed(path, args, os.environ)


def _interpreter(words: List[str]) -> Optional[str]:
    """The Python that runs a command, or None if it is no program of Python."""
    if os.path.basename(words[0]).startswith("python"):
        rest = _without_options(words[1:])
        return words[0] if rest and rest[0] != "-c" else None
    path = shutil.which(words[0])
    if path is None:
        return None
    with open(path, "rb") as file:
        first = file.readline(256).decode(errors="replace").split()
    if not first or not first[0].startswith("#!") or "python" not in " ".join(first):
        return None
    return shutil.which(first[1]) if first[0].endswith("/env") else first[0][2:]


def _without_options(arguments: List[str]) -> List[str]:
    """The arguments of Python without its own options, which change nothing here."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        taken = rest.pop(0)
        if taken in ("-W", "-X") and rest:
            rest.pop(0)
    return rest


def _prepare(settings: Dict[str, Any]) -> None:
    """Has launchers that a program calls play, too: accelerate's commands end in torch.distributed.run."""
    from plimsoll_stage import imports

    def replace(module: Any) -> None:
        module.run = lambda arguments: play(arguments, settings)

    imports.after("torch.distributed.run", replace)
    imports.after("accelerate.commands.launch", lambda module: _play_one(module, settings))
    if "RANK" in os.environ or settings["ranks"] > 1:
        _world(settings["gpus"], max(1, settings["ranks"] // settings["gpus"]), settings)


def spawn_one(module: Any, settings: Dict[str, Any]) -> None:
    """torch.multiprocessing.spawn: one of the processes that it starts is played."""

    def spawn(fn, args=(), nprocs=1, join=True, daemon=False, start_method="spawn"):
        if nprocs > settings["gpus"]:
            raise More(nprocs, 1)
        rank = settings["rank"] % nprocs  # -1 is the last
        os.environ["LOCAL_WORLD_SIZE"] = str(nprocs)
        fn(rank, *args)

    module.spawn = spawn


def _play_one(launch: Any, settings: Dict[str, Any]) -> None:
    """accelerate starts a single rank as a process of its own."""

    def simple_launcher(arguments: Any) -> None:
        command, environment = launch.prepare_simple_launcher_cmd_env(arguments)
        os.environ.update(environment)
        run(command, settings)

    launch.simple_launcher = simple_launcher


MOST_RANKS = 1024, 1 << 20  # of a node, and nodes


def _world(local: int, nodes: int, settings: Dict[str, Any]) -> None:
    if not (1 <= local <= MOST_RANKS[0] and 1 <= nodes <= MOST_RANKS[1]):
        raise Refused(f"the launch is of {local} ranks on each of {nodes} nodes: expected 1 to {MOST_RANKS[0]} ranks and 1 to {MOST_RANKS[1]} nodes")
    if local > settings["gpus"]:
        raise More(local, nodes)
    rank = settings["rank"] % (local * nodes)  # -1 is the last
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
    if path.encode("utf-8", "replace") != os.fsencode(path):
        raise Refused(f"{path!a}: PyTorch notes the names of files, and takes names in UTF-8 only: rename the file or its folder")
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _run_module(name: str, arguments: List[str]) -> None:
    sys.argv = list(arguments)
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)
