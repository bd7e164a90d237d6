"""What all tests need: the real program, and a service."""

import os
import pathlib
import signal

import pytest
import torch
from hypothesis import settings

import preloaded
from plimsoll import Service
from transfers import WAYS, use_copies

# A shell that starts tests in the background has them ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("plimsoll", deadline=None)
settings.load_profile("plimsoll")

ROOT = pathlib.Path(__file__).resolve().parents[2]
os.environ.setdefault("PLIMSOLL", str(ROOT / "bin" / "plimsoll"))
for variable in (
    "PLIMSOLL_SOCKET",
    "PLIMSOLL_JOB",
    "PLIMSOLL_OPTIMIZER_CPUS",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "PLIMSOLL_LOCAL_RANKS",
):
    os.environ.pop(variable, None)


@pytest.fixture(scope="session", autouse=True)
def _interpreters():
    yield
    preloaded.close()


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc):
    """Modules that say ``BOTH_WAYS = True`` run every test with shared and with copied gradients and parameters."""
    if getattr(metafunc.module, "BOTH_WAYS", False):
        metafunc.parametrize("way", WAYS, indirect=True)


@pytest.fixture(autouse=True)
def way(request, monkeypatch):
    """How gradients and parameters reach the arenas. Copies stand for a device such as CUDA."""
    chosen = getattr(request, "param", WAYS[0])
    if chosen == "copied":
        use_copies(monkeypatch, block_bytes=4096)
    return chosen


@pytest.fixture
def service():
    """A service that outlives the optimizers of a test."""
    service = Service()
    yield service
    service.close()
