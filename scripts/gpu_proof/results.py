"""Results: JSON lines, of which the first describes the machine and every other one a part."""

import json
import os
import pathlib
from typing import Any, Dict, List, Optional

SCHEMA = "plimsoll.gpu-proof/1"

#: What a part came to. Every part with one of these is over, and no later run repeats it.
HOLDS, DIFFERS, FAILED, EXCEEDED, LEFT_OUT = "holds", "differs", "failed", "exceeded its limit", "left out"

Line = Dict[str, Any]


class BadResults(Exception):
    """Results that cannot be read or gone on with: what was found, where, and how to mend it."""


class LeftOut(Exception):
    """A part that this machine cannot run, with the reason. It is no failure."""


def read(path: pathlib.Path) -> List[Line]:
    """All whole lines. A run that was killed while it wrote leaves a last line that has no end: it is left out."""
    if not path.exists():
        return []
    lines = []
    *whole, _ = path.read_bytes().split(b"\n")
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or "part" not in line:
            raise BadResults(
                f"{path}:{number}: found {text[:60]!r}, expected a JSON object with a part: name another file"
            )
        lines.append(line)
    return lines


def cut_unfinished(path: pathlib.Path) -> None:
    """Takes the unfinished last line away, so that the next one begins a line of its own."""
    if not path.exists():
        return
    text = path.read_bytes()
    end = text.rfind(b"\n") + 1
    if end < len(text):
        os.truncate(path, end)


def append(path: pathlib.Path, line: Line) -> None:
    """Writes a line to the disk, before the next part begins."""
    with open(path, "ab") as file:
        file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def machine(lines: List[Line]) -> Optional[Line]:
    return next((line for line in lines if line["part"] == "machine"), None)


def found(lines: List[Line], part: str) -> Optional[Dict[str, Any]]:
    """What a part has found, if it has a result."""
    return next((line.get("found") for line in reversed(lines) if line["part"] == part), None)
