"""Runs the parts that have no result yet, each within its limit, and all of them within the limit of the run."""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib import metadata, util
from typing import Callable, Dict, Iterator, List, Optional, Set

from gpu_proof import results
from gpu_proof.parts import CARD, HOST, Part, all_parts, dry_parts

ROOT = pathlib.Path(__file__).resolve().parents[2]
DRY = pathlib.Path(__file__).resolve().parent / "dry"
STARTING = 90.0  # seconds for a worker's imports
TAIL = 1500  # characters of a worker's output that a failure quotes
PACKAGES = ["torch", "transformers", "accelerate", "peft", "numpy", "triton", "torchao"]


@dataclass
class Settings:
    results: pathlib.Path
    limit: float
    dry: bool
    again: bool
    only: List[str]
    catalog: Callable[[], List[Part]] = all_parts
    package: str = "gpu_proof"  # of the workers
    root: pathlib.Path = ROOT
    scratch: pathlib.Path = field(init=False)

    def __post_init__(self) -> None:
        self.scratch = self.results.with_suffix(".scratch")

    @property
    def program(self) -> pathlib.Path:
        return pathlib.Path(os.environ.get("PLIMSOLL", self.root / "bin" / "plimsoll"))

    def environment(self) -> Dict[str, str]:
        """That of workers."""
        paths = [self.root / "scripts", self.root / "python", self.root / "python" / "tests"]
        path = [str(DRY)] if self.dry else []
        path += [str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        # In a dry run as many processes compute as there are cores.
        threads = {"OMP_NUM_THREADS": "1"} if self.dry else {}
        return {
            **os.environ,
            **threads,
            "PLIMSOLL": str(self.program),
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, *filter(None, [os.environ.get("PYTHONPATH")])])),
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join(path),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # What a worker was compiling when it was killed is of no use to the next one.
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / f"compiled-{time.monotonic_ns()}"),
            "GPU_PROOF_DEVICE": "standin" if self.dry else "cuda",
            "GPU_PROOF_RESULTS": str(self.results),
            "GPU_PROOF_SCRATCH": str(self.scratch),
        }


# What is there


def missing(settings: Settings) -> List[str]:
    """What the proof cannot do without, and how to bring it."""
    found = []
    if not os.access(settings.program, os.X_OK):
        found.append(f"{settings.program} is not there: make build, or make gpu-kit where there is no Go")
    if not (settings.root / "python" / "plimsoll").is_dir():
        found.append(f"{settings.root}/python/plimsoll is not there: copy the folder python of a clone")
    if not (settings.program.parent / "libplimsoll_ghost.so").exists() and shutil.which("cc") is None:
        found.append(f"{settings.program.parent}/libplimsoll_ghost.so is not there, nor a C compiler: make ghost")
    for package in ("torch", "numpy", "transformers"):
        if util.find_spec(package) is None:
            found.append(f"{sys.executable} has no {package}: choose another Python, or install it there")
    if not settings.dry and shutil.which("nvidia-smi") is None:
        found.append("nvidia-smi is not on PATH: expected a host with a GPU of NVIDIA; --dry runs without one")
    return found


