"""How a program that is a rank ends."""

import os
import sys


def leave():
    """Ends this process at once, when everything it has to say and to write is out.

    A thread of gloo lets go of a tensor some time after the collective is done, and takes Python's lock for it. Where
    Python is ending by then, it ends the thread instead, and C++ the process: "terminate called without an active
    exception", signal 6. So it does in torch 2.15 without Plimsoll, too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
