"""What all tests need: the real program, and a service."""

import os
import pathlib

import pytest
import torch

from plimsoll import Service

ROOT = pathlib.Path(__file__).resolve().parents[2]
os.environ.setdefault("PLIMSOLL", str(ROOT / "bin" / "plimsoll"))
for variable in ("PLIMSOLL_SOCKET", "PLIMSOLL_JOB", "PLIMSOLL_OPTIMIZER_CPUS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(variable, None)


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def service():
    """A service that outlives the optimizers of a test."""
    service = Service()
    yield service
    service.close()
