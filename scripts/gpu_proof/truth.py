"""Truth: each job runs in a fork of this process, which has imported everything and touched no GPU."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import traceback
from typing import Any, Dict, List

# To ask for CUDA by the driver's library would begin it here, and no fork could use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch  # noqa: E402
import transformers.models.auto.modeling_auto  # noqa: E402, F401  Imported here once, and not in every fork.

with contextlib.suppress(ImportError):
    import peft  # noqa: F401

from gpu_proof import job as program  # noqa: E402
from gpu_proof import jobs, plans, results  # noqa: E402

DRY = os.environ.get("GPU_PROOF_DEVICE") != "cuda"


def in_fork(job: jobs.Job, batch: int) -> List[Dict[str, Any]]:
    """All lines that the job has said. An error is a line, too."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        _train(job, batch, writes)
    os.close(writes)
    with open(reads) as said:
        lines = [json.loads(line) for line in said]
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        lines.append({"signal": os.WTERMSIG(status)})
    return lines


def _train(job: jobs.Job, batch: int, writes: int) -> None:
    def say(line: Dict[str, Any]) -> None:
        os.write(writes, json.dumps(line).encode() + b"\n")

    try:
        if not DRY and not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU in a fork")
        program.train(job, batch, DRY, 0, say)
    except torch.OutOfMemoryError as error:
        say({"out_of_memory": str(error)[:600]})
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"[:600]})
    finally:
        os._exit(0)


def in_process(job: jobs.Job, batch: int) -> List[Dict[str, Any]]:
    """The same in a process that imports everything itself: where an import has begun CUDA, no fork can use it."""
    command = [sys.executable, "-m", "gpu_proof.job", "--job", job.name, "--batch", str(batch), *["--tiny"][: int(DRY)]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    print(done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = (done.stderr.strip().splitlines() or [""])[-1][:600]
    if done.returncode != 0:
        lines.append({"out_of_memory" if "OutOfMemoryError" in last else "error": last})
    return [*lines, {"alone": True}]


def merged(lines: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Phases by name, and all else that was said."""
    found: Dict[str, Any] = {"phases": plans.by_phase([line for line in lines if "phase" in line])}
    for line in lines:
        found.update({} if "phase" in line else line)
    return found


def run(name: str) -> Dict[str, Any]:
    job = jobs.BY_NAME[name]
    planned = results.found(results.read(pathlib.Path(os.environ["GPU_PROOF_RESULTS"])), f"plans/{name}")
    batch = 1 if DRY else plans.batch_of(planned, name)
    found = merged(in_fork(job, batch))
    if "error" in found or DRY and job is jobs.JOBS[0]:  # a dry run goes both ways once
        found = merged(in_process(job, batch))
    if "error" in found or "signal" in found:
        raise RuntimeError(found.get("error") or f"the job ended by signal {found['signal']}")
    ran_out = "out_of_memory" in found
    return {**found, "batch": batch, "holds": ran_out == (job.fill > 1 and not DRY)}