def version_of(package: str) -> Optional[str]:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit_of(root: pathlib.Path) -> str:
    """The commit that the kit names, or that git knows."""
    named = root / "commit"
    if named.exists():
        return named.read_text().strip()
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def describe(settings: Settings) -> results.Line:
    """The machine, as the first line of the results has it."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, env=settings.environment())
    if done.returncode != 0 or done.stdout.count(",") < 2:
        raise results.BadResults(f"nvidia-smi: found {(done.stdout + done.stderr).strip()[:200]!r}, expected a GPU")
    name, driver, mebibytes = [word.strip() for word in done.stdout.splitlines()[0].split(",")]
    return {
        "part": "machine",
        "schema": results.SCHEMA,
        "dry": settings.dry,
        "card": name,
        "driver": driver,
        "card_bytes": int(mebibytes) << 20,
        "cpus": len(os.sched_getaffinity(0)),
        "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": os.uname().release,
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {package: version_of(package) for package in PACKAGES},
        "commit": commit_of(settings.root),
        "date": datetime.date.today().isoformat(),
    }


def same_machine(old: results.Line, new: results.Line, path: pathlib.Path) -> None:
    """Results of two machines, or of a dry run and a real one, do not mix."""
    for key in ("dry", "card", "driver", "commit"):
        if old.get(key) != new[key]:
            raise results.BadResults(
                f"{path}: found results with {key} {old.get(key)!r}, and this run has {new[key]!r}: "
                "name another file with --results"
            )


# A worker


class Worker:
    """A process that runs parts one after the other, and says when each begins and what it has found."""

    def __init__(self, settings: Settings, worker: str, parts: List[Part]):
        self._reads, writes = os.pipe()
        settings.scratch.mkdir(parents=True, exist_ok=True)
        self.log = settings.scratch / f"{worker}-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}.log"
        command = [
            sys.executable,
            "-m",
            "gpu_proof.worker",
            str(writes),
            f"{settings.package}.{worker}",
            *[p.name for p in parts],
        ]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writes],
                start_new_session=True,
                env=settings.environment(),
                cwd=settings.scratch,
            )
        os.close(writes)
        self._text = b""

    def says(self, until: float) -> Optional[results.Line]:
        """The next message. None at the end of the process; TimeoutError if none has come in time."""
        while b"\n" not in self._text:
            if not select.select([self._reads], [], [], max(0.0, min(0.5, until - time.monotonic())))[0]:
                if time.monotonic() >= until:
                    raise TimeoutError
                if self.process.poll() is not None:  # what it has left behind may hold the pipe
                    return None
                continue
            got = os.read(self._reads, 1 << 16)
            if not got:
                return None
            self._text += got
        line, self._text = self._text.split(b"\n", 1)
        return json.loads(line)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL:]

    def end(self) -> str:
        """Kills it with all that it has started. How it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        os.close(self._reads)
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


# A run


def without_paths(line: results.Line, settings: Settings) -> results.Line:
    """Results are published: they name no folder of this machine."""
    text = json.dumps(line)
    for path, instead in ((sys.executable, "python"), (f"{settings.scratch}/", ""), (f"{settings.root}/", "")):
        text = text.replace(path, instead)
    return json.loads(re.sub(r"/tmp/(tmp|gpu-proof-)\w+/?", "", text))


class Run:
    def __init__(self, settings: Settings):
        self._settings = settings
        self._until = time.monotonic() + settings.limit
        self._writing = threading.Lock()

    def out_of_time(self) -> bool:
        return time.monotonic() >= self._until

    def _record(self, part: Part, outcome: str, seconds: float, found: Dict, said: str = "") -> None:
        line = {"part": part.name, "outcome": outcome, "seconds": round(seconds, 2), "found": found}
        if said:
            line["said"] = said
        with self._writing:
            results.append(self._settings.results, without_paths(line, self._settings))
            print(
                f"{part.name:42} {outcome:20} {seconds:6.1f} s" + (f"  {said.splitlines()[-1][:120]}" if said else ""),
                flush=True,
            )

    def batch(self, parts: List[Part]) -> None:
        """Parts of one worker. If it dies or hangs, the part that was under way has failed, and a new one goes on."""
        left = list(parts)
        while left and not self.out_of_time():
            left = self._some(left)

    def _some(self, parts: List[Part]) -> List[Part]:
        """Runs parts in one process. Returns those that it did not come to."""
        worker = Worker(self._settings, parts[0].worker, parts)
        left, begun, began = list(parts), False, time.monotonic()
        try:
            while left:
                limit = left[0].seconds if begun else STARTING
                try:
                    message = worker.says(min(began + limit, self._until))
                except TimeoutError:
                    if not self.out_of_time():
                        self._record(
                            left.pop(0), results.EXCEEDED, time.monotonic() - began, {}, f"{limit:g} s\n{worker.tail()}"
                        )
                    return left
                if message is None:
                    how = worker.end()
                    self._record(left.pop(0), results.FAILED, time.monotonic() - began, {}, f"{worker.tail()}\n{how}")
                    return left
                if "begins" in message:
                    begun, began = True, time.monotonic()
                    continue
                part = left.pop(0)
                seconds, begun, began = time.monotonic() - began, False, time.monotonic()
                self._record(part, message["outcome"], seconds, message.get("found", {}), message.get("said", ""))
            return []
        finally:
            if worker.process.returncode is None:
                worker.end()


