"""Runs a program to which the kernel denies system calls, as the sandboxes of some hosts do.

Arguments: the names of the calls with commas between, and the command. Whatever the command starts is denied them, too.
"""

import ctypes
import os
import platform
import struct
import sys

_NUMBERS = {
    "x86_64": {"socket": 41, "socketpair": 53, "memfd_create": 319},
    "aarch64": {"socket": 198, "socketpair": 199, "memfd_create": 279},
}[platform.machine()]

_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K
_ALLOW, _FAIL, _EPERM = 0x7FFF0000, 0x00050000, 1


def _instruction(code, jump_true, jump_false, value):
    return struct.pack("HBBI", code, jump_true, jump_false, value)


def deny(calls):
    """Denies this process the calls of these names."""
    program = _instruction(_LOAD, 0, 0, 0)  # the number of the call
    for call in calls:
        program += _instruction(_JUMP_IF_EQUAL, 0, 1, _NUMBERS[call]) + _instruction(_RETURN, 0, 0, _FAIL | _EPERM)
    program += _instruction(_RETURN, 0, 0, _ALLOW)
    memory = ctypes.create_string_buffer(program)
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(memory)))
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(described), 0, 0)):
        if library.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({arguments[0]})")


if __name__ == "__main__":
    deny(sys.argv[1].split(","))
    os.execv(sys.argv[2], sys.argv[2:])
