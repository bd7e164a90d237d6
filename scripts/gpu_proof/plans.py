"""Plans of a job: its batch is chosen by the planner's flags, and then both ways to plan it say what it holds."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any, Dict, List, Optional

from gpu_proof import cards, jobs
from gpu_proof.results import LeftOut

FITS, DOES_NOT_FIT = 0, 3


def config_folder(job: jobs.Job) -> str:
    folder = pathlib.Path(os.environ["GPU_PROOF_SCRATCH"]) / f"model-{job.name}"  # plans run beside each other
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(jobs.config_of(job.model)))
    return str(folder)


def plan(*arguments: str, limit: float = 140) -> Dict[str, Any]:
    """The plan as a document. What a program has said of itself is its member ``said``."""
    command = [os.environ["PLIMSOLL"], "plan", "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=limit)
    if done.returncode not in (FITS, DOES_NOT_FIT):
        print(done.stderr)
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr[-800:]}")
    said = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"phase"')]
    return {**json.loads(done.stdout), "said": said}


def by_flags(job: jobs.Job, batch: int) -> Dict[str, Any]:
    length = ["--seq-len", str(job.length)] if job.length else []
    return plan(
        "--model",
        config_folder(job),
        "--precision",
        job.precision,
        "--optimizer",
        job.optimizer,
        "--micro-batch",
        str(batch),
        *length,
        *job.flags,
        *cards.flags(),
        *versions(),
    )


def versions() -> List[str]:
    """The releases that are here, for the planner's own model."""
    from gpu_proof.driver import version_of

    named = {"--torch": version_of("torch"), "--transformers": version_of("transformers")}
    return [word for flag, version in named.items() if version for word in (flag, version.split("+")[0])]


def card_of(document: Dict[str, Any]) -> Dict[str, Any]:
    return next(device for device in document["devices"] if device["kind"] == "gpu")


def peak_of(document: Dict[str, Any]) -> int:
    return max(phase["peak_used_bytes"] for phase in card_of(document)["phases"])


def fitting_batch(job: jobs.Job) -> int:
    """The largest batch that takes no more than the job's share of the card; above 1 the smallest that takes more."""
    runs_out = job.fill > 1

    def share(batch: int) -> float:
        document = by_flags(job, batch)
        return peak_of(document) / card_of(document)["capacity_bytes"]

    low, high = 1, 2
    while share(high) <= job.fill and high < 1 << 14:
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if share(middle) <= job.fill else (low, middle)
    return high if runs_out else low


def figures(document: Dict[str, Any]) -> Dict[str, Any]:
    """What a plan says of the card, phase by phase, of the host and of time."""
    card = card_of(document)
    phases = {
        "/".join(filter(None, (p["phase"], p.get("iteration", "")))): {
            "peak_allocated": p["peak_allocated_bytes"],
            "peak_reserved": p["peak_reserved_bytes"],
            "end_allocated": p.get("end_allocated_bytes"),
        }
        for p in card["phases"]
    }
    step = document.get("step_time") or {}
    return {
        "verdict": document["verdict"],
        "phases": phases,
        "peak_used": peak_of(document),
        "outside": sum(c["bytes"] for c in card.get("outside_allocator", [])),
        "host": host_peak(document),
        "step_seconds": step.get("total_seconds"),
        "said": by_phase(document["said"]),
    }


def by_phase(lines: List[Dict[str, Any]]) -> Dict[str, Any]:
    """What a program has said of its phases, by the names that plans give them."""
    named = [("/".join(filter(None, (line["phase"], line["iteration"]))), line) for line in lines]
    return {name: {k: v for k, v in line.items() if k not in ("phase", "iteration")} for name, line in named}


def host_peak(document: Dict[str, Any]) -> Optional[int]:
    peaks = [
        phase["peak_used_bytes"]
        for device in document["devices"]
        if device["kind"] != "gpu"
        for phase in device["phases"]
        if phase.get("peak_used_bytes")
    ]
    return max(peaks, default=None)


def by_program(job: jobs.Job, batch: int, *flags: str) -> Dict[str, Any]:
    program = [sys.executable, "-m", "gpu_proof.job", "--job", job.name, "--batch", str(batch)]
    return plan(*cards.flags(), *flags, "--", *program)


def like(job: jobs.Job) -> jobs.Job:
    """A job that flags cannot say is as large as the job of its model that they can say."""
    if job.unplanned is None:
        return job
    return jobs.Job(job.name, job.model, job.fill, job.length, job.precision, job.optimizer, flags=["--fused-loss"])


def run(name: str) -> Dict[str, Any]:
    job = jobs.BY_NAME[name]
    batch = fitting_batch(like(job))
    flags = None if job.unplanned else figures(by_flags(job, batch))
    return {
        "batch": batch,
        "length": job.length,
        "flags": flags,
        "unplanned": job.unplanned,
        "ghost": figures(by_program(job, batch)),
    }


def batch_of(found: Optional[Dict[str, Any]], name: str) -> int:
    if not found:
        raise LeftOut(f"plans/{name} has found no batch for this card")
    return found["batch"]
