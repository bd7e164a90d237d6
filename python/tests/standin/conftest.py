"""These tests have a process of their own: the stand-in device is torch's accelerator there."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from standin import device


@pytest.fixture(scope="session", autouse=True)
def built():
    device.load()


@pytest.fixture(autouse=True)
def late(deterministic):
    """Streams are late, and nothing is under way between tests. The CPU's attention has a kernel of its own."""
    torch.standin.set_delays(seed=1, most_us=300)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.standin.synchronize()
    assert torch.ops.standin.pinned_bytes() == 0


@pytest.fixture
def quick_again():
    """Streams that a test has slowed down are as fast as before."""
    yield
    for stream in range(32):
        torch.ops.standin.slow_down(stream, 0)
