"""Runs scripts/measure/train.py in a process of its own: it changes torch."""

import contextlib
import io
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[4] / "scripts" / "measure"))
import train  # noqa: E402


def measure(arguments):
    """Returns the document that the script prints."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        sys.argv = ["train.py", *arguments]
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            train.main()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(text.getvalue())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{arguments}: the training failed")
    return json.loads(text)
