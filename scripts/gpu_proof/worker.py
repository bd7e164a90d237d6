"""A process that runs parts of one worker: python -m gpu_proof.worker DESCRIPTOR MODULE PART..."""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, Dict

from gpu_proof import results


def say(descriptor: int, message: Dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(message).encode() + b"\n")


def run(cases: Any, name: str) -> Dict[str, Any]:
    """The message of a part: a case returns what it has found, with ``holds`` where it has a judgement."""
    try:
        found = cases.run(*name.split("/")[1:])
    except results.LeftOut as reason:
        return {"outcome": results.LEFT_OUT, "said": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"outcome": results.FAILED, "said": f"{type(error).__name__}: {error}"[:2000]}
    return {"outcome": results.HOLDS if found.pop("holds", True) else results.DIFFERS, "found": found}


def main(descriptor: int, module: str, *names: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive the driver
    os.set_inheritable(descriptor, False)
    cases = importlib.import_module(module)
    for name in names:
        say(descriptor, {"begins": name})
        say(descriptor, run(cases, name))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo may outlive Python's end, and abort it


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
