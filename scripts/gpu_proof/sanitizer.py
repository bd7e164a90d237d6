"""compute-sanitizer over 20 steps: copies of both kinds of optimizers, without a read or write out of bounds."""

import re
import shutil
import subprocess
import sys
from typing import Any, Dict

from gpu_proof.results import LeftOut


def run(tool: str) -> Dict[str, Any]:
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise LeftOut("compute-sanitizer is not on PATH, nor in /usr/local/cuda/bin")
    command = [
        program,
        "--tool",
        tool,
        "--print-limit",
        "20",
        "--report-api-errors",
        "no",
        sys.executable,
        "-m",
        "gpu_proof.sanitized",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", done.stdout)
    if not errors or "made 20 steps" not in done.stdout:
        raise RuntimeError(f"compute-sanitizer ended with exit code {done.returncode}: {done.stdout[-600:]}")
    return {"errors": int(errors[-1]), "steps": 20, "holds": errors[-1] == "0"}
