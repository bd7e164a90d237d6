"""What all tests need: the real program, and a service."""

import gc
import os
import pathlib
import signal

import pytest
import torch
import torch._dynamo  # noqa: F401  The first step of an optimizer imports it: here once, and not in every fork.
from hypothesis import settings

import preloaded
from nightly import nightly, of_every_change
from plimsoll import Service
from plimsoll.service import shared_service
from plimsoll.torch import environment
from transfers import WAYS, use_copies

# A shell that starts tests in the background has them ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is. What every change waits for is the same every time.
settings.register_profile("every change", deadline=None, derandomize=True, max_examples=30, database=None)
settings.register_profile("nightly", deadline=None, max_examples=200)

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


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="run all tests, and try more examples")


def pytest_configure(config):
    settings.load_profile("nightly" if config.getoption("nightly") else "every change")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("nightly"):
        items[:], later = of_every_change(items)
        config.hook.pytest_deselected(items=later)


def pytest_collection_finish():
    """Modules and tests stay: nobody need look whether they are garbage, nor have a page of them for it after a fork."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interpreters():
    yield
    preloaded.close()


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc):
    """Modules that say ``BOTH_WAYS = True`` run every test with shared and with copied gradients and parameters: a change
    waits for the first way alone where the test is marked so.
    """
    if getattr(metafunc.module, "BOTH_WAYS", False):
        first, *others = WAYS
        is_first = metafunc.definition.get_closest_marker("first_way") is not None
        metafunc.parametrize("way", [first, *nightly(*others)] if is_first else WAYS, indirect=True)


@pytest.fixture(autouse=True)
def way(request, monkeypatch):
    """How gradients and parameters reach the arenas. Copies stand for a device such as CUDA."""
    chosen = getattr(request, "param", WAYS[0])
    if chosen == "copied":
        use_copies(monkeypatch, block_bytes=4096)
    return chosen


@pytest.fixture(scope="module")
def one_service():
    """All optimizers of a module that are given no service have one, as those of a program: it lives while it is held here."""
    service, _ = shared_service(environment.job())
    yield service
    assert service.process.poll() is None


@pytest.fixture
def service():
    """A service that outlives the optimizers of a test."""
    service = Service()
    yield service
    service.close()
