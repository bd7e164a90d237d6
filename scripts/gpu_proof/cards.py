"""The planner's name of the card that was found."""

import functools
import json
import os
import pathlib
import re
import subprocess
from typing import Dict, List, Optional

from gpu_proof import results


def named(card: str, size: int, known: List[Dict]) -> Optional[str]:
    """The kind all of whose words are in the card's name; of several, that whose memory is nearest."""
    words = set(re.split(r"[\s-]+", card.lower()))
    fitting = [k for k in known if set(re.sub(r"-\d+gb$", "", k["name"].lower()).split("-")) <= words]
    best = min(fitting, key=lambda k: abs(k["memory_bytes"] - size), default=None)
    return best and best["name"]


@functools.lru_cache(maxsize=1)
def flags() -> List[str]:
    """Flags of the planner for this card, with the memory that torch sees of it."""
    machine = results.machine(results.read(pathlib.Path(os.environ["GPU_PROOF_RESULTS"])))
    asked = [os.environ["PLIMSOLL"], "models", "--gpus", "--json"]
    known = json.loads(subprocess.run(asked, stdout=subprocess.PIPE, check=True).stdout)["gpus"]
    name = named(machine["card"], machine["card_bytes"], known)
    return ["--gpu", name] if name else ["--gpu-memory", str(machine["card_bytes"])]
