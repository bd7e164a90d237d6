"""These tests have a process of their own: the stand-in device is torch's accelerator there."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from plimsoll.torch.pinning import DRIVERS
from standin import device


class Driver:
    """Pins pages for the stand-in device."""

    name, call = "the stand-in's driver", "host_register"

    def __init__(self, device):
        pass

    def register(self, address, size):
        return torch.ops.standin.host_register(address, size)

    def unregister(self, address):
        return torch.ops.standin.host_unregister(address)

    def describe(self, error):
        return {2: "out of memory", 712: "already registered", 713: "not registered"}[error]

    def take_last_error(self):
        """It leaves none."""


@pytest.fixture(scope="session", autouse=True)
def built():
    device.load()
    DRIVERS["standin"] = Driver


@pytest.fixture(autouse=True)
def late(deterministic):
    """Streams are late, and nothing is under way between tests. The CPU's attention has a kernel of its own."""
    torch.standin.set_delays(seed=1, most_us=300)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.standin.synchronize()
    assert torch.ops.standin.pinned_bytes() == 0
