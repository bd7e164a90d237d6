"""Diagnosis: what Plimsoll says of this machine, of a job that has run out of memory, and of one that it watches."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List

from gpu_proof import cards, plans, results

DRY = os.environ.get("GPU_PROOF_DEVICE") != "cuda"
PROGRAM = os.environ["PLIMSOLL"]
TEXT = 3000  # characters of an answer that are kept
SECONDS = 3 if DRY else 30


def answer(*arguments: str, codes: tuple = (0,)) -> str:
    done = subprocess.run([PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode not in codes:
        raise RuntimeError(
            f"plimsoll {' '.join(arguments)} ended with exit code {done.returncode}: {done.stderr[-800:]}"
        )
    return done.stdout


def topology() -> Dict[str, Any]:
    """The machine as text, and as a recording that tests can read."""
    recording = pathlib.Path(os.environ["GPU_PROOF_SCRATCH"]) / "machine.txtar"
    answer("topology", "--record", str(recording))
    return {"text": answer("topology")[:TEXT], "recording": recording.read_text()[: 40 * TEXT]}


def command(name: str, batch: int, *options: str) -> List[str]:
    return [sys.executable, "-m", "gpu_proof.job", "--job", name, "--batch", str(batch), *options]


def batch_for(name: str) -> int:
    found = results.found(results.read(pathlib.Path(os.environ["GPU_PROOF_RESULTS"])), f"plans/{name}")
    return plans.batch_of(found, name)


def out_of_memory() -> Dict[str, Any]:
    """The log and the snapshot of the job that runs out. In a dry run it runs out on the ghost."""
    name = "llama-runs-out"
    with tempfile.TemporaryDirectory() as folder:
        log, snapshot = pathlib.Path(folder) / "train.log", pathlib.Path(folder) / "oom.pickle"
        program = command(name, batch_for(name), "--snapshot", str(snapshot))
        if DRY:
            program = [
                PROGRAM,
                "plan",
                *cards.flags(),
                "--snapshot",
                str(snapshot),
                "--",
                *command(name, batch_for(name)),
            ]
        with open(log, "w") as output:
            code = subprocess.run(program, stdout=output, stderr=output).returncode
        of_log = json.loads(answer("explain", str(log), "--json", codes=(0, 5)))
        text = answer("explain", str(log), codes=(0, 5))
        of_snapshot = answer("explain", str(snapshot), codes=(0, 5)) if snapshot.exists() else ""
        print(log.read_text()[-2000:])
    named = "GPU" in text.split("\n")[0] and "memory" in text
    return {
        "exit_code": code,
        "log": text[:TEXT],
        "snapshot": of_snapshot[:TEXT],
        "schema": of_log.get("schema"),
        "holds": bool(named and of_snapshot and code != 0),
    }


def recording() -> Dict[str, Any]:
    """A job recorded from its start, and watched from beside; then its recording is held to its plan."""
    name = "llama-checkpointing"
    batch = 1 if DRY else batch_for(name)
    with tempfile.TemporaryDirectory() as folder:
        plan, run, watched = (str(pathlib.Path(folder) / n) for n in ("plan.json", "run.jsonl", "watch.jsonl"))
        answer("plan", *cards.flags(), "--out", plan, "--", *command(name, batch_for(name)), codes=(0, 3))
        options = ["--seconds", str(SECONDS), *(["--tiny"] if DRY else [])]
        job = subprocess.Popen([PROGRAM, "run", "--record", run, "--", *command(name, batch, *options)])
        time.sleep(1 if DRY else 5)
        watching = subprocess.run([PROGRAM, "watch", str(job.pid), "--record", watched], capture_output=True, text=True)
        code = job.wait()
        compared = answer("compare", plan, run, codes=(0, 4))
        kinds = [json.loads(line).get("type") or json.loads(line).get("kind") for line in open(run)]
        return {
            "exit_code": code,
            "watch_exit_code": watching.returncode,
            "lines": len(kinds),
            "watched_lines": sum(1 for _ in open(watched)),
            "compare": compared[:TEXT],
            "holds": code == 0 and watching.returncode == 0 and len(kinds) > 2,
        }


def run(case: str) -> Dict[str, Any]:
    return {"topology": topology, "out-of-memory": out_of_memory, "recording": recording}[case]()