def pending(settings: Settings) -> List[Part]:
    lines = results.read(settings.results)
    over: Set[str] = {
        line["part"]
        for line in lines
        if not settings.again or line.get("outcome") not in (results.FAILED, results.EXCEEDED, results.DIFFERS)
    }
    chosen = [p for p in settings.catalog() if not settings.only or any(p.name.startswith(o) for o in settings.only)]
    return [part for part in chosen if part.name not in over]


def batches(parts: List[Part]) -> Iterator[List[Part]]:
    """Neighbors of one worker. Each size of a model has a process of its own, whose memory is free afterwards."""
    group: List[Part] = []
    for part in parts:
        if group and key_of(part) != key_of(group[0]):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def key_of(part: Part) -> str:
    return part.name.rsplit("/", 1)[0] if part.worker == "steps" else part.worker


def host_lane(run: Run, parts: List[Part], threads: int) -> List[threading.Thread]:
    """Starts threads that run parts of the host, each in a process of its own."""
    waiting: "queue.SimpleQueue[Part]" = queue.SimpleQueue()
    for part in parts:
        waiting.put(part)

    def work() -> None:
        while not run.out_of_time():
            try:
                run.batch([waiting.get_nowait()])
            except queue.Empty:
                return

    started = [threading.Thread(target=work) for _ in range(min(threads, len(parts)))]
    for thread in started:
        thread.start()
    return started


def run_parts(settings: Settings) -> List[Part]:
    """Runs what is pending. Returns what is left."""
    parts = pending(settings)
    run = Run(settings)
    cpus = len(os.sched_getaffinity(0))
    threads = host_lane(run, [p for p in parts if p.lane == HOST], cpus if settings.dry else max(1, cpus // 4))
    for group in batches([p for p in parts if p.lane == CARD]):
        if group[0].quiet or group[0].worker == "truth":  # which needs the sizes that the host's lane has chosen
            for thread in threads:
                thread.join()
        run.batch(group)
    for thread in threads:
        thread.join()
    return pending(settings)


def parse(arguments: List[str]) -> Settings:
    parser = argparse.ArgumentParser(prog="scripts/gpu-proof", description="Runs the proof on a GPU, part by part.")
    parser.add_argument(
        "--results", type=pathlib.Path, help="file of the results (bin/gpu-proof.jsonl; dry: bin/gpu-proof-dry.jsonl)"
    )
    parser.add_argument("--limit", type=float, default=480, help="seconds for the run (480)")
    parser.add_argument(
        "--dry", action="store_true", help="without a GPU: on the stand-in device and on the ghost, with small sizes"
    )
    parser.add_argument(
        "--again", action="store_true", help="also run parts again that failed, differed or exceeded their limit"
    )
    parser.add_argument("only", nargs="*", help="parts whose names begin so, such as correctness or truth/llama")
    given = parser.parse_args(arguments)
    path = given.results or ROOT / "bin" / ("gpu-proof-dry.jsonl" if given.dry else "gpu-proof.jsonl")
    catalog = dry_parts if given.dry else all_parts
    return Settings(path.absolute(), given.limit, given.dry, given.again, given.only, catalog)


def prepare(settings: Settings) -> None:
    """Makes sure that the results are of this machine, and begins them where there are none."""
    settings.results.parent.mkdir(parents=True, exist_ok=True)
    results.cut_unfinished(settings.results)
    now, lines = describe(settings), results.read(settings.results)
    before = results.machine(lines)
    if before is not None:
        same_machine(before, now, settings.results)
    elif lines:
        raise results.BadResults(
            f"{settings.results}: found no line of the machine, expected one first: name another file"
        )
    else:
        results.append(settings.results, now)


def main(arguments: List[str]) -> int:
    settings = parse(arguments)
    lacks = missing(settings)
    if lacks:
        print("the proof cannot begin:", *lacks, sep="\n  ", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        prepare(settings)
        left = run_parts(settings)
    except results.BadResults as error:
        print(error, file=sys.stderr)
        return 2
    lines = [line for line in results.read(settings.results) if line["part"] != "machine"]
    good = sum(line["outcome"] in (results.HOLDS, results.LEFT_OUT) for line in lines)
    print(f"{len(lines)} parts have a result, {len(lines) - good} of them are not as expected: {settings.results}")
    if left:
        print(f"{len(left)} parts are left, the next one is {left[0].name}: run the same command again")
        return 1
    return 0 if good == len(lines) else 3
